//! The parts of memory that every rank maps: this rank's own, and the peers'. Their addresses outlive what is mapped
//! there, so that graphs that hold them are valid after a suspension.
//!
//! A kernel's parameters in a captured graph have the addresses of all ranks' regions. So a region of a later world is
//! made at other addresses first, where its kernels are tried and its epochs are written. When all ranks have
//! succeeded, each maps it where the first one was ([`Memory::replace`]). Until then everything can be undone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;

use super::memory::{returned, Memory, Pinned};
use crate::bootstrap::Bootstrap;
use crate::device::sealed;
use crate::error::Result;

/// A rank's memory, and the offset of the shared bytes in it.
pub(crate) type Part = (Arc<Memory>, u64);

/// The ranks' parts.
pub(crate) struct Parts {
    /// This rank's context.
    context: Arc<CudaContext>,
    rank: usize,
    /// By rank; `None` for a part that is not shared yet. A peer of this process has the same memory as its own part.
    pub ranks: Vec<Option<Part>>,
}

impl Parts {
    pub fn new(context: &Arc<CudaContext>, bootstrap: &dyn Bootstrap) -> Self {
        Self::of(context, bootstrap.rank(), bootstrap.world_size())
    }

    pub fn of(context: &Arc<CudaContext>, rank: usize, world_size: usize) -> Self {
        Self { context: Arc::clone(context), rank, ranks: vec![None; world_size] }
    }

    pub fn part(&self, rank: usize) -> Option<&Part> {
        self.ranks.get(rank)?.as_ref()
    }

    pub fn own(&self) -> Option<&Arc<Memory>> {
        self.part(self.rank).map(|(memory, _)| memory)
    }

    /// Returns whether all parts are virtual memory.
    pub fn are_virtual(&self) -> bool {
        self.ranks.iter().flatten().all(|(memory, _)| memory.is_virtual())
    }

    /// Maps what is in `fresh` at these addresses, except parts of peers in this process, who do that themselves.
    fn replace(&self, fresh: &Self) -> Result<()> {
        let both = self.ranks.iter().zip(&fresh.ranks).enumerate();
        both.filter_map(|(rank, (place, fresh))| Some((rank, place.as_ref()?, fresh.as_ref()?)))
            .filter(|(rank, (place, _), _)| *rank == self.rank || place.is_imported())
            .try_for_each(|(_, (place, _), (fresh, _))| place.replace(fresh))
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        for (memory, _) in self.ranks.drain(..).flatten() {
            returned::release(memory, &self.context);
        }
    }
}

/// What a rank keeps of the region of its first world, for the regions of later ones.
#[derive(Default)]
pub(super) struct KeptRegion {
    pub region: Option<Arc<Parts>>,
    pub status: Option<Arc<Pinned>>,
}

/// Allocation of this rank and its mappings of the peers' counterparts.
pub struct CudaMemory {
    parts: Mutex<Arc<Parts>>,
    /// The parts of the region of before, whose addresses this one gets.
    place: Option<Arc<Parts>>,
    /// The peers' parts are not mapped.
    closed: AtomicBool,
    /// Launches of this rank before the first one that uses the memory.
    pub(super) runs_before: u64,
}

impl CudaMemory {
    pub(super) fn of(parts: Parts) -> Self {
        Self {
            parts: Mutex::new(Arc::new(parts)),
            place: None,
            closed: AtomicBool::default(),
            runs_before: 0,
        }
    }

    /// Says where the region of before was.
    pub(super) fn with_place(mut self, place: Arc<Parts>, runs_before: u64) -> Self {
        (self.place, self.runs_before) = (Some(place), runs_before);
        self
    }

    pub(super) fn parts(&self) -> Arc<Parts> {
        Arc::clone(&self.lock())
    }

    pub(super) fn into_parts(self) -> Arc<Parts> {
        self.parts.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Parts>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shares this rank's part with the peers of another world: `fresh` are their parts. Those that had an address keep
    /// it.
    pub(super) fn share_again(&self, fresh: Parts) -> Result<()> {
        let parts = self.parts();
        parts.replace(&fresh)?;
        let mut new = Parts::of(&parts.context, parts.rank, parts.ranks.len());
        for (rank, to) in new.ranks.iter_mut().enumerate() {
            *to = parts.part(rank).or_else(|| fresh.part(rank)).cloned();
        }
        *self.lock() = Arc::new(new);
        self.closed.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl sealed::Shared for CudaMemory {
    fn address(&self, rank: usize) -> u64 {
        self.lock().part(rank).map_or(0, |(memory, offset)| memory.address() + offset)
    }

    fn can_be_shared_again(&self) -> bool {
        self.lock().are_virtual()
    }

    fn has_peers(&self) -> bool {
        !self.closed.load(Ordering::Relaxed)
    }

    /// Unmaps the parts of peers in other processes; their addresses stay reserved. A peer in this process owns what is
    /// mapped here.
    fn close_peers(&self) -> Result<()> {
        self.closed.store(true, Ordering::Relaxed);
        let parts = self.parts();
        // All of them, also after an error.
        let mut all = Ok(());
        for (memory, _) in parts.ranks.iter().flatten().filter(|(memory, _)| memory.is_imported()) {
            all = all.and(memory.give_back());
        }
        all
    }

    fn own_bytes(&self) -> usize {
        self.lock().own().map_or(0, |memory| memory.bytes())
    }

    fn unmap_peers(&self) -> Result<()> {
        self.close_peers()
    }

    fn give_back(&self) -> Result<()> {
        self.parts().own().map_or(Ok(()), |own| own.give_back())
    }

    fn settle(&self) -> Result<()> {
        let Some(place) = &self.place else { return Ok(()) };
        let replaced = place.replace(&self.parts());
        // After an error too: then this is what must be given back.
        *self.lock() = Arc::clone(place);
        replaced
    }
}
