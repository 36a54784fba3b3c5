//! Symmetric memory: allocated by all ranks together, with every rank's part mapped on all.

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
use crate::endpoint::{Connection, Endpoint};
use crate::error::{Error, Result};
use crate::exclusive::Held;

/// Memory of the same length on every rank, which every rank can reach on all: for programs that read and write the peers' memory
/// themselves. [`Communicator::symmetric_memory`](crate::Communicator::symmetric_memory) allocates it, zeroed.
///
/// # Who may access what, and when
///
/// Nothing orders the accesses of one rank with those of another but what the ranks do for it: the writer writes, both call
/// [`Communicator::barrier`](crate::Communicator::barrier), the reader reads; and before the next write both call it again. On a GPU
/// the kernels that write are waited for before the barrier, or the barrier is a collective in the order of their stream.
///
/// On the host [`view`](Self::view) gives a rank's part element by element, each access a relaxed atomic: without a barrier what is
/// read is old or new, and never undefined. On a GPU [`peer_address`](Self::peer_address) is for kernels.
///
/// ```
/// use fast_allreduce::{bootstrap::Threads, Communicator, Host};
///
/// # fn main() -> fast_allreduce::Result<()> {
/// let ranks = Threads::world(3)?.into_iter().map(|bootstrap| {
///     std::thread::spawn(move || -> fast_allreduce::Result<u64> {
///         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
///         let memory = communicator.symmetric_memory::<u64>(100)?;
///         let (rank, next) = (communicator.rank(), (communicator.rank() + 1) % 3);
///         memory.view(next)?.store(42, rank as u64)?;
///         communicator.barrier()?;
///         let from_the_one_before = memory.view(rank)?.load(42)?;
///         memory.free()?;
///         Ok(from_the_one_before)
///     })
/// });
/// for (rank, handle) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
///     assert_eq!(handle.join().unwrap()?, (rank as u64 + 2) % 3);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # How it goes
///
/// [`free`](Self::free) is collective and says what went wrong. Dropping it is local: a rank's part goes when every rank has dropped
/// its own, and as [`Buffer`] tells where it is shared by CUDA IPC handles.
pub struct SymmetricMemory<T: Element, D: Device = Host> {
    endpoint: Arc<Endpoint<D>>,
    /// `None` only while it goes.
    memory: Option<D::Shared>,
    /// Names it among the ranks.
    number: u64,
    count: usize,
    elements: PhantomData<T>,
}

/// Begins a step of a symmetric memory, as [`Connection::step`]: the ranks compare which step of which memory they are
/// at, and all come to it or none goes on.
pub(crate) fn begin<'a, D: Device>(
    connection: &'a Connection<D>,
    step: &str,
    number: u64,
) -> Result<Held<'a, ()>> {
    let guard = connection.step()?;
    agree_on(&*connection.bootstrap, &[step_fact(step, number)], connection.timeout)?;
    Ok(guard)
}

/// What ranks compare first in every step, so that it tells two different ones apart.
fn step_fact(step: &str, number: u64) -> (&'static str, String) {
    ("the step of symmetric memory", format!("{step} number {number}"))
}

impl<T: Element, D: Device> SymmetricMemory<T, D> {
    /// Collective, within a step of that name.
    pub(crate) fn allocate(endpoint: &Arc<Endpoint<D>>, step: &str, count: usize) -> Result<Self> {
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::Allocation {
            bytes: usize::MAX,
            reason: format!("{count} elements of {} exceed the address space", T::DTYPE),
        })?;
        let (bootstrap, timeout) = (&*endpoint.connection.bootstrap, endpoint.connection.timeout);
        let number = endpoint.next_number();
        let facts = [
            step_fact(step, number),
            ("the type of symmetric memory", T::DTYPE.to_string()),
            ("the elements of symmetric memory", count.to_string()),
        ];
        agree_on(bootstrap, &facts, timeout)?;
        // On all ranks or on none: they have found the same.
        endpoint.take_number();
        let memory = endpoint.device.share_symmetric(bytes.max(1), bootstrap, timeout)?;
        Ok(Self::new(Arc::clone(endpoint), Some(memory), number, count))
    }

    pub(crate) fn new(
        endpoint: Arc<Endpoint<D>>,
        memory: Option<D::Shared>,
        number: u64,
        count: usize,
    ) -> Self {
        Self { endpoint, memory, number, count, elements: PhantomData }
    }

    /// Number of elements on each rank.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The address of a rank's part, as this process has it mapped: for kernels, and for unsafe code that orders its accesses with
    /// the other ranks. `None` beyond the world.
    pub fn peer_address(&self, rank: usize) -> Option<u64> {
        self.memory.as_ref().map(|memory| memory.address(rank)).filter(|&address| address != 0)
    }

    /// The address of this rank's part on the device.
    pub fn address(&self) -> u64 {
        // A rank is in its world.
        self.peer_address(self.endpoint.connection.bootstrap.rank()).unwrap_or_default()
    }

    /// Registers it, so that calls from it or from views into it pull without a copy. Collective: every rank calls it.
    ///
    /// On the host a [`Buffer`] is a slice that its rank alone writes; so nobody has a view of it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] where ranks do not all do this with this memory, [`Error::Unavailable`] if too many are registered or
    /// while the last call's stream is captured, and the errors of the bootstrap. The memory is dropped then.
    pub fn register(self) -> Result<Buffer<T, D>> {
        let connection = Arc::clone(&self.endpoint.connection);
        let _step = begin(&connection, "register", self.number)?;
        // Whatever fails from here on, no kernel uses the memory.
        connection.all_succeeded(self.endpoint.device.wait_for_calls())?;
        self.enter()
    }

    /// Registers memory that no kernel uses. Collective, within a step.
    pub(crate) fn enter(mut self) -> Result<Buffer<T, D>> {
        let gone = || Error::Unavailable { what: "symmetric memory".into(), reason: "it has gone".into() };
        let memory = self.memory.take().ok_or_else(gone)?;
        let registration = self.endpoint.register(memory, self.count * size_of::<T>())?;
        Ok(Buffer::new(registration, self.number, self.count))
    }

    /// Frees it on all ranks. Collective: every rank calls it when its own accesses to any rank's part have ended. The calls of this
    /// communicator that have returned are waited for, and no part is freed before every rank has closed its mapping of it.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] where ranks do not all do this with this memory, what the system or the driver refused, and the errors
    /// of the bootstrap. What has not been freed goes as if it had been dropped.
    pub fn free(mut self) -> Result<()> {
        let connection = &*self.endpoint.connection;
        let _step = begin(connection, "free", self.number)?;
        connection.all_succeeded(self.endpoint.device.wait_for_calls())?;
        match self.memory.take() {
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
