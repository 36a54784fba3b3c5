//! The collectives of several nodes whose ranks are on GPUs: on cudarc's slices and on raw pointers, in stream order.
//!
//! A slice is reduced where it lies in the output: a reduce-scatter may write to this rank's share of its input, and an
//! all-gather may read from that of its output.

use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::comparisons::Comparisons;
use super::{check_operation, slices, Call, Hierarchical, InterNode, Shape};
use crate::call::Collective;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::cuda::driver::driver;
use crate::device::cuda::Cuda;
use crate::element::Element;
use crate::error::{Error, Result};

impl<E: InterNode<Cuda>> Hierarchical<Cuda, E> {
    /// A rank of a world of several nodes, from the communicator of its node and an engine between the ranks that have
    /// its place. Collective among all ranks, which see whether the nodes are equal, on `stream`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] on all ranks if nodes have different numbers of ranks, and while the stream is captured;
    /// [`Error::InvalidStream`], [`Error::Driver`]; the errors of either.
    pub fn on_stream(local: Communicator<Cuda>, engine: E, stream: &Arc<CudaStream>) -> Result<Self> {
        let world = Self::of(local, engine);
        world.check_stream(stream)?;
        let comparisons = Comparisons::new(stream, world.engine.nodes())?;
        world.comparisons.get_or_init(|| comparisons);
        world.find_shape(stream).and_then(Shape::check).map(|()| world)
    }

    fn find_shape(&self, stream: &Arc<CudaStream>) -> Result<Shape> {
        let mut minima = self.own_minima();
        if self.engine.nodes() > 1 {
            let mut device = stream.clone_htod(&minima).map_err(driver("cuMemcpyHtoDAsync"))?;
            let count = minima.len();
            {
                let (address, _used) = device.device_ptr_mut(stream);
                // SAFETY: as many i64 on the device, exclusively borrowed and freed in the order of the stream, which is of
                // this context and not captured.
                self.between(unsafe {
                    self.engine.all_reduce(address, count, DType::I64, ReduceOp::Min, stream.cu_stream())
                })?;
            }
            self.read(stream, &device, &mut minima)?;
        }
        let mut minima = self.shape_of_place(minima).to_minima();
        let mut device = stream.clone_htod(&minima).map_err(driver("cuMemcpyHtoDAsync"))?;
        self.inside(self.local.all_reduce_in_place(stream, &mut device, ReduceOp::Min))?;
        self.read(stream, &device, &mut minima)?;
        Ok(Shape::of_minima(minima))
    }

    /// What a call has written, unless it has failed.
    fn read(&self, stream: &Arc<CudaStream>, device: &CudaSlice<i64>, values: &mut [i64]) -> Result<()> {
        stream.memcpy_dtoh(device, values).map_err(driver("cuMemcpyDtoHAsync"))?;
        self.synchronize(stream)
    }

    /// Reduces all nodes' ranks' `input`s element by element into every rank's `output`, in the order of `stream`.
    ///
    /// It returns when the work is on the stream. Calls that do not follow each other on one stream wait for each other, as
    /// those of the communicator do.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidStream`] for a stream of another context, and for a slice of one;
    /// [`Error::Unavailable`] for an average of integers between nodes, and where there are several, for a stream that is
    /// captured; those of the communicator and of the engine. What goes wrong on the stream is the error of the next call, of
    /// [`Hierarchical::synchronize`] or [`Hierarchical::check`]: see [`Hierarchical`] on what follows.
    pub fn all_reduce<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        if self.engine.nodes() == 1 {
            self.check()?;
            return self.first(self.local.all_reduce(stream, input, output, op));
        }
        self.check_stream(stream)?;
        self.check_context(input.stream())?;
        self.check_context(output.stream())?;
        let count = input.len();
        let slices = self.local.recorded(|| (input.device_ptr(stream), output.device_ptr_mut(stream)));
        let ((input, input_used), (output, output_used)) = self.inside(slices)?;
        // SAFETY: both hold that many elements of T until the work on the stream is done, which cudarc orders frees after;
        // an exclusive borrow overlaps with no other.
        let done = unsafe { self.all_reduce_raw(stream, input, output, count, T::DTYPE, op) };
        done.and(self.inside(self.local.recorded(|| drop((input_used, output_used)))))
    }

    /// Reduces all nodes' ranks' `data` element by element, in place, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// As [`Hierarchical::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        if self.engine.nodes() == 1 {
            self.check()?;
            return self.first(self.local.all_reduce_in_place(stream, data, op));
        }
        self.check_stream(stream)?;
        self.check_context(data.stream())?;
        let count = data.len();
        let (address, used) = self.inside(self.local.recorded(|| data.device_ptr_mut(stream)))?;
        // SAFETY: as in all_reduce; in place is input == output.
        let done = unsafe { self.all_reduce_raw(stream, address, address, count, T::DTYPE, op) };
        done.and(self.inside(self.local.recorded(|| drop(used))))
    }

    /// [`Hierarchical::all_reduce`] on raw pointers.
    ///
    /// # Errors
    ///
    /// As [`Hierarchical::all_reduce`], and [`Error::InvalidPointer`] for null, misaligned and host pointers.
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, `input` is valid for reads, and `output` for writes, of `count` elements of `dtype`,
    /// and nothing outside the order of the stream writes the one or accesses the other. They are disjoint or the same.
    pub unsafe fn all_reduce_raw(
        &self,
        stream: &Arc<CudaStream>,
        input: CUdeviceptr,
        output: CUdeviceptr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.check()?;
        if self.engine.nodes() == 1 {
            let collective = Collective::AllReduce(op);
            // SAFETY: the caller's.
            let done = unsafe {
                self.local.collective_raw(stream.cu_stream(), collective, input, output, count, dtype)
            };
            return self.first(done);
        }
        check_operation(dtype, op)?;
        self.check_stream(stream)?;
        self.check_memory([("input", input), ("output", output)], count, dtype)?;
        // Between a call's steps comes no other.
        let _calls = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = slices(count, dtype.size(), self.local.world_size());
        let rank = self.local.rank();
        let before: usize = counts[..rank].iter().sum();
        let slice = output + (before * dtype.size()) as u64;
        let scatter = Collective::ReduceScatterV(op, &counts);
        // SAFETY: the slice is this rank's share of the output, which is the input's or disjoint from the input; the rest is
        // the caller's.
        self.first(unsafe {
            self.local.collective_raw(stream.cu_stream(), scatter, input, slice, 0, dtype)
        })?;
        // SAFETY: so many elements of the output, which the stream has come to by then; it is not captured.
        self.between(unsafe {
            self.reduce_between(stream, Call::new(count, dtype, op), slice, counts[rank], dtype, op)
        })?;
        let gather = Collective::AllGatherV(&counts);
        // SAFETY: as for the scatter: the input is this rank's share of the output.
        let gathered =
            unsafe { self.local.collective_raw(stream.cu_stream(), gather, slice, output, 0, dtype) };
        if gathered.is_err() {
            // The others may have left because calls differ, as this rank then finds by itself.
            stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
            self.between(self.compared())?;
        }
        self.inside(gathered)
    }

    /// The allreduce between nodes, which also compare their calls.
    ///
    /// # Safety
    ///
    /// As [`InterNode::all_reduce`].
    unsafe fn reduce_between(
        &self,
        stream: &Arc<CudaStream>,
        call: Call,
        slice: CUdeviceptr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (engine, raw) = (&self.engine, stream.cu_stream());
        // SAFETY: the caller's.
        if let Some(done) = unsafe { engine.compared_all_reduce(call, slice, count, dtype, op, raw) } {
            return done;
        }
        self.compare(stream, call)?;
        // A place has a slice of the same length on all nodes: where it is empty, nobody calls.
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { engine.all_reduce(slice, count, dtype, op, raw) }
    }

    /// Compares a call with those of the other nodes, in the order of the stream: what comes of it is known to [`Self::check`].
    fn compare(&self, stream: &Arc<CudaStream>, call: Call) -> Result<()> {
        let Some(comparisons) = self.comparisons.get() else { return Ok(()) };
        comparisons.start(stream, call, self.engine.node(), |address, count| {
            // SAFETY: as many i64 on the device, which nothing else uses before the stream has come past what follows; it is of
            // this context and not captured.
            unsafe { self.engine.all_reduce(address, count, DType::I64, ReduceOp::Min, stream.cu_stream()) }
        })
    }

    /// Whether the calls that streams have come past were the same on all nodes.
    fn compared(&self) -> Result<()> {
        self.comparisons.get().map_or(Ok(()), |comparisons| comparisons.check(self.engine.node()))
    }

    /// Waits for the work on a stream, and says whether the calls on it succeeded.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`]; [`Error::Timeout`] naming the ranks that did not come; [`Error::Disagreement`] if nodes made other
    /// calls.
    pub fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        let inside = self.local.synchronize(stream);
        if inside.is_err() {
            stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        }
        // Between the nodes first: a failure there ends waits inside. It may come of calls that differ.
        self.between(self.compared().and_then(|()| self.engine.check()))?;
        self.inside(inside)
    }

    /// The first failure of this rank that is known so far. Waits for nothing.
    ///
    /// # Errors
    ///
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.healthy()?;
        self.between(self.compared().and_then(|()| self.engine.check()))?;
        self.inside(self.local.check())
    }

    /// After a call's first steps, which all ranks refuse alike if its arguments are wrong: then none is left behind. What fails on
    /// this rank alone has poisoned its communicator.
    fn first<T>(&self, result: Result<T>) -> Result<T> {
        match self.local.check() {
            Ok(()) => result,
            Err(_) => self.inside(result),
        }
    }

    /// Refuses what fails only after ranks have begun.
    fn check_memory(&self, memory: [(&'static str, u64); 2], count: usize, dtype: DType) -> Result<()> {
        let bytes = count.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize);
        if bytes.is_none() {
            return Err(Error::InvalidSetting {
                name: "count",
                value: count.to_string(),
                expected: "a number of elements that fits the address space",
            });
        }
        if count > 0 {
            for (which, address) in memory {
                self.first(self.local.check_address(which, address, dtype.size()))?;
            }
        }
        Ok(())
    }

    /// Refuses a stream of another context, and one that is captured.
    fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        self.check_context(stream)?;
        if self.first(self.local.is_captured(stream))? {
            return Err(Error::Unavailable {
                what: "a call between nodes on a stream that is captured".into(),
                reason: "nobody would watch the waits of a replay: end the capture before the call".into(),
            });
        }
        Ok(())
    }

    fn check_context(&self, stream: &CudaStream) -> Result<()> {
        let own = self.local.device().context();
        if **stream.context() == **own {
            return Ok(());
        }
        Err(Error::InvalidStream { stream: stream.context().ordinal(), device: own.ordinal() })
    }
}
