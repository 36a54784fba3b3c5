//! Buffers that peers pull from where they are: registered ones, and the inputs of graphs.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use crate::bootstrap::agree_on;
use crate::communicator::Communicator;
use crate::device::cuda::driver::unless_recorded;
use crate::device::cuda::Cuda;
use crate::dtype::Element;
use crate::endpoint::Registration;
use crate::error::Result;

impl Communicator<Cuda> {
    /// Tells the peers where the inputs of the pulled calls are that have been captured since the last time. Collective: every
    /// rank calls it after capture and before the first replay. Needs [`Cuda::graph_registration`].
    ///
    /// The inputs must stay allocated as long as a graph that uses them may replay, and where ranks are processes until the
    /// communicator and its buffers have been dropped, which closes the peers' mappings. Their contents may change between
    /// replays.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver) on one rank and [`Error::PeerFailed`](crate::Error::PeerFailed) on the others if an
    /// input cannot be exported, [`Error::Unavailable`](crate::Error::Unavailable) while a capture goes on; the errors of the
    /// bootstrap. The next time has all of it to do again. An input that was freed meanwhile is passed over: launching its graph is
    /// an error.
    pub fn register_graph_buffers(&self) -> Result<()> {
        self.healthy()?;
        let _step = self.connection.step()?;
        self.device().exchange_graph_rows(&*self.connection.bootstrap, self.setup_timeout, |rows| {
            // No eager call launches in between.
            let _registry = self.endpoint.lock();
            rows.iter()
                .try_for_each(|(row, bases)| self.endpoint.region.write_row(self.device(), *row, bases))
        })
    }

    /// Registers a buffer, so that calls from it or from views into it pull without a copy. Collective: all ranks register
    /// buffers of the same length. Registering one twice is two registrations.
    ///
    /// Where ranks are processes, memory must be freed only after every rank has closed its mapping of it, which ending the
    /// registration does: let all ranks call [`Registered::into_inner`], then [`Communicator::barrier`], then drop the slices.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver) on one rank and [`Error::PeerFailed`](crate::Error::PeerFailed) on the others where
    /// the memory cannot be exported, as that of stream-ordered pools, which cudarc allocates from where the GPU has them: use
    /// [`Communicator::alloc`]. [`Error::InvalidPointer`](crate::Error::InvalidPointer) likewise for memory of another device.
    /// After an error no rank has the registration, and the slice is dropped.
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Registered<T>> {
        self.healthy()?;
        let count = slice.len();
        let bytes = count * size_of::<T>();
        let _step = self.connection.step()?;
        let (bootstrap, timeout) = (&*self.connection.bootstrap, self.setup_timeout);
        let stream = Arc::clone(slice.stream());
        self.connection.all_succeeded(
            self.check_device::<T>("a registered buffer", &stream, |stream| slice.device_ptr(stream).0),
        )?;
        agree_on(bootstrap, &[("the bytes of a registered buffer", bytes.to_string())], timeout)?;
        if count == 0 {
            return Ok(Registered { _registration: None, slice });
        }
        let context = self.device().context();
        let address = unless_recorded(context, "an event of a slice's use", || slice.device_ptr(&stream).0);
        let address = address.and_then(|address| {
            self.device().bind()?;
            self.device().check_address("a registered buffer", address, size_of::<T>())?;
            Ok(address)
        });
        let address = self.connection.all_succeeded(address)?;
        let memory = self.device().share_foreign(address, bootstrap, timeout);
        match memory.and_then(|memory| self.endpoint.register(memory, bytes)) {
            Ok(registration) => Ok(Registered { _registration: Some(registration), slice }),
            Err(error) => {
                // What a peer has open goes when all ranks have closed what they had: all have an error. A rank that does not come
                // may still have it open.
                if bootstrap.barrier(timeout).is_err() {
                    std::mem::forget(slice);
                }
                Err(error)
            }
        }
    }
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
