//! Memory that every rank maps. The mechanisms of sharing are tried in order, each with a real exchange of data.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::driver;
use super::memory::allocation::not_of_gpu;
use super::memory::{Copies, Handle, Memory, Sharing};
use super::parts::{CudaMemory, Parts};
use super::{share_probe, Cuda};
use crate::bootstrap::{all_exchanged, all_succeeded, exchange_descriptors, Bootstrap};
use crate::device::host::{Populate, SharedMemory};
use crate::device::sealed::{self, Shared as _};
use crate::error::{Error, Result};

impl Cuda {
    /// Returns the mechanisms to try, best first.
    fn candidates(&self) -> Vec<Sharing> {
        let mut candidates = match self.chosen.get().copied().or(self.sharing) {
            Some(sharing) => return vec![sharing],
            None if self.world.several_nodes => vec![Sharing::Fabric],
            None if self.world.same_process => vec![Sharing::Pointers],
            None => vec![Sharing::Descriptor, Sharing::Ipc],
        };
        // Only where the GPUs are known not to reach each other: host memory is slow, and hides other errors.
        if self.world.is_unreachable() {
            candidates.push(Sharing::Host);
        }
        candidates
    }

    /// Allocates by the first mechanism that works on all ranks. Later allocations use the same one. Collective.
    /// Memory whose addresses are kept is virtual.
    pub(super) fn share_by_any(
        &self,
        bytes: usize,
        keeps_addresses: bool,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let mut candidates = self.candidates();
        // Ranks that have shared before have one candidate. A new rank tries no more than they do.
        candidates.retain(|sharing| !keeps_addresses || !matches!(sharing, Sharing::Ipc | Sharing::Host));
        if self.world.several_nodes && candidates != [Sharing::Fabric] {
            let name = candidates.first().map_or("ipc", |sharing| sharing.name());
            return Err(Error::Unavailable {
                what: format!("memory that the ranks share by the setting sharing={name}"),
                reason: "the ranks are on several machines, and only sharing=fabric works between them; without it, \
                         build a communicator for each machine and join them by Hierarchical"
                    .into(),
            });
        }
        // On all ranks or on none. Allocating would also invalidate a capture.
        all_succeeded(self.calls.wait_for_last_call(), bootstrap, timeout)?;
        let mut reasons = Vec::new();
        for &sharing in &candidates {
            match self.share_by(sharing, bytes, bootstrap, timeout) {
                Ok(memory) => {
                    self.chosen.get_or_init(|| sharing);
                    return Ok(memory);
                }
                // The ranks can no longer communicate.
                Err(error @ (Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. })) => {
                    return Err(error);
                }
                Err(error) if candidates.len() == 1 && !self.world.is_unreachable() => return Err(error),
                // All ranks are notified of any other failure, so all of them try the next mechanism.
                Err(error) => reasons.push(format!("{}: {error}", sharing.name())),
            }
        }
        let reasons = reasons.join("; ");
        let reason = match self.world.is_unreachable() {
            true => format!("{} ({reasons})", self.world.why_unreachable()),
            false => reasons,
        };
        Err(Error::Unavailable { what: "memory that the ranks' GPUs share".into(), reason })
    }

    /// Shares pinned host memory, for GPUs that cannot access each other's memory. What a rank's kernel writes to a
    /// peer is a posted write over its PCIe link to host memory; the peer's kernel reads it over its own.
    fn share_through_host(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let mut host = all_succeeded(SharedMemory::allocate(bytes, Populate::Now), bootstrap, timeout)?;
        all_succeeded(host.map_peers(bootstrap, timeout), bootstrap, timeout)?;
        let host = Arc::new(host);
        let mut parts = Parts::new(&self.context, bootstrap);
        let registered = (0..bootstrap.world_size()).try_for_each(|rank| {
            parts.ranks[rank] = Some((Memory::register(&self.context, &host, rank, bytes)?, 0));
            Ok(())
        });
        all_succeeded(registered, bootstrap, timeout)?;
        let memory = CudaMemory::of(parts);
        tracing::warn!(
            rank = bootstrap.rank(),
            "the ranks share pinned host memory: what they send crosses PCIe twice, and buffers are not registered"
        );
        Ok(memory)
    }

    /// Whether the ranks share host memory, where nothing of a GPU can be registered.
    pub(super) fn shares_host_memory(&self) -> bool {
        self.chosen.get() == Some(&Sharing::Host)
    }

    /// Closes the mappings of the peers' memory. After all ranks have done so, frees this rank's memory. Collective.
    pub(super) fn free_shared(
        &self,
        memory: CudaMemory,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<()> {
        // Symmetric memory's parts belong to it alone.
        let parts = Arc::into_inner(memory.into_parts());
        let mut ranks = parts.map(|mut parts| std::mem::take(&mut parts.ranks)).unwrap_or_default();
        let own = ranks.get_mut(bootstrap.rank()).and_then(Option::take);
        // Memory with other references is released with the last one: a peer in this process holds its own memory
        // too.
        let release = |(memory, _)| Arc::into_inner(memory).map_or(Ok(()), Memory::release);
        let closed = ranks.into_iter().flatten().try_for_each(release);
        all_succeeded(closed, bootstrap, timeout)?;
        if let Some((own, _)) = &own {
            self.exports.forget(own);
        }
        all_succeeded(own.map_or(Ok(()), release), bootstrap, timeout)
    }

    /// Maps the peers' counterparts of a caller's buffer, if it can be exported. Collective.
    pub(crate) fn share_foreign(
        &self,
        (address, bytes): (u64, usize),
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        if self.shares_host_memory() {
            return Err(not_of_gpu());
        }
        if self.world.several_nodes {
            return Err(Error::Unavailable {
                what: "this memory on the other ranks' GPUs".into(),
                reason: "the ranks are on several machines: take registered memory from Communicator::alloc, or call \
                         without registering"
                    .into(),
            });
        }
        all_succeeded(self.calls.wait_for_last_call(), bootstrap, timeout)?;
        let memory = Memory::foreign(&self.context, address).and_then(|memory| {
            // Peer access between contexts covers only this kind of memory, the kind that IPC can export.
            let is_exportable = driver::is_exportable(address);
            // Only of this kind is an allocation one range.
            if is_exportable && bytes as u64 > memory.address() + memory.bytes() as u64 - address {
                let (which, problem) = ("a registered buffer", "longer than the rest of its allocation");
                return Err(Error::InvalidPointer {
                    which,
                    address: address as usize,
                    problem,
                    element_size: 1,
                });
            }
            if self.world.same_device_and_process() || is_exportable {
                return Ok(memory);
            }
            Err(not_registrable(driver::is_stream_ordered(address)?))
        });
        let memory = all_succeeded(memory, bootstrap, timeout)?;
        let offset = address - memory.address();
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        self.map_peers(memory, offset, sharing, bootstrap, timeout)
    }

    /// Tries one mechanism completely: allocates, maps, and exchanges data.
    fn share_by(
        &self,
        sharing: Sharing,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let bytes = bytes.max(share_probe::BYTES);
        self.owner.free_returned();
        let probed = |memory: CudaMemory| {
            let addresses: Vec<_> = (0..bootstrap.world_size()).map(|rank| memory.address(rank)).collect();
            self.probe(&addresses, sharing, bootstrap, timeout)?;
            Ok(memory)
        };
        if sharing == Sharing::Host {
            return self.share_through_host(bytes, bootstrap, timeout).and_then(probed);
        }
        let own = Memory::allocate(&self.context, &self.copies, bytes, sharing);
        let own = all_succeeded(own, bootstrap, timeout)?;
        if sharing == Sharing::Ipc {
            self.exports.keep(Arc::clone(&own));
        }
        let shared = self.map_peers(Arc::clone(&own), 0, sharing, bootstrap, timeout).and_then(probed);
        if shared.is_err() && sharing == Sharing::Ipc {
            // This rank has closed what it had opened, unless its context is lost.
            let is_open = [u8::from(self.copies.is_broken())];
            if bootstrap.all_gather(&is_open, timeout).is_ok_and(|all| all.iter().all(|open| open == &[0])) {
                self.exports.forget(&own);
            }
        }
        shared
    }

    /// Exchanges handles and maps the peers' memory. Collective.
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
            self.exports.set_exchanged();
        }
        let handles = bootstrap.all_gather(&handle.encode(), timeout)?;
        let descriptors: Vec<Option<OwnedFd>> = match &descriptor {
            // The ranks have passed descriptors before (`LivenessSetup::exchange`). If they cannot now, all try to map
            // memory in another way.
            Some(descriptor) => {
                let descriptors = exchange_descriptors(bootstrap, descriptor.as_fd(), timeout / 2);
                all_exchanged(descriptors, bootstrap, timeout)?
            }
            None => handles.iter().map(|_| None).collect(),
        };
        let import = |(rank, descriptor): (usize, Option<OwnedFd>)| -> Result<(Arc<Memory>, u64)> {
            if rank == bootstrap.rank() {
                return Ok((Arc::clone(&own), offset));
            }
            let handle = Handle::decode(rank, &handles[rank])?;
            let memory = Memory::import(&self.context, rank, &handle, self.process, descriptor.as_ref())?;
            Ok((memory, handle.offset))
        };
        let mut parts = Parts::new(&self.context, bootstrap);
        let imported = descriptors.into_iter().enumerate().try_for_each(|descriptor| {
            let rank = descriptor.0;
            parts.ranks[rank] = Some(import(descriptor)?);
            Ok(())
        });
        all_succeeded(imported, bootstrap, timeout).map(|()| CudaMemory::of(parts))
    }
}

/// Returns the error of a caller's buffer that no handle of CUDA IPC can be made for, with the allocators that use such
/// memory.
fn not_registrable(is_stream_ordered: bool) -> Error {
    let kind = match is_stream_ordered {
        true => {
            "this is stream-ordered memory (cuMemAllocAsync, PyTorch with PYTORCH_CUDA_ALLOC_CONF=\
                 backend:cudaMallocAsync; PyTorch's default backend:native has memory that can be)"
        }
        false => {
            "this is VMM memory (cuMemMap, PyTorch with expandable segments; with PYTORCH_CUDA_ALLOC_CONF=\
                  expandable_segments:False its memory can be)"
        }
    };
    Error::Unavailable {
        what: "this memory on the other ranks' GPUs".into(),
        reason: format!(
            "only memory from cuMemAlloc can be registered, and {kind}; take registered memory from \
             Communicator::alloc, or call without registering"
        ),
    }
}

/// Memory that other processes have opened by IPC handles. CUDA leaves it undefined what happens if such memory is
/// freed before they close it, so it is kept until all ranks have said that their last mappings are closed.
#[derive(Clone)]
pub struct CudaExports {
    list: Arc<Mutex<Exported>>,
    copies: Arc<Copies>,
}

#[derive(Default)]
struct Exported {
    /// Whether handles were exchanged, for memory in `kept` or for a caller's memory. Equal on all ranks.
    exchanged: bool,
    kept: Vec<Arc<Memory>>,
}

impl CudaExports {
    pub(super) fn new(copies: &Arc<Copies>) -> Self {
        Self { list: Arc::default(), copies: Arc::clone(copies) }
    }

    fn lock(&self) -> MutexGuard<'_, Exported> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that handles are exchanged. Collective.
    pub(super) fn set_exchanged(&self) {
        self.lock().exchanged = true;
    }

    /// Keeps memory until all ranks have closed it.
    pub(super) fn keep(&self, memory: Arc<Memory>) {
        self.lock().kept.push(memory);
    }

    /// Stops keeping memory that every rank has closed.
    fn forget(&self, memory: &Arc<Memory>) {
        self.lock().kept.retain(|kept| !Arc::ptr_eq(kept, memory));
    }
}

impl sealed::Exports for CudaExports {
    fn is_empty(&self) -> bool {
        !self.lock().exchanged
    }

    fn take(&self) -> Box<dyn Any + Send> {
        Box::new(std::mem::take(&mut self.lock().kept))
    }

    fn is_lost(&self) -> bool {
        self.copies.is_broken()
    }
}
