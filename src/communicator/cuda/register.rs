//! Registered memory of a GPU, from which peers pull without staging: slices, raw memory, and inputs of graphs.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use crate::bootstrap::agree_on;
use crate::communicator::Communicator;
use crate::device::cuda::driver::unless_recorded;
use crate::device::cuda::Cuda;
use crate::element::Element;
use crate::endpoint::Registration;
use crate::error::{Error, Result};
use crate::region::TableRow;

impl Communicator<Cuda> {
    /// Registers the inputs of pulled calls that have been captured since the last call of this method. Collective.
    ///
    /// Every rank calls it after the capture and before the first replay. It needs [`Cuda::graph_registration`].
    ///
    /// The inputs must stay allocated for as long as a graph that uses them may be replayed; their contents may change.
    /// Where ranks are processes, the peers have the inputs open. To free one, destroy the graphs, their clones and
    /// their executables, then call this method, which closes the inputs, then [`Communicator::barrier`]. The end of
    /// the communicator and its buffers closes them too.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: CudaSlice<f32>,
    /// #     mut output: CudaSlice<f32>) -> Result<(), Box<dyn std::error::Error>> {
    /// use cudarc::driver::sys::CUgraphInstantiate_flags_enum as Flags;
    /// use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;
    ///
    /// stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    /// communicator.all_reduce(stream, &input, &mut output, ReduceOp::Sum)?;
    /// let flags = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    /// let graph = stream.end_capture(flags)?.expect("the stream was captured");
    /// communicator.register_graph_buffers()?;
    /// graph.launch()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], if an input cannot be exported ([`Error::PeerFailed`] on the other ranks);
    /// [`Error::Unavailable`] during a capture; [errors of every step](Communicator#errors-of-every-step). The next
    /// call then registers all of the inputs again. It skips an input that was freed in the meantime; launching the
    /// graph of such an input is an error. After an error that says that a rank is gone, replays that wait for it end
    /// with an error at once.
    pub fn register_graph_buffers(&self) -> Result<()> {
        self.step(|| {
            let membership = self.endpoint.membership()?;
            let write = |rows: &[(usize, TableRow)]| {
                // While it is locked, no eager call launches.
                let _registry = self.endpoint.lock();
                let write = |(row, bases): &_| membership.region.write_row(self.device(), *row, bases);
                rows.iter().try_for_each(write)
            };
            let bootstrap = &*membership.connection.bootstrap;
            self.device().exchange_graph_rows(bootstrap, self.setup_timeout, write)
        })
    }

    /// Registers a slice, so that peers read inputs in it, and in views into it, without a copy. Collective.
    ///
    /// All ranks register slices of the same length. A slice that is registered twice has two registrations.
    ///
    /// Where ranks are processes, memory must be freed only after every rank has closed its mapping, which the end of a
    /// registration does. So all ranks call [`Registered::into_inner`], then [`Communicator::barrier`], then drop the
    /// slices.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, slice: CudaSlice<f32>)
    /// #     -> Result<()> {
    /// let mut data = communicator.register(slice)?;
    /// communicator.all_reduce_in_place(stream, &mut data, ReduceOp::Sum)?;
    /// let slice = data.into_inner();
    /// communicator.barrier()?;
    /// drop(slice);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], if the memory cannot be exported, as that of stream-ordered pools, which cudarc uses
    /// where the GPU has them: use [`Communicator::alloc`]; [`Error::InvalidPointer`] for memory of another device; in
    /// both cases [`Error::PeerFailed`] on the other ranks; [errors of every step](Communicator#errors-of-every-step).
    /// After an error no rank has the registration, and the slice is dropped.
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Registered<T>> {
        self.can_step()?;
        let count = slice.len();
        let bytes = count * size_of::<T>();
        let _step = self.endpoint.step()?;
        let membership = self.endpoint.membership()?;
        let stream = Arc::clone(slice.stream());
        let checked =
            self.check_device::<T>("a registered buffer", &stream, |stream| slice.device_ptr(stream).0);
        self.after_step(self.unless_a_peer_fails(|| membership.connection.all_succeeded(checked)))?;
        let context = self.device().context();
        let address =
            || unless_recorded(context, "an event of a slice's use", || slice.device_ptr(&stream).0);
        match self.register_at(address, size_of::<T>(), bytes) {
            Ok(registration) => Ok(Registered { _registration: registration, slice }),
            Err((error, Held::Nowhere)) => Err(error),
            Err((error, Held::ByPeers)) => {
                std::mem::forget(slice);
                Err(error)
            }
        }
    }

    /// Registers `bytes` bytes at `address`, which the caller keeps allocated. Collective.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn example(communicator: &Communicator<Cuda>, address: u64) -> Result<()> {
    /// let registered = communicator.register_raw(address, 1 << 20)?;
    /// // Calls with inputs in this memory pull without a copy.
    /// drop(registered);
    /// communicator.barrier()?; // Now it may be freed.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::register`].
    ///
    /// # Safety
    ///
    /// The bytes are memory of this GPU. They stay allocated until every rank has dropped its registration or got an
    /// error, and where ranks are processes, until all ranks have met in a [`Communicator::barrier`] after that.
    pub unsafe fn register_raw(&self, address: CUdeviceptr, bytes: usize) -> Result<RegisteredMemory> {
        self.can_step()?;
        let _step = self.endpoint.step()?;
        let registered = self.register_at(|| Ok(address), 1, bytes);
        registered
            .map(|registration| RegisteredMemory { _registration: registration })
            .map_err(|(error, _)| error)
    }

    /// Registers memory, within a step of the connection. Returns `None` for 0 bytes, which need no registration.
    fn register_at(
        &self,
        address: impl FnOnce() -> Result<CUdeviceptr>,
        element_size: usize,
        bytes: usize,
    ) -> std::result::Result<Option<Registration<Cuda>>, (Error, Held)> {
        let nowhere = |error| (error, Held::Nowhere);
        let membership = self.endpoint.membership().map_err(nowhere)?;
        let connection = &membership.connection;
        let (bootstrap, timeout) = (&*connection.bootstrap, self.setup_timeout);
        let facts = [("the bytes of a registered buffer", bytes.to_string())];
        self.after_step(self.unless_a_peer_fails(|| agree_on(bootstrap, &facts, timeout)))
            .map_err(nowhere)?;
        if bytes == 0 {
            return Ok(None);
        }
        let address = address().and_then(|address| {
            self.device().bind()?;
            self.device().check_address("a registered buffer", address, element_size)?;
            Ok(address)
        });
        let address = self.unless_a_peer_fails(|| connection.all_succeeded(address));
        let address = self.after_step(address).map_err(nowhere)?;
        let memory = || self.device().share_foreign((address, bytes), bootstrap, timeout);
        let registered = self.unless_a_peer_fails(|| {
            memory().and_then(|memory| self.endpoint.register(Arc::new(memory), bytes)).map(Some)
        });
        self.after_step(registered).map_err(|error| {
            // All ranks have an error, and each closes what it has opened. Then the memory may be freed, unless a rank
            // does not come, which may still have it open, or has lost its context, and so closed nothing of other
            // processes.
            let closed = if self.device().keeps_mappings_open() { Err(error.clone()) } else { Ok(()) };
            let held = if connection.all_succeeded(closed).is_err() { Held::ByPeers } else { Held::Nowhere };
            (error, held)
        })
    }
}

/// Whether peers may still have memory open after its registration failed.
enum Held {
    Nowhere,
    ByPeers,
}

/// A registration of memory, which ends when this is dropped: see [`Communicator::register_raw`].
pub struct RegisteredMemory {
    _registration: Option<Registration<Cuda>>,
}

/// A registered slice: see [`Communicator::register`]. It derefs to the slice, and dropping it ends the registration.
pub struct Registered<T: Element> {
    // Declared before the slice, so that the registration ends before the memory is freed.
    _registration: Option<Registration<Cuda>>,
    slice: CudaSlice<T>,
}

impl<T: Element> std::ops::Deref for Registered<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

// No DerefMut: it would let a caller swap the slice out and free it while it is registered.
impl<T: Element> Registered<T> {
    /// Ends the registration and returns the slice. [`Communicator::register`] has an example.
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
