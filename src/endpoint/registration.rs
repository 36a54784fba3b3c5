//! A registered buffer: its row in the table, and its memory.

use std::sync::Arc;

use super::{Endpoint, Region};
use crate::device::sealed::Shared as _;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::registry::{Range, Row};

/// A row of the table and its memory. Until it is dropped, peers pull directly from this memory, without staging.
pub(crate) struct Registration<D: Device> {
    endpoint: Arc<Endpoint<D>>,
    /// `None` after the registration has ended.
    memory: Option<Arc<D::Shared>>,
    row: usize,
    /// This rank's address of the memory.
    address: u64,
}

impl<D: Device> Registration<D> {
    /// Registers `bytes` bytes of `memory` at the row that all ranks agreed on.
    pub fn new(
        endpoint: Arc<Endpoint<D>>,
        region: &Region<D>,
        memory: Arc<D::Shared>,
        row: usize,
        bytes: usize,
    ) -> Result<Self> {
        let bases = std::array::from_fn(|rank| memory.address(rank));
        let rank = endpoint.rank;
        let mut state = endpoint.lock();
        let written = region.write_row(&endpoint.device, row, &bases);
        // If the row could not be written, it stays free. The other ranks then free theirs: rows stay equal on all
        // ranks.
        state.registry.set(
            row,
            match written {
                Ok(()) => Row::Used(Range { base: bases[rank], bytes: bytes as u64 }),
                Err(_) => Row::Free,
            },
        );
        written?;
        endpoint.track_row(Some(row), bytes, &memory);
        let gone = endpoint.clear_retired(&mut state);
        drop(state);
        drop(gone);
        Ok(Self { endpoint, memory: Some(memory), row, address: bases[rank] })
    }

    /// Returns the registration of a row that has been written.
    pub fn of_row(endpoint: Arc<Endpoint<D>>, memory: Arc<D::Shared>, row: usize, bytes: usize) -> Self {
        endpoint.track_row(Some(row), bytes, &memory);
        let address = memory.address(endpoint.rank);
        Self { endpoint, memory: Some(memory), row, address }
    }

    /// Returns this rank's address of the memory.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the address in this process of a rank's memory; 0 for ranks beyond the world.
    pub fn address_of(&self, rank: usize) -> u64 {
        let memory = self.memory.as_ref().filter(|memory| rank == self.endpoint.rank || memory.has_peers());
        memory.map_or(0, |memory| memory.address(rank))
    }

    /// Returns the endpoint that the memory is registered with.
    pub fn endpoint(&self) -> &Arc<Endpoint<D>> {
        &self.endpoint
    }

    /// Removes the memory from this rank's table and returns it. Waits for running calls. On error, the registration
    /// stays.
    pub fn end(&mut self) -> Result<Option<Arc<D::Shared>>> {
        let mut state = self.endpoint.lock();
        if self.memory.as_ref().is_some_and(|memory| memory.is_private()) {
            return Err(Error::Unavailable {
                what: "symmetric memory".into(),
                reason: "a call of its communicator has failed, and has made the buffer private to this rank"
                    .into(),
            });
        }
        self.endpoint.clear_row(&mut state, self.row)?;
        let memory = self.memory.take();
        if let Some(memory) = &memory {
            self.endpoint.track_row(None, 0, memory);
        }
        Ok(memory)
    }
}

impl<D: Device> Drop for Registration<D> {
    fn drop(&mut self) {
        // In a fork, the row belongs to the parent, whose calls go on, and another of its threads may have held the
        // lock.
        if self.memory.is_none() || self.endpoint.in_fork() {
            return;
        }
        // Calls cannot be waited for here: the memory is kept until they have ended.
        let mut set_aside = || {
            let memory = self.memory.take();
            memory.into_iter().for_each(|memory| self.endpoint.set_aside(Some(self.row), memory));
        };
        if self.endpoint.is_in_call() {
            // This thread is in a call, which may use the row: the row stays in the table.
            return set_aside();
        }
        // The row is cleared before the mappings are closed. This waits for running calls.
        let mut state = self.endpoint.lock();
        if self.endpoint.clear_row(&mut state, self.row).is_err() {
            state.registry.set(self.row, Row::Retired);
            set_aside();
        }
        drop(state);
        // Before the endpoint: this may hold the last reference to it, whose drop waits for the peers' mappings to
        // close.
        self.memory = None;
    }
}
