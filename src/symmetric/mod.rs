//! Symmetric memory: allocated by all ranks together, with the part of every rank mapped on all ranks.

mod buffer;
#[cfg(feature = "cuda")]
mod cuda;
mod view;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

pub use self::buffer::Buffer;
pub use self::view::SymmetricView;

use crate::bootstrap::agree_on;
use crate::device::sealed::Shared as _;
use crate::device::{Device, Host};
use crate::element::Element;
use crate::endpoint::{Endpoint, Membership};
use crate::error::{Error, Result};
use crate::exclusive::Held;

/// Memory of the same length on every rank, which every rank can access on all ranks.
///
/// It is for programs that read and write the peers' memory themselves.
/// [`Communicator::symmetric_memory`](crate::Communicator::symmetric_memory) allocates it, filled with zeros.
///
/// # Synchronisation
///
/// The program orders accesses of different ranks. The writer writes, both ranks call
/// [`Communicator::barrier`](crate::Communicator::barrier), the reader reads; before the next write both call it again.
/// On a GPU, wait for the kernels that write before the barrier, or use a collective on their stream as the barrier.
///
/// On the host, [`view`](Self::view) accesses a rank's part element by element, by relaxed atomics: without a barrier a
/// read returns the old or the new value, and is never undefined behaviour. On a GPU, kernels use
/// [`peer_address`](Self::peer_address).
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(3, |communicator| {
/// let (rank, next) = (communicator.rank(), (communicator.rank() + 1) % 3);
/// let memory = communicator.symmetric_memory::<u64>(100)?;
/// assert_eq!((memory.len(), memory.is_empty()), (100, false));
///
/// memory.view(next)?.store(42, rank as u64)?; // Writes to the next rank's part.
/// communicator.barrier()?;
/// assert_eq!(memory.view(rank)?.load(42)?, (rank as u64 + 2) % 3);
///
/// // For kernels and unsafe code.
/// assert_eq!(memory.peer_address(rank), Some(memory.address()));
/// assert_eq!(memory.peer_address(3), None);
///
/// let mut buffer = memory.register()?; // Now calls pull from it without a copy.
/// communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
/// buffer.deregister()?.free()?;
/// # Ok(()) });
/// ```
///
/// # Lifetime
///
/// [`free`](Self::free) is collective and returns errors. Dropping is local: the memory is freed when every rank has
/// dropped its part. [`Buffer`] describes what differs if memory is shared by CUDA IPC handles.
pub struct SymmetricMemory<T: Element, D: Device = Host> {
    endpoint: Arc<Endpoint<D>>,
    /// `None` only while this is freed or registered.
    memory: Option<Arc<D::Shared>>,
    /// Identifies this memory in steps; equal on all ranks.
    number: u64,
    count: usize,
    elements: PhantomData<T>,
}

/// Begins a step of a symmetric memory, as [`Endpoint::step`] does. The ranks compare the step and the number of the
/// memory, and continue only if they are equal on all ranks.
pub(crate) fn begin<'a, D: Device>(
    endpoint: &'a Endpoint<D>,
    step: &str,
    number: u64,
) -> Result<(Held<'a, ()>, Arc<Membership<D>>)> {
    let guard = endpoint.step()?;
    let membership = endpoint.membership()?;
    let connection = &membership.connection;
    agree_on(&*connection.bootstrap, &[step_fact(step, number)], connection.timeout)?;
    Ok((guard, membership))
}

/// Returns what ranks compare first in every step. It differs between any two steps.
fn step_fact(step: &str, number: u64) -> (&'static str, String) {
    ("the step of symmetric memory", format!("{step} number {number}"))
}

impl<T: Element, D: Device> SymmetricMemory<T, D> {
    /// Allocates memory, within a step of that name. Collective.
    pub(crate) fn allocate(endpoint: &Arc<Endpoint<D>>, step: &str, count: usize) -> Result<Self> {
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::Allocation {
            bytes: usize::MAX,
            reason: format!("{count} elements of {} exceed the address space", T::DTYPE),
        })?;
        let membership = endpoint.membership()?;
        let (bootstrap, timeout) = (&*membership.connection.bootstrap, membership.connection.timeout);
        let number = endpoint.next_number();
        let facts = [
            step_fact(step, number),
            ("the type of symmetric memory", T::DTYPE.to_string()),
            ("the elements of symmetric memory", count.to_string()),
        ];
        agree_on(bootstrap, &facts, timeout)?;
        // On all ranks or on none, because all have compared the same facts.
        endpoint.take_number();
        let memory = Arc::new(endpoint.device.share_symmetric(bytes.max(1), bootstrap, timeout)?);
        endpoint.track(Some(number), bytes, &memory);
        Ok(Self::new(Arc::clone(endpoint), Some(memory), number, count))
    }

    pub(crate) fn new(
        endpoint: Arc<Endpoint<D>>,
        memory: Option<Arc<D::Shared>>,
        number: u64,
        count: usize,
    ) -> Self {
        Self { endpoint, memory, number, count, elements: PhantomData }
    }

    /// Returns the number of elements on each rank.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the address of a rank's part, as it is mapped in this process. `None` if there is no such rank, or the
    /// communicator is suspended.
    ///
    /// It is for kernels, and for unsafe code that orders its accesses with the other ranks.
    pub fn peer_address(&self, rank: usize) -> Option<u64> {
        let memory = self.memory.as_ref().filter(|memory| rank == self.endpoint.rank || memory.has_peers());
        memory.map(|memory| memory.address(rank)).filter(|&address| address != 0)
    }

    /// Returns the address of this rank's part on the device.
    pub fn address(&self) -> u64 {
        // `peer_address` is never `None` for this rank.
        self.peer_address(self.endpoint.rank).unwrap_or_default()
    }

    /// Registers the memory, so that calls from it or from views into it pull without a copy. Collective.
    ///
    /// On the host a [`Buffer`] is a slice that only its rank writes, so views of it are no longer possible.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`], if the ranks do not all register this memory; [`Error::Unavailable`], if too many
    /// buffers are registered, or while the stream of the last call is being captured; [errors of every
    /// step](crate::Communicator#errors-of-every-step). After an error the memory has been dropped.
    pub fn register(self) -> Result<Buffer<T, D>> {
        let endpoint = Arc::clone(&self.endpoint);
        let (_step, membership) = begin(&endpoint, "register", self.number)?;
        // After this no kernel uses the memory, whatever fails.
        membership.connection.all_succeeded(endpoint.device.wait_for_calls())?;
        self.enter()
    }

    /// Registers memory that no kernel uses, within a step. Collective.
    pub(crate) fn enter(mut self) -> Result<Buffer<T, D>> {
        let gone =
            || Error::Unavailable { what: "symmetric memory".into(), reason: "it has been freed".into() };
        let memory = self.memory.take().ok_or_else(gone)?;
        let registration = self.endpoint.register(memory, self.count * size_of::<T>())?;
        Ok(Buffer::new(registration, self.number, self.count))
    }

    /// Frees the memory on all ranks. Collective.
    ///
    /// Every rank calls it when its own accesses to all parts have ended. It waits for the communicator's calls, and
    /// frees no part before every rank has closed its mapping of that part.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`], if the ranks do not all free this memory; [`Error::System`] or [`Error::Driver`];
    /// [`Error::Unavailable`] while the stream of the last call is being captured; [errors of every
    /// step](crate::Communicator#errors-of-every-step). After an error the memory is treated as if it had been dropped.
    pub fn free(mut self) -> Result<()> {
        let endpoint = Arc::clone(&self.endpoint);
        let (_step, membership) = begin(&endpoint, "free", self.number)?;
        let connection = &membership.connection;
        connection.all_succeeded(self.endpoint.device.wait_for_calls())?;
        match self.memory.take().and_then(Arc::into_inner) {
            Some(memory) => self.endpoint.device.free(memory, &*connection.bootstrap, connection.timeout),
            None => Ok(()),
        }
    }
}

impl<T: Element, D: Device> Drop for SymmetricMemory<T, D> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.endpoint.retire(memory);
        }
    }
}

impl<T: Element, D: Device> fmt::Debug for SymmetricMemory<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricMemory")
            .field("dtype", &T::DTYPE)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}
