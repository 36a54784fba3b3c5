//! Buffers that peers pull from where they are: registered ones, and the inputs of graphs.

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
    /// Tells the peers where the inputs of the pulled calls are that have been captured since the last time. Collective: every
    /// rank calls it after capture and before the first replay. Needs [`Cuda::graph_registration`].
    ///
    /// The inputs must stay allocated as long as a graph that uses them may replay. Where ranks are processes the peers
    /// have them open: once the graphs, their clones and their executables have been destroyed, a call of this closes
    /// them, after which all ranks meet in a [`Communicator::barrier`]; or the end of the communicator and its buffers
    /// does. Their contents may change between replays.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver) on one rank and [`Error::PeerFailed`](crate::Error::PeerFailed) on the others if an
    /// input cannot be exported, [`Error::Unavailable`](crate::Error::Unavailable) while a capture goes on; the errors of the
    /// bootstrap. The next time has all of it to do again. An input that was freed meanwhile is passed over: launching its graph is
    /// an error. After an error that says that a rank is gone, replays that wait for it end with an error at once.
    pub fn register_graph_buffers(&self) -> Result<()> {
        let write = |rows: &[(usize, TableRow)]| {
            // No eager call launches in between.
            let _registry = self.endpoint.lock();
            rows.iter()
                .try_for_each(|(row, bases)| self.endpoint.region.write_row(self.device(), *row, bases))
        };
        let bootstrap = &*self.connection.bootstrap;
        self.step(|| self.device().exchange_graph_rows(bootstrap, self.setup_timeout, write))
    }

    /// Registers a buffer, so that calls from it or from views into it pull without a copy. Collective: all ranks register
    /// buffers of the same length. Registering one twice is two registrations.
    ///
    /// Where ranks are processes, memory must be freed only after every rank has closed its mapping of it, which ending the
    /// registration does: let all ranks call [`Registered::into_inner`], then [`Communicator::barrier`], then drop the slices.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) on one rank and
    /// [`Error::PeerFailed`](crate::Error::PeerFailed) on the others where the memory cannot be exported, as that of
    /// stream-ordered pools, which cudarc allocates from where the GPU has them: use [`Communicator::alloc`].
    /// [`Error::InvalidPointer`](crate::Error::InvalidPointer) likewise for memory of another device. After an error no
    /// rank has the registration, and the slice is dropped.
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Registered<T>> {
        self.can_step()?;
        let count = slice.len();
        let bytes = count * size_of::<T>();
        let _step = self.connection.step()?;
        let stream = Arc::clone(slice.stream());
        let checked =
            self.check_device::<T>("a registered buffer", &stream, |stream| slice.device_ptr(stream).0);
        self.heeded(self.unless_a_peer_fails(|| self.connection.all_succeeded(checked)))?;
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

    /// Registers memory by its address, as [`Communicator::register`] does a slice; whose it is stays the caller's matter.
    ///
    /// # Errors
    ///
    /// As [`Communicator::register`].
    ///
    /// # Safety
    ///
    /// There are so many bytes of this GPU's memory, which stay allocated until every rank has dropped its registration or has
    /// an error, and where ranks are processes, until they have met in a [`Communicator::barrier`] after that.
    pub unsafe fn register_raw(&self, address: CUdeviceptr, bytes: usize) -> Result<RegisteredMemory> {
        self.can_step()?;
        let _step = self.connection.step()?;
        let registered = self.register_at(|| Ok(address), 1, bytes);
        registered
            .map(|registration| RegisteredMemory { _registration: registration })
            .map_err(|(error, _)| error)
    }

    /// The steps of a registration, within a step of the connection. Without any bytes there is none.
    fn register_at(
        &self,
        address: impl FnOnce() -> Result<CUdeviceptr>,
        element_size: usize,
        bytes: usize,
    ) -> std::result::Result<Option<Registration<Cuda>>, (Error, Held)> {
        let (bootstrap, timeout) = (&*self.connection.bootstrap, self.setup_timeout);
        let nowhere = |error| (error, Held::Nowhere);
        let facts = [("the bytes of a registered buffer", bytes.to_string())];
        self.heeded(self.unless_a_peer_fails(|| agree_on(bootstrap, &facts, timeout))).map_err(nowhere)?;
        if bytes == 0 {
            return Ok(None);
        }
        let address = address().and_then(|address| {
            self.device().bind()?;
            self.device().check_address("a registered buffer", address, element_size)?;
            Ok(address)
        });
        let address = self.unless_a_peer_fails(|| self.connection.all_succeeded(address));
        let address = self.heeded(address).map_err(nowhere)?;
        let memory = || self.device().share_foreign(address, bootstrap, timeout);
        let registered = self.unless_a_peer_fails(|| {
            memory().and_then(|memory| self.endpoint.register(memory, bytes)).map(Some)
        });
        self.heeded(registered).map_err(|error| {
            // What a peer has open goes when all ranks have closed what they had: all have an error. A rank that does not come may
            // still have it open, and one whose context is lost has closed nothing of other processes.
            let closed = if self.device().keeps_mappings_open() { Err(error.clone()) } else { Ok(()) };
            let held =
                if self.connection.all_succeeded(closed).is_err() { Held::ByPeers } else { Held::Nowhere };
            (error, held)
        })
    }
}

/// Whether peers may still have memory open whose registration failed.
enum Held {
    Nowhere,
    ByPeers,
}

/// Memory that is registered as long as this lives. See [`Communicator::register_raw`].
pub struct RegisteredMemory {
    _registration: Option<Registration<Cuda>>,
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
