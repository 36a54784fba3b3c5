//! The endpoint: what a rank needs to launch kernels. It has the device, the registered buffers, and the rank's
//! membership in a world, with the region and the connection to the other ranks.

mod connection;
mod exported;
mod membership;
mod place;
mod region;
mod registration;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub(crate) use self::connection::Connection;
pub(crate) use self::membership::Membership;
pub(crate) use self::place::Place;
pub(crate) use self::region::Region;
pub(crate) use self::registration::Registration;
use crate::abi::FA_SOURCE_ID_SHIFT;
use crate::call::CallCache;
use crate::deadline::Deadline;
use crate::device::sealed::{self, Shared as _};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::exclusive::{Exclusive, Held};
use crate::fork::ForkCheck;
use crate::region::source_word;
use crate::registry::{Registry, Row};

/// What a rank needs to launch kernels. Its communicator and every registered buffer hold it.
pub(crate) struct Endpoint<D: Device> {
    // What kernels use is dropped when they have ended, and is leaked if that cannot be determined.
    pub device: ManuallyDrop<D>,
    pub rank: usize,
    pub world_size: usize,
    /// See [`Endpoint::step`]. Locked before `state`, where both are.
    stepping: Exclusive<()>,
    state: Exclusive<State<D>>,
    /// What `state` has as its membership, for use without its lock.
    current: Mutex<Option<Arc<Membership<D>>>>,
    pub place: Place,
    fork_check: ForkCheck,
    /// Memory of all ranks that this rank has not dropped.
    memories: Mutex<Vec<Tracked<D>>>,
    /// Memory that was dropped while kernels could not be waited for, with its row if it was registered.
    retired: ManuallyDrop<Mutex<Retired<D>>>,
    /// Number of symmetric allocations so far, equal on all ranks.
    allocations: AtomicU64,
}

/// State that calls and registrations change.
pub(crate) struct State<D: Device> {
    pub registry: Registry,
    pub calls: CallCache,
    membership: Option<Arc<Membership<D>>>,
    place: Place,
}

impl<D: Device> State<D> {
    /// Returns the parts that a call needs.
    #[inline]
    pub fn parts(&mut self) -> Result<(&Registry, &mut CallCache, &Membership<D>)> {
        let membership = self.membership.as_deref().ok_or_else(|| self.place.suspended())?;
        Ok((&self.registry, &mut self.calls, membership))
    }
}

type Retired<D> = Vec<(Option<usize>, Arc<<D as sealed::Device>::Shared>)>;

/// What ranks must know of each other's symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryFacts {
    /// The number of the allocation.
    pub number: u64,
    pub bytes: u64,
    /// Its row in the table, if it is registered.
    pub row: Option<u64>,
}

/// Memory of all ranks.
struct Tracked<D: Device> {
    /// The number of the symmetric allocation; `None` for memory of the program.
    number: Option<u64>,
    bytes: usize,
    /// Its row in the table, while it is registered.
    row: Option<usize>,
    memory: Weak<D::Shared>,
}

impl<D: Device> Endpoint<D> {
    pub fn new(device: D, membership: Membership<D>) -> Self {
        let bootstrap = &membership.connection.bootstrap;
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        let membership = Some(Arc::new(membership));
        let (current, place) = (Mutex::new(membership.clone()), Place::default());
        let (registry, calls) = Default::default();
        let state = Exclusive::new(State { registry, calls, membership, place: place.clone() });
        let (stepping, memories, retired, allocations) = Default::default();
        Self {
            device: ManuallyDrop::new(device),
            rank,
            world_size,
            stepping,
            state,
            current,
            place,
            fork_check: ForkCheck::new(),
            memories,
            retired,
            allocations,
        }
    }

    /// Returns the current membership. In a step, and while the endpoint is locked, it stays current.
    pub fn membership(&self) -> Result<Arc<Membership<D>>> {
        self.with_membership(Arc::clone)
    }

    /// Passes the current membership to `body`, which must not wait.
    pub fn with_membership<T>(&self, body: impl FnOnce(&Arc<Membership<D>>) -> T) -> Result<T> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(body).ok_or_else(|| self.place.suspended())
    }

    /// Returns whether this process is a fork of the rank's process.
    #[inline]
    pub fn in_fork(&self) -> bool {
        self.fork_check.in_fork()
    }

    /// Begins a set-up step, which lasts until the guard is dropped: allocating, registering, freeing, and everything
    /// else that uses the bootstrap.
    ///
    /// A step consists of several gathers. If two threads ran steps at the same time, their gathers could be in
    /// different orders on different ranks, and be mixed up. The callers order whole steps; ranks compare what they are
    /// about to do at the beginning of each step, which detects different orders. The wait for the lock is bounded by
    /// the time limits of the steps before it: they hold no other lock that this thread could hold.
    pub fn step(&self) -> Result<Held<'_, ()>> {
        // First: in a fork, nobody releases the lock if another thread of the parent held it.
        if self.in_fork() {
            return Err(Error::Forked);
        }
        self.stepping.enter()
    }

    /// Returns whether this thread is in a step.
    pub fn is_in_step(&self) -> bool {
        self.stepping.is_mine()
    }

    /// Replaces the membership, or ends it. The caller is in a step. What ends is dropped outside the lock.
    pub fn set_membership(&self, state: &mut State<D>, membership: Option<Membership<D>>) {
        state.membership = membership.map(Arc::new);
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *current, state.membership.clone());
        drop(current);
        drop(before);
    }

    /// Returns what other ranks need to know of this rank's symmetric memory that can be shared again.
    pub fn memory_facts(&self) -> Vec<MemoryFacts> {
        let facts = |tracked: &Tracked<D>| {
            let memory = tracked.memory.upgrade()?;
            let row = tracked.row.map(|row| row as u64);
            let facts = MemoryFacts { number: tracked.number?, bytes: tracked.bytes as u64, row };
            memory.can_be_shared_again().then_some(facts)
        };
        self.memories().iter().filter_map(facts).collect()
    }

    /// Returns this rank's symmetric memory of that number.
    pub fn memory_of(&self, number: u64) -> Option<Arc<D::Shared>> {
        let memories = self.memories();
        memories.iter().find(|tracked| tracked.number == Some(number))?.memory.upgrade()
    }

    /// Returns all memory that this rank has not dropped.
    pub fn all_memory(&self) -> Vec<Arc<D::Shared>> {
        self.memories().iter().filter_map(|tracked| tracked.memory.upgrade()).collect()
    }

    /// Returns whether memory of the program is registered, which has no number.
    pub fn has_memory_of_program(&self) -> bool {
        let is_such = |tracked: &Tracked<D>| tracked.number.is_none() && tracked.memory.strong_count() > 0;
        self.memories().iter().any(is_such)
    }

    /// Returns the memory that this rank has not dropped, except allocations of these numbers, with its row.
    pub fn memory_except(&self, numbers: &[u64]) -> Vec<(Option<usize>, Arc<D::Shared>)> {
        let is_other =
            |tracked: &&Tracked<D>| !tracked.number.is_some_and(|number| numbers.contains(&number));
        let live = |tracked: &Tracked<D>| Some((tracked.row, tracked.memory.upgrade()?));
        self.memories().iter().filter(is_other).filter_map(live).collect()
    }

    /// Sets the number of symmetric allocations so far.
    pub fn set_allocations(&self, number: u64) {
        self.allocations.store(number, Ordering::Relaxed);
    }

    /// Returns the number of the next symmetric allocation. Called in a step, which orders it with
    /// [`Self::take_number`].
    pub fn next_number(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Takes the next number, on all ranks. Called in a step.
    pub fn take_number(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    /// Registers memory that all ranks have mapped, in the tables of all ranks. Collective, in a step.
    pub fn register(self: &Arc<Self>, memory: Arc<D::Shared>, bytes: usize) -> Result<Registration<D>> {
        let membership = self.membership()?;
        let Connection { bootstrap, timeout, .. } = &membership.connection;
        let free_rows = self.lock().registry.free_rows();
        let free_rows = bootstrap.all_gather(&free_rows, *timeout)?;
        let row = self.lock().registry.next_row(&free_rows);
        let registration =
            row.and_then(|row| Registration::new(Arc::clone(self), &membership.region, memory, row, bytes));
        // No rank pulls from the memory before all ranks have it in their tables. If one rank fails, all undo it.
        membership.connection.all_succeeded(registration)
    }

    /// Drops unregistered memory, at once or when no kernel can be using it any more.
    pub fn retire(&self, memory: Arc<D::Shared>) {
        // A fork launches no kernels, and another thread of its parent may have held the lock.
        if self.in_fork() {
            return;
        }
        if self.is_in_call() {
            // This thread is in a call, whose kernels may use the memory.
            return self.set_aside(None, memory);
        }
        // The lock keeps other calls out.
        let _state = self.lock();
        if self.device.wait_for_calls().is_err() {
            self.set_aside(None, memory);
        }
    }

    /// Keeps memory, and its row if it is registered, until no kernel can be using it.
    fn set_aside(&self, row: Option<usize>, memory: Arc<D::Shared>) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push((row, memory));
    }

    /// Makes a registered buffer private to this rank, after a failed launch and before its call returns.
    ///
    /// Peers that go on with the call may still read the registered buffer that `source` names, but the caller may
    /// write to it again. They read no other buffer: a successful call ends after all peers have read. The caller holds
    /// the lock, and the call borrows the buffer, so that nobody writes to it meanwhile.
    pub fn make_private(&self, source: u64) {
        let is_source = |tracked: &&Tracked<D>| {
            let source_of = |row| source_word(row, 0) >> FA_SOURCE_ID_SHIFT;
            tracked.row.is_some_and(|row| source_of(row) == source >> FA_SOURCE_ID_SHIFT)
        };
        let memories = self.memories();
        let memory = memories.iter().find(is_source).and_then(|tracked| tracked.memory.upgrade());
        drop(memories);
        if let Some(memory) = memory {
            memory.make_private();
        }
    }

    /// Clears a row of the table, if no kernel can be reading it. The caller holds the lock.
    fn clear_row(&self, state: &mut State<D>, row: usize) -> Result<()> {
        if let Some(membership) = &state.membership {
            membership.region.write_row(&self.device, row, &Default::default())?;
        }
        state.registry.set(row, Row::Free);
        Ok(())
    }

    /// Notes symmetric memory, and forgets dropped memory.
    pub fn track(&self, number: Option<u64>, bytes: usize, memory: &Arc<D::Shared>) {
        let mut memories = self.memories();
        memories.retain(|tracked| tracked.memory.strong_count() > 0);
        memories.push(Tracked { number, bytes, row: None, memory: Arc::downgrade(memory) });
    }

    /// Notes the row of memory; `None` if it is not registered any more.
    fn track_row(&self, row: Option<usize>, bytes: usize, memory: &Arc<D::Shared>) {
        let is_same = |tracked: &Tracked<D>| std::ptr::eq(tracked.memory.as_ptr(), Arc::as_ptr(memory));
        if !self.memories().iter().any(is_same) {
            self.track(None, bytes, memory);
        }
        for tracked in self.memories().iter_mut() {
            let is_same = is_same(tracked);
            // A row that was set free may be another memory's now.
            if is_same || tracked.row == row {
                tracked.row = row.filter(|_| is_same);
            }
        }
    }

    fn memories(&self) -> MutexGuard<'_, Vec<Tracked<D>>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Retries to clear retired rows, and returns the memory that may be dropped.
    pub fn clear_retired(&self, state: &mut State<D>) -> Vec<Arc<D::Shared>> {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let (cleared, left) = std::mem::take(&mut *retired).into_iter().partition(|(row, _)| match *row {
            Some(row) => self.clear_row(state, row).is_ok(),
            None => self.device.wait_for_calls().is_ok(),
        });
        *retired = left;
        let cleared: Vec<_> = cleared;
        cleared.into_iter().map(|(_, memory)| memory).collect()
    }

    /// Locks the state. A call holds the lock until it ends: calls are ordered, and no buffer is dropped while a kernel
    /// reads the table. The calling thread must not be in a call.
    pub fn lock(&self) -> Held<'_, State<D>> {
        self.state.lock()
    }

    /// Locks the state, unless another thread is in a call.
    pub fn try_enter(&self) -> Result<Held<'_, State<D>>> {
        self.state.try_enter()
    }

    /// Locks the state for a call. The program may end the wait.
    pub fn enter(&self) -> Result<Held<'_, State<D>>> {
        self.state.enter()
    }

    /// Locks the state for a step, once calls of other threads have ended, unless the deadline passes first.
    pub fn enter_within(&self, deadline: &Deadline<'_>) -> Result<Held<'_, State<D>>> {
        self.state.enter_within(deadline)
    }

    /// Returns whether this thread is in a call and holds the lock.
    #[inline]
    pub fn is_in_call(&self) -> bool {
        self.state.is_mine()
    }
}

impl<D: Device> Drop for Endpoint<D> {
    fn drop(&mut self) {
        // The last references: nobody uses the endpoint any more. In a fork the locks may be held for ever.
        let membership = self.current.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.state.get_mut().membership = None;
        // Two attempts, since this is the last opportunity.
        let ended = self.device.wait_for_calls().or_else(|_| self.device.wait_for_calls());
        if let Err(error) = ended {
            let (rank, in_owner) = (self.rank, !self.in_fork());
            if !in_owner || !self.device.is_lost() {
                // Kernels may still run, and use their module, the regions and retired memory.
                if let Some(membership) = &membership {
                    membership.connection.keep_mappings();
                    std::mem::forget(Arc::clone(&membership.region));
                }
                self.device.leave();
                if in_owner {
                    tracing::warn!(
                        rank, %error,
                        "closed while calls may still run: their memory stays allocated until the process ends"
                    );
                }
                return;
            }
            tracing::warn!(rank, %error, "closed on a device that has failed");
        }
        // SAFETY: each is dropped once, here, and not used afterwards. The kernels have ended, or the device has failed
        // and runs none.
        unsafe {
            ManuallyDrop::drop(&mut self.device);
            ManuallyDrop::drop(&mut self.retired);
        }
        // Last: exported memory is freed after this rank's own mappings are closed.
        drop(membership);
    }
}
