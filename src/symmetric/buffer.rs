//! Registered buffers: memory whose addresses all ranks know, pulled from with no copy.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{begin, SymmetricMemory};
use crate::device::{Device, Host};
use crate::element::Element;
use crate::endpoint::Registration;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// Memory that the crate allocated on all ranks together, registered: an allreduce from it pulls without a copy.
///
/// It is a [`SymmetricMemory`] after [`register`](SymmetricMemory::register), and one again after [`Buffer::deregister`].
///
/// On the host it derefs to a slice; on a GPU it is a cudarc `DevicePtr`. A view into it is registered too. Dropping it
/// is local; the memory goes when every rank has dropped its own, and memory that is shared by CUDA IPC handles when
/// every rank has dropped its communicator and all of its buffers: the last of them waits up to 2 s for the other
/// ranks, and where one is late leaves the memory to the end of the next communicator after that rank has dropped its
/// own. Ranks that share a process and a GPU must all be idle then: freeing waits for the kernels on the GPU, also for one
/// that waits for the rank that frees. Dropping a communicator is alike. Let such ranks meet before the drop, and again
/// before the next call.
///
/// After a call from it has failed it is this rank's alone: as it was, or in part the result, and no longer registered. On the host it
/// is private memory then: writing it takes as much memory again, and is a fault where the process has used up its mappings
/// (`vm.max_map_count`) or its data (`RLIMIT_DATA`) since it was allocated. A fork of the process has the same memory as its parent,
/// which it must not write; what it drops of it stays the parent's.
pub struct Buffer<T: Element, D: Device = Host> {
    registration: Registration<D>,
    number: u64,
    count: usize,
    elements: PhantomData<T>,
}

impl<T: Element, D: Device> Buffer<T, D> {
    /// Of memory that holds at least `count` elements.
    pub(crate) fn new(registration: Registration<D>, number: u64, count: usize) -> Self {
        Self { registration, number, count, elements: PhantomData }
    }

    /// Ends the registration and keeps the memory. Collective: every rank calls it, after the last call that uses the buffer on any
    /// rank.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] where ranks do not all do this with this buffer, [`Error::Unavailable`] while the last call's stream
    /// is captured, and the errors of the bootstrap. The buffer is dropped then.
    pub fn deregister(mut self) -> Result<SymmetricMemory<T, D>> {
        let endpoint = Arc::clone(self.registration.endpoint());
        let _step = begin(&endpoint.connection, "deregister", self.number)?;
        let memory = endpoint.connection.all_succeeded(self.registration.end())?;
        Ok(SymmetricMemory::new(Arc::clone(&endpoint), memory, self.number, self.count))
    }

    /// The address of a rank's part, as this process has it mapped: for kernels, and for unsafe code that orders its accesses with
    /// the other ranks. `None` beyond the world.
    pub fn peer_address(&self, rank: usize) -> Option<u64> {
        Some(self.registration.address_of(rank)).filter(|&address| address != 0)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.registration.address()
    }

    /// The device that it is memory of.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> &D {
        &self.registration.endpoint().device
    }
}

impl<T: Element, D: Device> fmt::Debug for Buffer<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("dtype", &T::DTYPE).field("count", &self.count).finish_non_exhaustive()
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `count` elements (allocated so, zeroed, page-aligned) for the life of self, any
        // bits are a value of T, and peers only read it.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, self.count) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref; peers read it only while this rank is in a call from it, which borrows it. A call that succeeds
        // ends when all have read it; one that fails has made the mapping private before it returns, so that what peers still
        // read is not what is written here.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut T, self.count) }
    }
}
