//! Collectives of several nodes on GPUs: on cudarc's slices and on raw pointers, in stream order.
//!
//! A slice is reduced in place in the output: a reduce-scatter may write to this rank's share of its input, and an
//! all-gather may read from this rank's share of its output.

use std::sync::Arc;

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
    /// Creates a rank of a world of several nodes, from the communicator of its node and an engine between the ranks
    /// with the same local rank. Collective among all ranks, which check on `stream` that all nodes have the same
    /// number of ranks.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] on all ranks if nodes have different numbers of ranks, and if the stream is being
    ///   captured.
    /// * [`Error::InvalidStream`] for a stream of another context.
    /// * [`Error::Driver`] and the errors of the communicator and of the engine.
    ///
    /// See [`NcclNodes`](super::NcclNodes) for an example.
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
                // SAFETY: the slice has this number of i64 on the device, is exclusively borrowed, and is freed in the
                // order of the stream, which belongs to this context and is not being captured.
                self.between_nodes(unsafe {
                    self.engine.all_reduce(address, count, DType::I64, ReduceOp::Min, stream.cu_stream())
                })?;
            }
            self.read(stream, &device, &mut minima)?;
        }
        let mut minima = self.shape_of_minima(minima).to_minima();
        let mut device = stream.clone_htod(&minima).map_err(driver("cuMemcpyHtoDAsync"))?;
        self.in_node(self.local.all_reduce_in_place(stream, &mut device, ReduceOp::Min))?;
        self.read(stream, &device, &mut minima)?;
        Ok(Shape::of_minima(minima))
    }

    /// Copies what a call has written to the host, and checks that the call succeeded.
    fn read(&self, stream: &Arc<CudaStream>, device: &CudaSlice<i64>, values: &mut [i64]) -> Result<()> {
        // While a copy to pageable memory waits for a kernel, no other thread can launch one. So the kernels end first.
        self.synchronize(stream)?;
        stream.memcpy_dtoh(device, values).map_err(driver("cuMemcpyDtoHAsync"))?;
        self.synchronize(stream)
    }

    /// Reduces the `input`s of all ranks of all nodes element by element into every rank's `output`, in the order of
    /// `stream`.
    ///
    /// This returns when the work is enqueued. Calls on different streams run one after the other, like those of a
    /// communicator.
    ///
    /// # Errors
    ///
    /// * [`Error::LengthMismatch`] if `input` and `output` differ in length.
    /// * [`Error::InvalidStream`] if the stream, or the stream of a slice, belongs to another context.
    /// * [`Error::Unavailable`] between several nodes for an average of integers, for a premultiplied sum, and for a
    ///   stream that is being captured.
    /// * The errors of the communicator and of the engine. They poison this world: see [`Hierarchical`].
    ///
    /// A failure on the stream is returned by the next call, by [`Hierarchical::synchronize`] or by
    /// [`Hierarchical::check`].
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # use fast_allreduce::{hierarchical::{Hierarchical, InterNode}, Cuda, ReduceOp, Result};
    /// # fn example(
    /// #     world: Hierarchical<Cuda, impl InterNode<Cuda>>,
    /// #     stream: Arc<CudaStream>,
    /// #     gradients: CudaSlice<f32>,
    /// #     mut mean: CudaSlice<f32>,
    /// # ) -> Result<()> {
    /// world.all_reduce(&stream, &gradients, &mut mean, ReduceOp::Avg)?;
    /// world.check()?; // failures that are known so far
    /// world.synchronize(&stream)?;
    /// # Ok(())
    /// # }
    /// ```
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
            return self.first_step(self.local.all_reduce(stream, input, output, op));
        }
        self.check_stream(stream)?;
        self.check_context(input.stream())?;
        self.check_context(output.stream())?;
        let count = input.len();
        let slices = self.local.recorded(|| (input.device_ptr(stream), output.device_ptr_mut(stream)));
        let ((input, input_used), (output, output_used)) = self.in_node(slices)?;
        // SAFETY: both slices have `count` elements of T until the work on the stream is done, since cudarc orders
        // frees after it; an exclusive borrow overlaps with no other.
        let done = unsafe { self.all_reduce_raw(stream, input, output, count, T::DTYPE, op) };
        done.and(self.in_node(self.local.recorded(|| drop((input_used, output_used)))))
    }

    /// Reduces the `data` of all ranks of all nodes element by element, in place, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// Those of [`Hierarchical::all_reduce`], except [`Error::LengthMismatch`].
    pub fn all_reduce_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        if self.engine.nodes() == 1 {
            self.check()?;
            return self.first_step(self.local.all_reduce_in_place(stream, data, op));
        }
        self.check_stream(stream)?;
        self.check_context(data.stream())?;
        let count = data.len();
        let (address, used) = self.in_node(self.local.recorded(|| data.device_ptr_mut(stream)))?;
        // SAFETY: the slice has `count` elements of T until the work on the stream is done, since cudarc orders frees
        // after it, and is exclusively borrowed; input and output may be equal.
        let done = unsafe { self.all_reduce_raw(stream, address, address, count, T::DTYPE, op) };
        done.and(self.in_node(self.local.recorded(|| drop(used))))
    }

    /// Reduces like [`Hierarchical::all_reduce`], on raw pointers.
    ///
    /// # Errors
    ///
    /// Those of [`Hierarchical::all_reduce`], except [`Error::LengthMismatch`]; [`Error::InvalidPointer`] for null,
    /// misaligned and host pointers; [`Error::InvalidSetting`] if the message exceeds the address space.
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, `input` is valid for reads and `output` for writes of `count` elements of
    /// `dtype`, and nothing outside the order of the stream writes to `input` or accesses `output`. They are disjoint
    /// or equal.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{sys::CUdeviceptr, CudaStream};
    /// # use fast_allreduce::{hierarchical::{Hierarchical, InterNode}, Cuda, DType, ReduceOp, Result};
    /// # fn example(
    /// #     world: Hierarchical<Cuda, impl InterNode<Cuda>>,
    /// #     stream: Arc<CudaStream>,
    /// #     data: CUdeviceptr,
    /// # ) -> Result<()> {
    /// // SAFETY: `data` points to 1000 floats, which nobody else uses before the stream has been synchronised.
    /// unsafe { world.all_reduce_raw(&stream, data, data, 1000, DType::F32, ReduceOp::Sum)? };
    /// world.synchronize(&stream)?;
    /// # Ok(())
    /// # }
    /// ```
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
            // SAFETY: the caller guarantees the same.
            let done = unsafe {
                self.local.collective_raw(stream.cu_stream(), collective, input, output, count, dtype)
            };
            return self.first_step(done);
        }
        check_operation(dtype, op)?;
        self.check_stream(stream)?;
        self.check_memory([("input", input), ("output", output)], count, dtype)?;
        // The steps of a call are not interleaved with those of another.
        let _calls = self.calls.enter()?;
        let counts = slices(count, dtype.size(), self.local.world_size());
        let rank = self.local.rank();
        let before: usize = counts[..rank].iter().sum();
        let slice = output + (before * dtype.size()) as u64;
        let scatter = Collective::ReduceScatterV(op, &counts);
        // SAFETY: the slice is this rank's share of the output. The output is the input or disjoint from it; the caller
        // guarantees the rest.
        self.first_step(unsafe {
            self.local.collective_raw(stream.cu_stream(), scatter, input, slice, 0, dtype)
        })?;
        // SAFETY: the slice is a part of the output with this number of elements, accessed in the order of the stream,
        // which is not being captured.
        self.between_nodes(self.run_steps(|| unsafe {
            self.reduce_between(stream, Call::new(count, dtype, op), slice, counts[rank], dtype, op)
        }))?;
        let gather = Collective::AllGatherV(&counts);
        // SAFETY: the input is this rank's share of the output; the caller guarantees the rest.
        let gathered =
            unsafe { self.local.collective_raw(stream.cu_stream(), gather, slice, output, 0, dtype) };
        if gathered.is_err() {
            // The other ranks may have left because calls differ; this rank then finds the difference itself.
            stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
            self.between_nodes(self.check_calls())?;
        }
        self.in_node(gathered)
    }

    /// Enqueues the allreduce between nodes, and the comparison of their calls.
    ///
    /// # Safety
    ///
    /// That of [`InterNode::all_reduce`].
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
        // SAFETY: the caller guarantees the same.
        if let Some(started) = unsafe { engine.start_all_reduce(call, slice, count, dtype, op, raw) } {
            return started?();
        }
        self.compare(stream, call)?;
        // Ranks with the same local rank have slices of equal length: if they are empty, none of them calls the engine.
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the same.
        unsafe { engine.all_reduce(slice, count, dtype, op, raw) }
    }

    /// Compares a call with those of the other nodes, in the order of the stream; [`Self::check`] returns the result.
    fn compare(&self, stream: &Arc<CudaStream>, call: Call) -> Result<()> {
        let Some(comparisons) = self.comparisons.get() else { return Ok(()) };
        comparisons.start(stream, call, self.engine.node(), |address, count| {
            // SAFETY: the memory has this number of i64 on the device, and nothing else uses it until the stream has
            // passed the copy that follows. The stream belongs to this context and is not being captured.
            unsafe { self.engine.all_reduce(address, count, DType::I64, ReduceOp::Min, stream.cu_stream()) }
        })
    }

    /// Checks that the calls that streams have completed were equal on all nodes.
    fn check_calls(&self) -> Result<()> {
        self.comparisons.get().map_or(Ok(()), |comparisons| comparisons.check(self.engine.node()))
    }

    /// Waits for the work on a stream, and checks that the calls on it succeeded.
    ///
    /// # Errors
    ///
    /// * [`Error::Timeout`] with the ranks that did not come, [`Error::PeerLost`] or [`Error::PeerFailed`].
    /// * [`Error::Disagreement`] if nodes made different calls.
    /// * [`Error::Driver`] and other errors of the communicator and of the engine.
    pub fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        let inside = self.local.synchronize(stream);
        if inside.is_err() {
            stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        }
        // Failures between nodes are reported first: they abort waits inside the node, and may be caused by calls that
        // differ.
        self.between_nodes(self.check_calls().and_then(|()| self.engine.check()))?;
        self.in_node(inside)
    }

    /// Returns the first failure of this rank that is known so far, without waiting.
    ///
    /// # Errors
    ///
    /// That failure; see [`Hierarchical::synchronize`].
    pub fn check(&self) -> Result<()> {
        self.healthy()?;
        self.between_nodes(self.check_calls().and_then(|()| self.engine.check()))?;
        self.in_node(self.local.check())
    }

    /// Handles the result of the first steps of a call. Invalid arguments are refused by all ranks alike, so that no
    /// rank waits and the world stays usable. A failure of this rank alone has poisoned its communicator.
    fn first_step<T>(&self, result: Result<T>) -> Result<T> {
        match self.local.check() {
            Ok(()) => result,
            Err(_) => self.in_node(result),
        }
    }

    /// Refuses arguments that would otherwise fail only after ranks have started the call.
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
                self.first_step(self.local.check_address(which, address, dtype.size()))?;
            }
        }
        Ok(())
    }

    /// Refuses a stream of another context, and one that is being captured.
    fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        self.check_context(stream)?;
        if self.first_step(self.local.is_captured(stream))? {
            return Err(Error::Unavailable {
                what: "a call between nodes on a stream that is being captured".into(),
                reason: "the waits of a replay would have no time limit: end the capture before the call"
                    .into(),
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
