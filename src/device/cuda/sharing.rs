//! Memory that every rank maps: the ways to share it, tried one after the other with a real exchange of data.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::CudaContext;

use super::copies::Copies;
use super::driver;
use super::handle::{Handle, Sharing};
use super::memory::Memory;
use super::{returned, Cuda};
use crate::bootstrap::{all_succeeded, exchange_descriptors, Bootstrap};
use crate::device::sealed;
use crate::error::{Error, Result};

/// What a rank writes to its memory for the peers to read, once.
type Pattern = [u64; 2];

impl Cuda {
    /// The ways to try, best first.
    fn candidates(&self) -> Vec<Sharing> {
        if let Some(&chosen) = self.chosen.get() {
            return vec![chosen];
        }
        match self.sharing {
            Some(sharing) => vec![sharing],
            None if self.world.same_process => vec![Sharing::Pointers],
            None => vec![Sharing::Descriptor, Sharing::Ipc],
        }
    }

    /// Allocates in the first way that works on all ranks, which is then the only one. Collective.
    pub(super) fn share_by_any(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        // On all ranks or on none: allocating would spoil a capture, too.
        all_succeeded(self.calls.wait_for_last_call(), bootstrap, timeout)?;
        let mut reasons = Vec::new();
        let candidates = self.candidates();
        for &sharing in &candidates {
            match self.share_by(sharing, bytes, bootstrap, timeout) {
                Ok(memory) => {
                    self.chosen.get_or_init(|| sharing);
                    return Ok(memory);
                }
                // The ranks have lost each other.
                Err(error @ (Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. })) => {
                    return Err(error);
                }
                Err(error) if candidates.len() == 1 && !self.world.is_apart() => return Err(error),
                // All else that a rank fails with, all ranks hear of: all try the next.
                Err(error) => reasons.push(format!("{}: {error}", sharing.name())),
            }
        }
        let reasons = reasons.join("; ");
        let reason = match self.world.is_apart() {
            true => format!("{} ({reasons})", self.world.why_apart()),
            false => reasons,
        };
        Err(Error::Unavailable { what: "memory that the ranks' GPUs share".into(), reason })
    }

    /// Closes the mappings of the peers' memory and, when all ranks have, frees this rank's. Collective.
    pub(super) fn free_shared(
        &self,
        mut memory: CudaMemory,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<()> {
        let mut ranks = std::mem::take(&mut memory.ranks);
        let (own, _) = ranks.swap_remove(bootstrap.rank());
        // What another holder is left of goes with the last one: a peer in this process holds its own memory.
        let release = |memory| Arc::into_inner(memory).map_or(Ok(()), Memory::release);
        let closed = ranks.into_iter().try_for_each(|(peers, _)| release(peers));
        all_succeeded(closed, bootstrap, timeout)?;
        self.exports.forget(&own);
        all_succeeded(release(own), bootstrap, timeout)
    }

    /// Maps the peers' counterparts of a caller's buffer, as far as it can be exported. Collective.
    pub(crate) fn share_foreign(
        &self,
        address: u64,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        all_succeeded(self.calls.wait_for_last_call(), bootstrap, timeout)?;
        let memory = Memory::foreign(&self.context, address).and_then(|memory| {
            // A context that lets a peer in does so for this kind of memory only, the kind that IPC exports.
            if self.world.same_device_and_process() || driver::is_exportable(address) {
                return Ok(memory);
            }
            Err(Error::Unavailable {
                what: "this memory on the other ranks' GPUs".into(),
                reason: "only what cuMemAlloc gives can be registered, not stream-ordered or VMM memory, as pools and \
                         caching allocators give; take registered memory from Communicator::alloc, or call without registering"
                    .into(),
            })
        });
        let memory = all_succeeded(memory, bootstrap, timeout)?;
        let offset = address - memory.address();
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        self.map_peers(memory, offset, sharing, bootstrap, timeout)
    }

    /// One way of sharing, tried to the end: allocate, map, and exchange data.
    fn share_by(
        &self,
        sharing: Sharing,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        // The probe needs room for its pattern.
        let bytes = bytes.max(size_of::<Pattern>());
        self.owner.free_returned();
        let own = Memory::allocate(&self.context, &self.copies, bytes, sharing);
        let own = all_succeeded(own, bootstrap, timeout)?;
        if sharing == Sharing::Ipc {
            self.exports.keep(Arc::clone(&own));
        }
        let memory = self.map_peers(own, 0, sharing, bootstrap, timeout)?;
        self.probe(&memory, bootstrap, timeout)?;
        Ok(memory)
    }

    /// Swaps handles and maps the peers' memory. Collective.
    fn map_peers(
        &self,
        own: Arc<Memory>,
        offset: u64,
        sharing: Sharing,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let exported = own.handle(self.process, offset, sharing).and_then(|handle| {
            let descriptor = (sharing == Sharing::Descriptor).then(|| own.descriptor()).transpose()?;
            Ok((handle, descriptor))
        });
        let (handle, descriptor) = all_succeeded(exported, bootstrap, timeout)?;
        if sharing == Sharing::Ipc {
            self.exports.begin();
        }
        let handles = bootstrap.all_gather(&handle.encode(), timeout)?;
        let descriptors: Result<Vec<Option<OwnedFd>>> = match &descriptor {
            Some(descriptor) => exchange_descriptors(bootstrap, descriptor.as_fd(), timeout),
            None => Ok(handles.iter().map(|_| None).collect()),
        };
        let import = |(rank, descriptor): (usize, Option<OwnedFd>)| -> Result<(Arc<Memory>, u64)> {
            if rank == bootstrap.rank() {
                return Ok((Arc::clone(&own), offset));
            }
            let handle = Handle::decode(rank, &handles[rank])?;
            let memory = Memory::import(&self.context, rank, &handle, self.process, descriptor.as_ref())?;
            Ok((memory, handle.offset))
        };
        let imported = descriptors.and_then(|descriptors| {
            let mut memory = CudaMemory { context: Arc::clone(&self.context), ranks: Vec::new() };
            for descriptor in descriptors.into_iter().enumerate() {
                memory.ranks.push(import(descriptor)?);
            }
            Ok(memory)
        });
        all_succeeded(imported, bootstrap, timeout)
    }

    /// Writes a pattern to own memory and reads the peers': a device may report peer access, and open handles, and still not
    /// deliver data (containers, virtual machines, confidential computing).
    fn probe(&self, memory: &CudaMemory, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        use sealed::Shared as _;
        let pattern = |rank: usize| [0xA5A5_0000_5A5A_0000 | rank as u64, !(rank as u64)];
        let rank = bootstrap.rank();
        // SAFETY: `share_by` allocates room for a pattern, and no kernel uses it yet.
        let written = unsafe { self.copies.write(memory.address(rank), &pattern(rank)) };
        all_succeeded(written, bootstrap, timeout)?;
        let read = |peer: usize| -> Result<()> {
            let mut words = Pattern::default();
            // SAFETY: as above, for the peer's mapping.
            unsafe { self.copies.read(memory.address(peer), &mut words) }?;
            if words != pattern(peer) {
                return Err(Error::Unavailable {
                    what: format!("rank {peer}'s memory"),
                    reason: format!(
                        "it maps, but reads {words:x?} where that rank wrote {:x?}",
                        pattern(peer)
                    ),
                });
            }
            Ok(())
        };
        let exchanged = (0..memory.ranks.len()).try_for_each(read);
        all_succeeded(exchanged, bootstrap, timeout)?;
        // SAFETY: as above; every rank has read.
        all_succeeded(
            unsafe { self.copies.write(memory.address(rank), &Pattern::default()) },
            bootstrap,
            timeout,
        )
    }
}

/// An allocation of this rank and its mappings of the peers' counterparts.
pub struct CudaMemory {
    /// This rank's.
    context: Arc<CudaContext>,
    /// By rank: the memory, and where in it the shared bytes begin.
    ranks: Vec<(Arc<Memory>, u64)>,
}

impl CudaMemory {
    /// A rank's memory, and where in it the shared bytes begin. The rank is in the world.
    pub(super) fn part(&self, rank: usize) -> (&Arc<Memory>, u64) {
        let (memory, offset) = &self.ranks[rank];
        (memory, *offset)
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        for (memory, _) in self.ranks.drain(..) {
            returned::let_go(memory, &self.context);
        }
    }
}

impl sealed::Shared for CudaMemory {
    fn address(&self, rank: usize) -> u64 {
        self.ranks.get(rank).map_or(0, |(memory, offset)| memory.address() + offset)
    }
}

/// What other processes have opened by IPC handles: CUDA leaves undefined what happens if it is freed before they close it. So what
/// is in the list stays until all ranks have said that their last mappings went.
#[derive(Clone)]
pub struct CudaExports {
    list: Arc<Mutex<Exported>>,
    copies: Arc<Copies>,
}

#[derive(Default)]
struct Exported {
    /// Handles have been swapped: for memory in the list, or for a caller's. Equal on all ranks.
    any: bool,
    kept: Vec<Arc<Memory>>,
}

impl CudaExports {
    pub(super) fn new(copies: &Arc<Copies>) -> Self {
        Self { list: Arc::default(), copies: Arc::clone(copies) }
    }

    fn lock(&self) -> MutexGuard<'_, Exported> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles are swapped. Collective.
    pub(super) fn begin(&self) {
        self.lock().any = true;
    }

    pub(super) fn keep(&self, memory: Arc<Memory>) {
        self.lock().kept.push(memory);
    }

    /// Keeps it no longer: every rank has closed it.
    fn forget(&self, memory: &Arc<Memory>) {
        self.lock().kept.retain(|kept| !Arc::ptr_eq(kept, memory));
    }
}

impl sealed::Exports for CudaExports {
    fn is_empty(&self) -> bool {
        !self.lock().any
    }

    fn take(&self) -> Box<dyn Any + Send> {
        Box::new(std::mem::take(&mut self.lock().kept))
    }

    fn is_lost(&self) -> bool {
        self.copies.is_broken()
    }
}
