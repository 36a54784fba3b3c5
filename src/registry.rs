//! Registered buffers: memory whose addresses all ranks know, pulled from with no copy.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::FA_SOURCE_ID_SHIFT;
use crate::device::host::SharedMemory;
use crate::device::sealed::Shared as _;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::MAX_RANKS;

/// The registered buffers of a communicator. Ids are equal on all ranks.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// `[id - 1][rank]`: base address in this process, 0 where nothing is mapped. What kernels read.
    table: Vec<[u64; MAX_RANKS]>,
    /// Bytes of this rank's buffer, parallel to `table`; 0 once dropped.
    lengths: Vec<usize>,
    rank: usize,
}

/// Largest id and largest offset that a source word can hold.
const MAX_ID: u64 = (1 << (64 - FA_SOURCE_ID_SHIFT)) - 1;

impl Registry {
    pub fn new(rank: usize) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Address and length of the table for a kernel; valid while the registry is not changed.
    pub fn table(&self) -> (u64, u64) {
        (self.table.as_ptr() as u64, self.table.len() as u64)
    }

    /// The source word for `bytes` bytes at `address`, or 0 if they are not all in one registered buffer.
    pub fn source(&self, address: u64, bytes: usize) -> u64 {
        let found = self.table.iter().zip(&self.lengths).position(|(bases, &length)| {
            let base = bases[self.rank];
            length > 0
                && address >= base
                && address - base <= length as u64
                && bytes as u64 <= length as u64 - (address - base)
        });
        found.map_or(0, |index| {
            ((index as u64 + 1) << FA_SOURCE_ID_SHIFT) + (address - self.table[index][self.rank])
        })
    }

    /// Ids that this rank has dropped, as bytes for the other ranks.
    pub fn dropped(&self) -> Vec<u8> {
        let dropped = self.lengths.iter().zip(1u32..).filter(|(&length, _)| length == 0);
        dropped.flat_map(|(_, id)| id.to_le_bytes()).collect()
    }

    /// The id that all ranks use next: the lowest that all have dropped, else a new one.
    pub fn next_id(&self, dropped: &[Vec<u8>]) -> Result<usize> {
        let mut drops = vec![0usize; self.table.len() + 1];
        for (rank, bytes) in dropped.iter().enumerate() {
            for id in bytes.chunks(4) {
                let id = id.try_into().map(u32::from_le_bytes).ok().and_then(|id| usize::try_from(id).ok());
                let count = id.and_then(|id| drops.get_mut(id)).ok_or_else(|| Error::Malformed {
                    rank,
                    reason: "its list of dropped buffers names one that never was".into(),
                })?;
                *count += 1;
            }
        }
        let id = drops.iter().position(|&count| count == dropped.len()).unwrap_or(self.table.len() + 1);
        if id as u64 > MAX_ID {
            return Err(Error::Unavailable {
                what: "another registered buffer".into(),
                reason: format!("{MAX_ID} are in use"),
            });
        }
        Ok(id)
    }

    pub fn insert(&mut self, id: usize, bases: [u64; MAX_RANKS], length: usize) {
        if id > self.table.len() {
            self.table.push(bases);
            self.lengths.push(length);
        } else {
            self.table[id - 1] = bases;
            self.lengths[id - 1] = length;
        }
    }

    fn remove(&mut self, id: usize) {
        self.table[id - 1] = [0; MAX_RANKS];
        self.lengths[id - 1] = 0;
    }
}

/// Locks a registry; a panic elsewhere cannot have left it half changed, since no change of it panics midway.
pub(crate) fn lock(registry: &Mutex<Registry>) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that the crate allocated on all ranks together: an allreduce from it pulls without a copy.
///
/// It derefs to a slice. A view into it is registered too. Dropping it is local; the memory goes when every rank has
/// dropped its own.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    // Before the memory: out of the registry first, then unmapped.
    _registration: Registration,
    memory: SharedMemory,
    rank: usize,
    count: usize,
    elements: PhantomData<T>,
}

/// Takes a buffer out of the registry when dropped; waits for a call that is under way.
#[derive(Debug)]
struct Registration {
    registry: Arc<Mutex<Registry>>,
    id: usize,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.registry).remove(self.id);
    }
}

impl<T: Element> Buffer<T> {
    /// Registers `memory`, which holds at least `count` elements and is mapped by all ranks.
    pub(crate) fn new(
        memory: SharedMemory,
        count: usize,
        registry: &Arc<Mutex<Registry>>,
        id: usize,
    ) -> Self {
        let mut locked = lock(registry);
        let rank = locked.rank;
        locked.insert(id, std::array::from_fn(|rank| memory.address(rank)), count * size_of::<T>());
        drop(locked);
        let registration = Registration { registry: Arc::clone(registry), id };
        Self { _registration: registration, memory, rank, count, elements: PhantomData }
    }

    fn address(&self) -> *mut T {
        self.memory.address(self.rank) as *mut T
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `count` elements (allocated so, zeroed, page-aligned) for the life of self, any
        // bits are a value of T, and peers only read it.
        unsafe { std::slice::from_raw_parts(self.address(), self.count) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref; peers read it only while this rank is in an allreduce from it, which borrows it.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.count) }
    }
}
