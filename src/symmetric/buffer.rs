//! Registered buffers: memory whose addresses all ranks have, so that calls pull from it without a copy.

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

/// A registered buffer: an allreduce from it pulls without a copy.
///
/// [`Communicator::alloc`](crate::Communicator::alloc) allocates and registers one on all ranks.
/// [`SymmetricMemory::register`] makes symmetric memory a buffer, and [`Buffer::deregister`] reverses that. On the
/// host it derefs to a slice; on a GPU it is a cudarc `DevicePtr`. A view into it is registered too.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// let mut buffer = communicator.alloc::<f32>(8)?;
/// buffer[..4].copy_from_slice(&[1.0; 4]);
/// let (data, rest) = buffer.split_at_mut(4);
/// communicator.all_reduce(data, rest, ReduceOp::Sum)?; // From and to views.
/// assert_eq!((rest[0], buffer.len()), (2.0, 8));
/// let memory = buffer.deregister()?; // Symmetric memory again.
/// assert_eq!(memory.view(communicator.rank())?.load(0)?, 1.0);
/// # Ok(()) });
/// ```
///
/// # Lifetime
///
/// Dropping a buffer is local. The memory is freed when every rank has dropped its part. Memory that is shared by CUDA
/// IPC handles is freed when every rank has dropped its communicator and all of its buffers: the last of them waits up
/// to 2 s for the other ranks. If one of these is late, the memory stays until the next communicator ends after that
/// rank is done.
///
/// Ranks that share a process and a GPU must all be idle when memory is freed or a communicator is dropped, because
/// freeing waits for all kernels on the GPU, including one that waits for the rank that frees. Synchronise such ranks
/// before the drop, and again before the next call.
///
/// # After a failed call
///
/// The buffer of a call that failed is no longer registered, and belongs to this rank alone. It contains the input, or
/// parts of the result. On the host it is now a copy, which [`Communicator::join`](crate::Communicator::join) registers
/// again. If it has more than 16 MiB, or there is no memory for a copy, it is private (copy-on-write) memory instead:
/// writing to it needs the same amount of memory again, and causes a fault if the process has reached a limit since the
/// allocation (`vm.max_map_count`, `RLIMIT_DATA`).
///
/// A fork of the process shares the buffer's memory with its parent, and must not write to it. A drop in the fork does
/// not free the parent's memory.
pub struct Buffer<T: Element, D: Device = Host> {
    registration: Registration<D>,
    number: u64,
    count: usize,
    elements: PhantomData<T>,
}

impl<T: Element, D: Device> Buffer<T, D> {
    /// Creates a buffer from registered memory of at least `count` elements.
    pub(crate) fn new(registration: Registration<D>, number: u64, count: usize) -> Self {
        Self { registration, number, count, elements: PhantomData }
    }

    /// Ends the registration and keeps the memory. Collective.
    ///
    /// Every rank calls it after the last call that uses the buffer on any rank.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`], if the ranks do not all deregister this buffer; [`Error::Unavailable`] while the stream
    /// of the last call is being captured; [errors of every step](crate::Communicator#errors-of-every-step). After an
    /// error the buffer has been dropped.
    pub fn deregister(mut self) -> Result<SymmetricMemory<T, D>> {
        let endpoint = Arc::clone(self.registration.endpoint());
        let (_step, membership) = begin(&endpoint, "deregister", self.number)?;
        let memory = membership.connection.all_succeeded(self.registration.end())?;
        Ok(SymmetricMemory::new(Arc::clone(&endpoint), memory, self.number, self.count))
    }

    /// Returns the address of a rank's part, as it is mapped in this process. `None` if there is no such rank, or the
    /// communicator is suspended.
    ///
    /// It is for kernels, and for unsafe code that orders its accesses with the other ranks.
    pub fn peer_address(&self, rank: usize) -> Option<u64> {
        Some(self.registration.address_of(rank)).filter(|&address| address != 0)
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the address of this rank's part on the device.
    pub(crate) fn address(&self) -> u64 {
        self.registration.address()
    }

    /// Returns the device that has the memory.
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
        // SAFETY: the mapping has `count` elements, is page-aligned and was zeroed. It lives as long as self. Any bits
        // are a value of T, and peers only read it.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, self.count) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref. Peers read it only while this rank is in a call that borrows it. A call that succeeds
        // ends when all peers have read it. A call that fails makes the mapping private before it returns, so peers
        // that still read do not see what is written here.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut T, self.count) }
    }
}
