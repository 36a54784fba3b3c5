//! A registered buffer's row, and the memory that it is of.

use std::sync::Arc;

use super::Endpoint;
use crate::device::sealed::Shared as _;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::registry::{Range, Row};

/// A row of the table, and the memory that it is of; until it is dropped, calls from this memory pull without a copy.
pub(crate) struct Registration<D: Device> {
    endpoint: Arc<Endpoint<D>>,
    /// `None` when it has ended.
    memory: Option<Arc<D::Shared>>,
    row: usize,
    /// This rank's.
    address: u64,
}

impl<D: Device> Registration<D> {
    /// Registers `bytes` bytes of `memory` at the row that all ranks agreed on.
    pub fn new(
        endpoint: Arc<Endpoint<D>>,
        memory: D::Shared,
        row: usize,
        rank: usize,
        bytes: usize,
    ) -> Result<Self> {
        let bases = std::array::from_fn(|rank| memory.address(rank));
        let mut state = endpoint.lock();
        let written = endpoint.region.write_row(&endpoint.device, row, &bases);
        // A row that could not be written is free as on the other ranks, which give theirs up: rows stay equal on all.
        state.registry.set(
            row,
            match written {
                Ok(()) => Row::Used(Range { base: bases[rank], bytes: bytes as u64 }),
                Err(_) => Row::Free,
            },
        );
        written?;
        let memory = Arc::new(memory);
        endpoint.track(row, &memory);
        let gone = endpoint.clear_retired(&mut state.registry);
        drop(state);
        drop(gone);
        Ok(Self { endpoint, memory: Some(memory), row, address: bases[rank] })
    }

    /// This rank's address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Address of a rank's memory in this process; 0 beyond the world.
    pub fn address_of(&self, rank: usize) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address(rank))
    }

    /// What it is registered with.
    pub fn endpoint(&self) -> &Arc<Endpoint<D>> {
        &self.endpoint
    }

    /// Takes the memory out of this rank's table. Waits for calls that are under way; an error leaves the registration as it was.
    pub fn end(&mut self) -> Result<Option<D::Shared>> {
        let mut state = self.endpoint.lock();
        if self.memory.as_ref().is_some_and(|memory| memory.is_private()) {
            return Err(Error::Unavailable {
                what: "symmetric memory".into(),
                reason: "a call of its communicator has failed, and the buffer is this rank's alone since"
                    .into(),
            });
        }
        self.endpoint.clear_row(&mut state.registry, self.row)?;
        // The lock is held: nobody else has it.
        Ok(self.memory.take().and_then(Arc::into_inner))
    }
}

impl<D: Device> Drop for Registration<D> {
    fn drop(&mut self) {
        // In a fork the row is the parent's, whose calls go on, and the lock may be one that another of its threads held.
        if self.memory.is_none() || self.endpoint.connection.here().is_err() {
            return;
        }
        // The calls cannot be waited for: the memory has to wait for them.
        let mut set_aside = || {
            let memory = self.memory.take().and_then(Arc::into_inner);
            memory.into_iter().for_each(|memory| self.endpoint.set_aside(Some(self.row), memory));
        };
        if self.endpoint.is_entered_here() {
            // This thread is in a call, which may use the row: it stays in the table as it is.
            return set_aside();
        }
        // Out of the table before its mappings go; waits for calls that are under way.
        let mut state = self.endpoint.lock();
        if self.endpoint.clear_row(&mut state.registry, self.row).is_err() {
            state.registry.set(self.row, Row::Retired);
            set_aside();
        }
        drop(state);
        // Before the endpoint: it may be the last that holds it, and then waits for the peers to have closed theirs.
        self.memory = None;
    }
}
