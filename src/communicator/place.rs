//! The place of a rank whose world is suspended or formed again, and the memory that a new rank finds there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::enter::{share_kept, Progress, Roles};
use crate::bootstrap::Bootstrap;
use crate::device::sealed::Shared as _;
use crate::device::{sealed, Device};
use crate::endpoint::{Connection, Endpoint, MemoryFacts, Region, Registration};
use crate::error::Result;
use crate::liveness::FlightRecord;
use crate::registry::{Range, Row};

/// What a communicator needs to leave its world and come back.
pub(super) struct Returning<D: Device> {
    pub progress: Mutex<Progress>,
    pub inherited: Mutex<Vec<Inheritance<D>>>,
    /// While the communicator is suspended: the flight record of the world that it has left.
    pub record: Mutex<Option<FlightRecord>>,
    /// The bootstrap of the world that is being entered.
    pub entering: Mutex<Option<Arc<dyn Bootstrap>>>,
    /// Calls in earlier worlds.
    pub calls: AtomicU64,
}

/// Memory of the rank whose place this one has taken.
pub(super) struct Inheritance<D: Device> {
    pub facts: MemoryFacts,
    pub memory: Arc<<D as sealed::Device>::Shared>,
    pub registration: Option<Registration<D>>,
}

/// Memory that a rank finds when it takes the place of another: see
/// [`Communicator::inherited`](super::Communicator::inherited).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inherited {
    /// Number of the allocation, from 0, in the order in which all ranks have allocated.
    pub number: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Whether it is a registered buffer; otherwise it is symmetric memory.
    pub is_registered: bool,
}

/// What a suspended communicator has given back: see [`Communicator::suspend`](super::Communicator::suspend).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Suspended {
    /// Bytes of shared memory of this rank that were given back.
    pub bytes: usize,
    /// Bytes of this rank's buffers and symmetric memory, which keep their contents.
    pub kept_bytes: usize,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Device> Returning<D> {
    pub fn new(progress: Progress, inherited: Vec<Inheritance<D>>) -> Self {
        let (record, entering, calls) = Default::default();
        Self { progress: progress.into(), inherited: inherited.into(), record, entering, calls }
    }

    /// Notes an abort, which ends the wait of another thread that enters a world.
    pub fn abort(&self) {
        if let Some(bootstrap) = &*locked(&self.entering) {
            bootstrap.interrupt();
        }
    }

    /// Returns the number of calls that this rank has begun in earlier worlds.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// Memory that a new rank has been given, before its endpoint exists.
pub(super) type Given<D> = Vec<(MemoryFacts, Arc<<D as sealed::Device>::Shared>)>;

/// Allocates a new rank's part of all memory of the world that it enters, and shares it. Collective.
pub(super) fn inherit<D: Device>(
    device: &D,
    connection: &Connection<D>,
    region: &Region<D>,
    roles: &Roles,
) -> Result<Given<D>> {
    let (rank, world_size) = (connection.bootstrap.rank(), connection.bootstrap.world_size());
    let part = |facts: MemoryFacts| {
        let bytes = usize::try_from(facts.bytes).unwrap_or(usize::MAX).max(1);
        Ok((facts, Arc::new(device.allocate_part(bytes, rank, world_size)?)))
    };
    let parts: Result<Given<D>> = roles.kept().into_iter().map(part).collect();
    let parts = connection.all_succeeded(parts)?;
    share_kept(device, connection, region, None, &parts).map_err(|(error, _)| error)?;
    Ok(parts)
}

/// Puts a new rank's memory into its endpoint.
pub(super) fn inherited<D: Device>(
    endpoint: &Arc<Endpoint<D>>,
    roles: &Roles,
    given: Given<D>,
) -> Vec<Inheritance<D>> {
    let mut state = endpoint.lock();
    state.calls.completed = roles.progress().completed;
    let (rows, allocations) = roles.most();
    endpoint.set_allocations(allocations);
    state.registry.grow(rows);
    let put = |(facts, memory): (MemoryFacts, Arc<_>)| {
        let bytes = facts.bytes as usize;
        endpoint.track(Some(facts.number), bytes, &memory);
        let registration = facts.row.map(|row| {
            let base = memory.address(endpoint.rank);
            state.registry.set(row as usize, Row::Used(Range { base, bytes: facts.bytes }));
            Registration::of_row(Arc::clone(endpoint), Arc::clone(&memory), row as usize, bytes)
        });
        Inheritance { facts, memory, registration }
    };
    given.into_iter().map(put).collect()
}
