//! The symmetric region: one allocation for each rank that every peer maps, with the same layout on all.
//!
//! Head (signals, epochs, status), then two generations of mailboxes, then two of staging.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::abi::{FaRegionHead, FaStatus, FA_MAX_BLOCKS};
use crate::bootstrap::Bootstrap;
use crate::device::sealed::Shared as _;
use crate::device::Device;
use crate::error::{Error, Result};

/// Byte offsets in a region; a function of `max_bytes` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub mailbox_offset: usize,
    pub mailbox_bytes: usize,
    pub staging_offset: usize,
    pub staging_bytes: usize,
    pub total_bytes: usize,
}

impl Layout {
    pub const MIN_MAX_BYTES: usize = 4 << 10;
    pub const MAX_MAX_BYTES: usize = 1 << 40;

    /// At most 4 x max_bytes + 1 MiB.
    pub fn new(max_bytes: usize, slot_bytes: usize) -> Result<Self> {
        if !(Self::MIN_MAX_BYTES..=Self::MAX_MAX_BYTES).contains(&max_bytes) {
            return Err(Error::InvalidSetting {
                name: "max_bytes",
                value: max_bytes.to_string(),
                expected: "4 KiB to 1 TiB",
            });
        }
        const ALIGNMENT: usize = 128;
        // A generation of mailboxes is whole slots, so that generation 1 is on the slot grid as well.
        let mailbox_bytes = max_bytes / slot_bytes * slot_bytes;
        let staging_bytes = max_bytes.next_multiple_of(ALIGNMENT);
        let mailbox_offset = size_of::<FaRegionHead>();
        let staging_offset = (mailbox_offset + 2 * mailbox_bytes).next_multiple_of(ALIGNMENT);
        let total_bytes = staging_offset + 2 * staging_bytes;
        debug_assert!(total_bytes <= 4 * max_bytes + (1 << 20));
        Ok(Self { mailbox_offset, mailbox_bytes, staging_offset, staging_bytes, total_bytes })
    }
}

/// This rank's region and its mappings of the peers'.
pub(crate) struct Region<D: Device> {
    pub layout: Layout,
    memory: D::Shared,
    rank: usize,
}

impl<D: Device> Region<D> {
    /// Collective.
    pub fn new(device: &D, layout: Layout, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let allocated = device.allocate(layout.total_bytes);
        // Every rank hears whether all could allocate: one that could not must not leave the others waiting.
        let mine = allocated.as_ref().err().map(Error::to_string).unwrap_or_default();
        let reports = bootstrap.all_gather(mine.as_bytes(), timeout)?;
        let mut memory = allocated?;
        if let Some((rank, reason)) = reports.iter().enumerate().find(|(_, report)| !report.is_empty()) {
            return Err(Error::PeerLost { rank, reason: String::from_utf8_lossy(reason).into_owned() });
        }
        device.map_peers(&mut memory, bootstrap, timeout)?;
        Ok(Self { layout, memory, rank: bootstrap.rank() })
    }

    pub fn address(&self, rank: usize) -> u64 {
        self.memory.address(rank)
    }

    /// Address of this rank's status.
    pub fn status_address(&self) -> u64 {
        self.address(self.rank) + std::mem::offset_of!(FaRegionHead, status) as u64
    }

    /// What the kernels recorded of a failure: the ranks that were missing, and the epoch.
    pub fn failure(&self) -> (Vec<usize>, u32) {
        let status = self.status_address() as *mut FaStatus;
        // SAFETY: the status lies in this rank's region, mapped for the life of self; kernels access its words
        // atomically, as is done here.
        let (missing, epoch) = unsafe {
            (AtomicU32::from_ptr(&raw mut (*status).missing), AtomicU32::from_ptr(&raw mut (*status).epoch))
        };
        let missing = missing.load(Ordering::Acquire);
        (
            (0..crate::MAX_RANKS).filter(|rank| missing >> rank & 1 == 1).collect(),
            epoch.load(Ordering::Acquire),
        )
    }

    /// Makes kernels of this rank that wait give up.
    pub fn abort(&self) {
        let status = self.status_address() as *mut FaStatus;
        // SAFETY: as in `failure`.
        let abort = unsafe { AtomicU32::from_ptr(&raw mut (*status).abort) };
        abort.store(1, Ordering::Release);
    }

    /// Sets the epoch of every block. Only between launches, to the same on all ranks.
    pub fn set_epoch(&self, epoch: u32) {
        let head = self.address(self.rank) as *mut FaRegionHead;
        for block in 0..FA_MAX_BLOCKS as usize {
            // SAFETY: the head of this rank's region; no kernel runs, by the caller's contract.
            unsafe { (&raw mut (*head).epoch[block]).write(epoch) };
        }
    }
}
