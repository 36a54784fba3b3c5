//! The check of shared memory before its first use: each rank's GPU writes to every rank's memory, whose owner checks
//! it, and reads from it. In virtual machines, behind an IOMMU and under confidential computing, a driver may report
//! peer access and open handles, while the accesses of kernels get lost. The driver's copies prove nothing, since it
//! can route them through host memory; nor does reading back, since a write may have gone elsewhere.

use std::time::Duration;

use super::memory::Sharing;
use super::Cuda;
use crate::abi::MAX_RANKS;
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};

type Pattern = [u64; 2];

/// Slots of a rank's memory: what each rank has written to it, and what this rank has read from each rank's memory.
const SLOTS: usize = 2 * MAX_RANKS;

/// Size of the memory that the check uses.
pub(super) const BYTES: usize = SLOTS * size_of::<Pattern>();

/// Returns what `writer` writes to the memory of `owner`. Never the zeros of new memory.
fn pattern(writer: usize, owner: usize) -> Pattern {
    let word = 0xA5A5_0000_5A5A_0000 | (writer as u64) << 8 | owner as u64;
    [word, !word]
}

fn slot(memory: u64, slot: usize) -> u64 {
    memory + (slot * size_of::<Pattern>()) as u64
}

impl Cuda {
    /// Checks memory that no kernel uses yet and whose first [`BYTES`] bytes are zero, also afterwards. `memory` has
    /// the address of each rank's memory in this process. Collective: it succeeds on every rank or on none.
    pub(super) fn probe(
        &self,
        memory: &[u64],
        sharing: Sharing,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<()> {
        let (rank, ranks) = (bootstrap.rank(), 0..bootstrap.world_size());
        let (kernel, own) = (self.kernels.share_probe(), memory[rank]);
        let writes = ranks.clone().map(|owner| {
            let [first, second] = pattern(rank, owner);
            [slot(memory[owner], rank), 0, first, second]
        });
        // SAFETY: `share_by` allocated room for all slots on every rank, and mapped it for kernels.
        let written = unsafe { self.copies.run(kernel, writes) };
        all_succeeded(written, bootstrap, timeout)?;
        // Each rank has waited for its kernels, so all writes that arrive have arrived. What is read was written by the
        // memory's owner, so that a read does not find a write that got lost in the same way.
        let reads =
            ranks.clone().map(|owner| [slot(own, MAX_RANKS + owner), slot(memory[owner], owner), 0, 0]);
        let mut found = [Pattern::default(); SLOTS];
        // SAFETY: as above; the slots are this rank's own memory, which the copy reads after the kernels have ended.
        let read = unsafe { self.copies.run(kernel, reads).and_then(|()| self.copies.read(own, &mut found)) };
        let checked = read.and_then(|()| {
            ranks.into_iter().try_for_each(|peer| {
                let remedy = remedy(sharing, self.world.share_gpu(rank, peer));
                check(rank, peer, "write to", found[peer], pattern(peer, rank), remedy)?;
                check(peer, rank, "read", found[MAX_RANKS + peer], pattern(peer, peer), remedy)
            })
        });
        all_succeeded(checked, bootstrap, timeout)?;
        // SAFETY: every rank has read and checked.
        let cleared = unsafe { self.copies.zero(own, BYTES) };
        all_succeeded(cleared, bootstrap, timeout)
    }
}

/// Returns the likely cause and the remedy, if memory that ranks share does not carry data between two of them.
fn remedy(sharing: Sharing, is_one_gpu: bool) -> &'static str {
    match (sharing, is_one_gpu) {
        (Sharing::Host, _) => {
            "The GPU does not reach pinned host memory as the driver says. Turn off the IOMMU or set it to passthrough \
             (iommu=pt), and look for errors of the IOMMU and the GPU (Xid) in the kernel's log"
        }
        (_, true) => {
            "No link is involved: both ranks are on one GPU. Look for errors of the GPU (Xid) in the kernel's log, or \
             set another mechanism (sharing)"
        }
        (Sharing::Fabric, false) => {
            "The driver reports a fabric that does not work. On each machine, `nvidia-smi -q` must show the fabric's \
             state as Completed and its status as Success, and `nvidia-imex-ctl -N` all nodes as READY; without the \
             fabric, build a communicator for each machine and join them by Hierarchical"
        }
        (Sharing::Pointers | Sharing::Descriptor | Sharing::Ipc, false) => {
            "The driver reports peer access that does not work. On a machine of your own, turn off PCIe access control \
             services (ACS), and the IOMMU or set it to passthrough (iommu=pt); in a virtual machine, a container or \
             under confidential computing, take GPUs with NVLink between them, or go through host memory: the setting \
             sharing=host, or NCCL with NCCL_P2P_DISABLE=1"
        }
    }
}

/// Compares what was found after an access of `user`'s GPU to the memory of `owner` with what was expected.
fn check(
    owner: usize,
    user: usize,
    access: &str,
    found: Pattern,
    expected: Pattern,
    remedy: &str,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: format!("rank {owner}'s memory on the GPU of rank {user}"),
        reason: format!(
            "it maps, but does not carry data: a kernel of rank {user} was to {access} it, and there is {found:x?} \
             instead of {expected:x?}. {remedy}"
        ),
    })
}
