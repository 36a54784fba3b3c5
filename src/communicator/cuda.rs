//! The collectives of the CUDA device: on cudarc's slices and on raw pointers, in stream order.

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use super::builder::agree;
use super::message::Message;
use super::{Communicator, Direction, Transfer};
use crate::call::Operation;
use crate::collective::Collective;
use crate::device::all_succeeded;
use crate::device::cuda::Cuda;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::registry::{Buffer, Registration};

impl Communicator<Cuda> {
    /// Reduces the ranks' `input`s element by element into every rank's `output`, in the order of `stream`.
    ///
    /// It returns when the kernels are launched. Any slice or view of this device works, those of stream-ordered pools and
    /// views at odd offsets too, also while the stream is captured into a graph. With cudarc's event tracking the call waits for
    /// the slices' last uses on other streams; without it, that is the caller's. A call on another stream than the last one
    /// waits for it. Per-thread default streams count as one stream for each thread.
    ///
    /// While the stream is captured, event tracking makes no difference but for uses of the slices that are a part of the same
    /// capture, which the call comes after. A graph runs when it is launched, which cudarc does not track: whoever launches it
    /// orders that after the slices' other uses, and those after it. So it is with the communicator's other calls where they are
    /// on another stream than the one that the graph was captured on and is launched on. The first captured call on another
    /// stream than the last call's follows a synchronisation with that one.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidStream`] for a stream of another context, [`Error::InvalidPointer`] for a slice
    /// of another device; [`Error::Driver`]. What goes wrong in
    /// a kernel, such as a rank that does not come, is the error of the next call, of [`Communicator::synchronize`] or
    /// [`Communicator::check`].
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
        self.check_stream(stream)?;
        let (collective, count, dtype) = (Collective::AllReduce(op), input.len(), T::DTYPE);
        self.check_device::<T>("input", input.stream(), |stream| input.device_ptr(stream).0)?;
        let elsewhere = Arc::clone(output.stream());
        self.check_device::<T>("output", &elsewhere, |stream| output.device_ptr_mut(stream).0)?;
        if self.is_captured(stream)? {
            let captured = stream.cu_stream();
            // SAFETY: the stream is of this context, kept alive, and captured. The graph's memory is its launcher's.
            return unsafe {
                let device = self.device();
                let input =
                    device.address_in_capture(captured, |aside| untracked(input.device_ptr(aside)))?;
                let output =
                    device.address_in_capture(captured, |aside| untracked(output.device_ptr_mut(aside)))?;
                self.run(Message { collective, input, output, count, dtype }, captured, Some(stream), true)
            };
        }
        let (input, _input_used) = input.device_ptr(stream);
        let (output, _output_used) = output.device_ptr_mut(stream);
        let message = Message { collective, input, output, count, dtype };
        // SAFETY: both hold that many elements of T until the work on the stream is done, which cudarc orders frees after;
        // an exclusive borrow overlaps with no other. The stream is of this context and kept alive.
        unsafe { self.run(message, stream.cu_stream(), Some(stream), false) }
    }

    /// Reduces the ranks' `data` element by element, in place, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.check_stream(stream)?;
        let count = data.len();
        let elsewhere = Arc::clone(data.stream());
        self.check_device::<T>("input", &elsewhere, |stream| data.device_ptr_mut(stream).0)?;
        let collective = Collective::AllReduce(op);
        let message =
            |address| Message { collective, input: address, output: address, count, dtype: T::DTYPE };
        if self.is_captured(stream)? {
            let captured = stream.cu_stream();
            // SAFETY: as in all_reduce.
            return unsafe {
                let take = |aside: &CudaStream| untracked(data.device_ptr_mut(aside));
                let address = self.device().address_in_capture(captured, take)?;
                self.run(message(address), captured, Some(stream), true)
            };
        }
        let (address, _used) = data.device_ptr_mut(stream);
        // SAFETY: as in all_reduce; in place is input == output.
        unsafe { self.run(message(address), stream.cu_stream(), Some(stream), false) }
    }

    /// [`Communicator::all_reduce`] on raw pointers and a raw stream.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], [`Error::InvalidPointer`] also for null, misaligned and host pointers, and
    /// [`Error::Overlap`] unless the buffers are disjoint or the same.
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, `input` is valid for reads, and `output` for writes, of `count` elements of `dtype`,
    /// and nothing outside the order of the stream writes the one or accesses the other. `stream` is a stream of this device's
    /// context and lives until after the communicator's next call, or its end.
    pub unsafe fn all_reduce_raw(
        &self,
        stream: CUstream,
        input: CUdeviceptr,
        output: CUdeviceptr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let message = Message { collective: Collective::AllReduce(op), input, output, count, dtype };
        message.check(self.rank(), self.world_size())?;
        self.device().bind()?;
        if count > 0 {
            self.device().check_address("input", input, dtype.size())?;
            self.device().check_address("output", output, dtype.size())?;
        }
        // SAFETY: the caller's; the pointers have been checked for alignment, overlap and device.
        unsafe {
            let captured = self.device().capturing(stream)?;
            self.run(message, stream, None, captured)
        }
    }

    /// Any collective on raw pointers, in the order of a stream. A pointer to no elements is not looked at.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce_raw`], and [`Error::InvalidStream`] for a stream of another context.
    ///
    /// # Safety
    ///
    /// As [`Communicator::all_reduce_raw`], for reads of [`Collective::input_len`] and writes of [`Collective::output_len`] elements.
    pub unsafe fn collective_raw(
        &self,
        collective: Collective<'_>,
        input: CUdeviceptr,
        output: CUdeviceptr,
        count: usize,
        dtype: DType,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        self.check_stream(stream)?;
        let message = Message { collective, input, output, count, dtype };
        let (rank, world_size) = (self.rank(), self.world_size());
        message.check(rank, world_size)?;
        let captured = self.is_captured(stream)?;
        if collective.input_len(count, rank, world_size) > 0 {
            self.device().check_address("input", input, dtype.size())?;
        }
        if collective.output_len(count, rank, world_size) > 0 {
            self.device().check_address("output", output, dtype.size())?;
        }
        // SAFETY: the caller's; the pointers have been checked for alignment, overlap and device.
        unsafe { self.run(message, stream.cu_stream(), Some(stream), captured) }
    }

    /// Messages between pairs of ranks, in one launch, in the order of a stream.
    ///
    /// # Errors
    ///
    /// As [`Communicator::collective_raw`], and [`Error::Overlap`] where a message is received into another's memory.
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`], for reads of what is sent and writes of what is received into.
    pub unsafe fn transfer_raw(&self, transfers: &[Transfer], stream: &Arc<CudaStream>) -> Result<()> {
        self.check_stream(stream)?;
        self.check_transfers(transfers)?;
        self.device().bind()?;
        for transfer in transfers.iter().filter(|transfer| transfer.count > 0) {
            let which = match transfer.direction {
                Direction::Send => "send",
                Direction::Recv => "receive",
            };
            self.device().check_address(which, transfer.address, transfer.dtype.size())?;
        }
        let call = Self::transfers_id(Operation::Group, transfers);
        let _calls = self.device().calls();
        // SAFETY: the caller's; the stream is of this context and kept alive.
        unsafe {
            self.device().order(stream.cu_stream(), Some(stream))?;
            self.start_transfers(call, transfers, stream.cu_stream())
        }
    }

    /// Waits for the work on a stream, and says whether the calls on it succeeded.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`]; [`Error::Timeout`] naming the ranks that did not come.
    pub fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        stream.synchronize().map_err(|error| self.device().error("cuStreamSynchronize", error))?;
        self.healthy()
    }

    /// The first failure that a kernel of this rank has recorded so far. Waits for nothing.
    ///
    /// # Errors
    ///
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.healthy()
    }

    /// Tells the peers where the inputs of the pulled calls are that have been captured since the last time. Collective: every
    /// rank calls it after capture and before the first replay. Needs [`Cuda::graph_registration`].
    ///
    /// The inputs must stay allocated as long as a graph that uses them may replay, and where ranks are processes until the
    /// communicator and its buffers have been dropped, which closes the peers' mappings. Their contents may change between
    /// replays.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] on all ranks if an input cannot be exported, [`Error::Unavailable`] while a capture goes on; the errors
    /// of the bootstrap.
    pub fn register_graph_buffers(&self) -> Result<()> {
        self.healthy()?;
        self.device().bind()?;
        let rows = self.device().exchange_graph_rows(&*self.closing.bootstrap, self.setup_timeout)?;
        let written = {
            // No eager call launches in between.
            let _registry = self.endpoint.lock();
            rows.iter()
                .try_for_each(|(row, bases)| self.endpoint.region.write_row(self.device(), *row, bases))
        };
        // No rank replays before all have the rows.
        all_succeeded(written, &*self.closing.bootstrap, self.setup_timeout)
    }

    /// Registers a buffer, so that calls from it or from views into it pull without a copy. Collective: all ranks register
    /// buffers of the same length. Registering one twice is two registrations.
    ///
    /// Where ranks are processes, memory must be freed only after every rank has closed its mapping of it, which ending the
    /// registration does: let all ranks call [`Registered::into_inner`], then [`Communicator::barrier`], then drop the slices.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] on all ranks where the memory cannot be exported, as that of stream-ordered pools, which cudarc
    /// allocates from where the GPU has them: use [`Communicator::alloc`].
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Registered<T>> {
        self.healthy()?;
        let count = slice.len();
        let bytes = count * size_of::<T>();
        let (bootstrap, timeout) = (&*self.closing.bootstrap, self.setup_timeout);
        agree(bootstrap, &[("the bytes of a registered buffer", bytes.to_string())], timeout)?;
        if count == 0 {
            return Ok(Registered { _registration: None, slice });
        }
        let stream = Arc::clone(slice.stream());
        let (address, used) = slice.device_ptr(&stream);
        drop(used);
        self.device().bind()?;
        let memory = self.device().share_foreign(address, bootstrap, timeout)?;
        let registration = self.endpoint.register(memory, bytes)?;
        Ok(Registered { _registration: Some(registration), slice })
    }

    /// Returns when every rank has called it, through the bootstrap: what is on the streams is not waited for.
    ///
    /// # Errors
    ///
    /// Those of the bootstrap; and the error that poisoned the communicator.
    pub fn barrier(&self) -> Result<()> {
        self.healthy()?;
        self.unless_failed(self.closing.bootstrap.barrier(self.setup_timeout))
    }

    fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        if **stream.context() == **self.device().context() {
            return Ok(());
        }
        let (stream, device) = (stream.context().ordinal(), self.device().context().ordinal());
        Err(Error::InvalidStream { stream, device })
    }

    /// Refuses a slice of another device, going by its own stream: one that is not, cudarc vouches for.
    fn check_device<T: Element>(
        &self,
        which: &'static str,
        own: &CudaStream,
        address: impl FnOnce(&CudaStream) -> CUdeviceptr,
    ) -> Result<()> {
        if own.context().ordinal() == self.device().context().ordinal() {
            return Ok(());
        }
        // Asked for on the communicator's stream, it would wait for an event of the other device.
        let address = address(own) as usize;
        Err(Error::InvalidPointer {
            which,
            address,
            problem: "memory of another device",
            element_size: size_of::<T>(),
        })
    }

    fn is_captured(&self, stream: &CudaStream) -> Result<bool> {
        self.device().bind()?;
        // SAFETY: the stream is live, and of this context: `check_stream` was first.
        unsafe { self.device().capturing(stream.cu_stream()) }
    }

    /// # Safety
    ///
    /// As [`Communicator::start`] and [`Cuda::order`]; the device's context is current, and `captured` says whether the stream is.
    unsafe fn run(
        &self,
        message: Message<'_>,
        stream: CUstream,
        owner: Option<&Arc<CudaStream>>,
        captured: bool,
    ) -> Result<()> {
        // Another thread's call comes before this one's ordering or after its launch, not between the two.
        let _calls = self.device().calls();
        // SAFETY: the caller's.
        unsafe {
            self.device().order(stream, owner)?;
            self.start(message, stream, |_, _| match captured {
                true => self.device().capture_input(message.input),
                false => Ok(0),
            })
        }
    }
}

/// The address alone: an event that is recorded in a capture is of no use after it.
fn untracked((address, used): (CUdeviceptr, SyncOnDrop<'_>)) -> CUdeviceptr {
    std::mem::forget(used);
    address
}

/// A slice that is registered as long as this lives. Derefs to the slice.
pub struct Registered<T: Element> {
    // Before the slice: out of the table first, then freed.
    _registration: Option<Registration<Cuda>>,
    slice: CudaSlice<T>,
}

impl<T: Element> std::ops::Deref for Registered<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

// No DerefMut: whoever could swap the slice out could free it while it is registered.
impl<T: Element> Registered<T> {
    /// Ends the registration and gives the slice back.
    pub fn into_inner(self) -> CudaSlice<T> {
        self.slice
    }
}

impl<T: Element> DeviceSlice<T> for Registered<T> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }
}

impl<T: Element> DevicePtr<T> for Registered<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.device_ptr(stream)
    }
}

impl<T: Element> DevicePtrMut<T> for Registered<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.device_ptr_mut(stream)
    }
}

impl<T: Element> DeviceSlice<T> for Buffer<T, Cuda> {
    fn len(&self) -> usize {
        self.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.device().default_stream()
    }
}

/// The crate's own buffers are in no event tracking: their uses are ordered by the streams that the caller names.
impl<T: Element> DevicePtr<T> for Buffer<T, Cuda> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DevicePtrMut<T> for Buffer<T, Cuda> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}
