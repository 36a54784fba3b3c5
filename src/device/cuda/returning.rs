//! Ranks that leave their world and come back: what a GPU keeps, and how memory is shared again at the addresses that
//! it had.
//!
//! A captured launch has these addresses: of the regions and of the table in this rank's region, of the status words,
//! and of the caller's memory. They stay. Its source word names a row of the table, which is written again. Epochs,
//! signals and mailboxes are in the regions alone, and begin again there.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use super::memory::{Handle, Memory, Pinned, Sharing};
use super::parts::{CudaMemory, KeptRegion, Parts};
use super::world::Identity;
use super::Cuda;
use crate::abi::FaStatus;
use crate::bootstrap::{all_exchanged, all_succeeded, exchange_several, Bootstrap};
use crate::device::sealed::cannot_return;
use crate::error::{Error, Result};

/// What maps memory again.
type Commit<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

impl Cuda {
    fn returning(&self) -> MutexGuard<'_, KeptRegion> {
        self.returning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region(&self) -> Option<Arc<Parts>> {
        self.returning().region.clone()
    }

    /// Notes where the first region is.
    pub(super) fn keep_region(&self, memory: &CudaMemory) {
        self.returning().region.get_or_insert_with(|| memory.parts());
    }

    /// Returns the status words, which all regions of this rank have one after the other.
    pub(super) fn status_words(&self) -> Result<Arc<Pinned>> {
        let mut returning = self.returning();
        if let Some(status) = &returning.status {
            return Ok(Arc::clone(status));
        }
        let status = Arc::new(Pinned::allocate(&self.context, size_of::<FaStatus>())?);
        returning.status = Some(Arc::clone(&status));
        Ok(status)
    }

    /// Checks that all that captured launches hold can be kept.
    pub(super) fn check_return(&self) -> Result<()> {
        if let Some(sharing @ (Sharing::Ipc | Sharing::Host)) = self.chosen_sharing() {
            return Err(cannot_return(format!(
                "the ranks share memory by sharing={}, and only virtual memory (sharing=descriptor or fabric, and \
                 pointers where the GPU has it) can be unmapped while its addresses stay",
                sharing.name()
            )));
        }
        if self.region().is_some_and(|region| !region.are_virtual()) {
            return Err(cannot_return(
                "a GPU or its driver has no virtual memory management: its memory cannot be unmapped while its \
                 addresses stay",
            ));
        }
        if !self.world.same_process && !self.graph_rows().table().is_empty() {
            return Err(cannot_return(
                "inputs of captured graphs are registered, and other processes have them open by CUDA IPC: capture \
                 without Cuda::graph_registration, or from buffers of Communicator::alloc; or destroy the graphs and \
                 call register_graph_buffers first",
            ));
        }
        Ok(())
    }

    /// Joins the ranks of another world, some of them new. Collective; in step with [`Cuda::join`] of new ranks.
    ///
    /// [`Cuda::join`]: crate::device::sealed::Device::join
    pub(super) fn meet_again(&self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let region = self.region();
        let number = |memory: &Arc<Memory>| memory.export();
        let own = region.as_ref().and_then(|region| region.own()).map_or(0, number);
        // The regions of peers in this process, which are mapped once for all of its ranks.
        let near: Vec<_> = (0..bootstrap.world_size())
            .map(|rank| Some(region.as_ref()?.part(rank)?).filter(|(memory, _)| !memory.is_imported()))
            .map(|part| part.map(|(memory, _)| number(memory)))
            .collect();
        let own = Identity::of(&self.context, self.process, own);
        let checked = self.world.meet_again(own, &near, bootstrap, timeout)?;
        all_succeeded(checked, bootstrap, timeout)
    }

    /// Allocates the region of a world that is formed again, at other addresses than those of the region of before.
    /// Collective.
    pub(super) fn share_region_again(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let memory = self.share_by_any(bytes, true, bootstrap, timeout)?;
        // A new rank has no region of before.
        let (place, parts) = (self.region(), memory.parts());
        let checked = (0..bootstrap.world_size()).try_for_each(|rank| {
            match (place.as_ref().and_then(|place| place.part(rank)), parts.part(rank)) {
                (Some((place, _)), Some((fresh, _))) => fits(rank, place, fresh),
                _ => Ok(()),
            }
        });
        all_succeeded(checked, bootstrap, timeout)?;
        let Some(place) = place else {
            self.keep_region(&memory);
            return Ok(memory);
        };
        // All of them have been waited for, and nothing is launched before the region is used. A call that has launched
        // but is not counted yet makes the probe of the region's epochs say later that all have ended.
        Ok(memory.with_place(place, self.calls.progress.ran()))
    }

    /// Allocates this rank's part of memory that other ranks have. It has no addresses of the peers' parts yet.
    pub(super) fn allocate_own_part(
        &self,
        bytes: usize,
        rank: usize,
        world_size: usize,
    ) -> Result<CudaMemory> {
        let own = Memory::allocate(&self.context, &self.copies, bytes, self.shared_by()?)?;
        let mut parts = Parts::of(&self.context, rank, world_size);
        parts.ranks[rank] = Some((own, 0));
        Ok(CudaMemory::of(parts))
    }

    /// Returns how memory is shared, after the region was.
    fn shared_by(&self) -> Result<Sharing> {
        self.chosen_sharing().ok_or_else(|| cannot_return("the ranks share no memory yet"))
    }

    /// Passes handles of this rank's parts of memories to all ranks, which pass those of theirs in the same order, and
    /// maps the peers' parts at addresses of their own. The result moves them to those that they had. Collective.
    pub(super) fn share_kept<'a>(
        &self,
        memories: &'a [Arc<CudaMemory>],
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Commit<'a>> {
        /// Descriptors that are received at a time: fewer than one message can carry, and than programs may have.
        const MOST: usize = 128;
        let sharing = self.shared_by()?;
        let mut fresh = Vec::new();
        for memories in memories.chunks((MOST / bootstrap.world_size()).max(1)) {
            let parts: Vec<_> = memories.iter().map(|memory| memory.parts()).collect();
            let exported =
                parts.iter().map(|parts| self.export_own(parts, sharing)).collect::<Result<Vec<_>>>();
            let (handles, descriptors): (Vec<_>, Vec<_>) =
                all_succeeded(exported, bootstrap, timeout)?.into_iter().unzip();
            let handles = bootstrap.all_gather(&handles.concat(), timeout)?;
            let descriptors: Vec<_> = descriptors.iter().flatten().map(AsFd::as_fd).collect();
            let count = descriptors.len();
            let mut descriptors: Vec<_> = match count {
                0 => handles.iter().map(|_| Vec::new().into_iter()).collect(),
                _ => {
                    let by_rank = exchange_several(bootstrap, &descriptors, count..=count, timeout / 2);
                    let by_rank = all_exchanged(by_rank, bootstrap, timeout)?;
                    by_rank.into_iter().map(Vec::into_iter).collect()
                }
            };
            let imported = parts.iter().enumerate().map(|(number, parts)| {
                let mut all = Parts::new(&self.context, bootstrap);
                for rank in (0..bootstrap.world_size()).filter(|&rank| rank != bootstrap.rank()) {
                    let bytes = handles[rank].chunks(Handle::BYTES).nth(number).unwrap_or_default();
                    let handle = Handle::decode(rank, bytes)?;
                    let descriptor = descriptors[rank].next();
                    let place = parts.part(rank);
                    // It is mapped once in a process, at the address that its owner keeps.
                    if place.is_some_and(|(memory, _)| !memory.is_imported()) {
                        continue;
                    }
                    let memory =
                        Memory::import(&self.context, rank, &handle, self.process, descriptor.as_ref())?;
                    place.map_or(Ok(()), |(place, _)| fits(rank, place, &memory))?;
                    all.ranks[rank] = Some((memory, handle.offset));
                }
                Ok(all)
            });
            fresh.extend(all_succeeded(imported.collect::<Result<Vec<_>>>(), bootstrap, timeout)?);
        }
        Ok(Box::new(move || {
            memories.iter().zip(fresh).try_for_each(|(memory, fresh)| memory.share_again(fresh))
        }))
    }

    /// Returns the encoded handle of this rank's part, and its descriptor if it is shared by that.
    fn export_own(&self, parts: &Parts, sharing: Sharing) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let own = parts.own().ok_or_else(|| cannot_return("memory of this rank has gone"))?;
        let handle = own.handle(self.process, 0, sharing)?.encode();
        let descriptor = (sharing == Sharing::Descriptor).then(|| own.descriptor()).transpose()?;
        Ok((handle, descriptor))
    }
}

/// Checks that a rank's memory can be mapped where its memory of before was.
fn fits(rank: usize, place: &Memory, fresh: &Memory) -> Result<()> {
    if place.is_imported() != fresh.is_imported() {
        return Err(cannot_return(format!("rank {rank} has moved into or out of this rank's process")));
    }
    if place.bytes() != fresh.bytes() {
        let (before, now) = (place.bytes(), fresh.bytes());
        let reason = format!("its memory has {now} bytes where it had {before}");
        return Err(Error::Malformed { rank, reason });
    }
    Ok(())
}
