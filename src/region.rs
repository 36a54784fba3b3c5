//! The symmetric region: one allocation for each rank that every peer maps, with the same layout on all.
//!
//! Head (signals, epochs, status), table of registered buffers, two generations of mailboxes and two of staging, channels.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::abi::{FaCall, FaFailure, FaRegionHead, FaStatus, FA_MAX_BLOCKS};
use crate::device::sealed::{Shared as _, Status as _};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::MAX_RANKS;

/// Registered buffers that a communicator can have, each a row of the table.
pub(crate) const TABLE_ROWS: usize = 4096;

/// Of the parts of a region.
const ALIGNMENT: usize = 128;

/// Base addresses of one registered buffer, by rank; 0 where it is not mapped.
pub(crate) type TableRow = [u64; MAX_RANKS];

/// Byte offsets in a region; a function of `max_bytes` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub table_offset: usize,
    pub mailbox_offset: usize,
    pub mailbox_bytes: usize,
    pub staging_offset: usize,
    pub staging_bytes: usize,
    pub channel_offset: usize,
    /// Of all channels to a rank.
    pub channel_bytes: usize,
    pub total_bytes: usize,
}

impl Layout {
    /// At most 4 x max_bytes + 1 MiB.
    pub fn new(max_bytes: usize, slot_bytes: usize) -> Result<Self> {
        // What is left of the MiB.
        const CHANNEL_BYTES: usize = 120 << 10;
        if !(4 << 10..=1 << 40).contains(&max_bytes) {
            let value = max_bytes.to_string();
            return Err(Error::InvalidSetting { name: "max_bytes", value, expected: "4 KiB to 1 TiB" });
        }
        // A generation of mailboxes is whole slots, so that generation 1 is on the slot grid as well.
        let mailbox_bytes = max_bytes / slot_bytes * slot_bytes;
        let staging_bytes = max_bytes.next_multiple_of(ALIGNMENT);
        let table_offset = size_of::<FaRegionHead>();
        let mailbox_offset = table_offset + TABLE_ROWS * size_of::<TableRow>();
        let staging_offset = (mailbox_offset + 2 * mailbox_bytes).next_multiple_of(ALIGNMENT);
        let channel_offset = staging_offset + 2 * staging_bytes;
        let total_bytes = channel_offset + CHANNEL_BYTES;
        debug_assert!(total_bytes <= 4 * max_bytes + (1 << 20));
        Ok(Self {
            table_offset,
            mailbox_offset,
            mailbox_bytes,
            staging_offset,
            staging_bytes,
            channel_offset,
            channel_bytes: CHANNEL_BYTES,
            total_bytes,
        })
    }

    /// The places of a generation of staging, of which a pull uses one for the `staged` bytes of each launch: their size, and one
    /// less than their number, a power of two. They take at most `walked` bytes together, unless it is one place.
    pub fn places(&self, staged: usize, walked: usize) -> (u64, u32) {
        // What is as small is bound by waiting, and its lines come faster from a peer than from the third-level cache.
        const LEAST_BYTES: usize = 8 << 10;
        let walked = walked.min(self.staging_bytes);
        if !(LEAST_BYTES..=walked / 2).contains(&staged) {
            return (0, 0);
        }
        let places = 1 << (walked / staged.next_multiple_of(ALIGNMENT)).max(1).ilog2();
        ((walked / places / ALIGNMENT * ALIGNMENT) as u64, places as u32 - 1)
    }
}

/// This rank's region and its mappings of the peers'.
pub(crate) struct Region<D: Device> {
    pub layout: Layout,
    // Before the memory, which it may point into.
    status: D::Status,
    memory: D::Shared,
    rank: usize,
}

impl<D: Device> Region<D> {
    /// Of memory that every rank has mapped and that nothing has used. `epoch` is the number of the launch before the first.
    pub fn new(device: &D, layout: Layout, epoch: u32, memory: D::Shared, rank: usize) -> Result<Self> {
        let epochs = epoch.to_ne_bytes().repeat(FA_MAX_BLOCKS as usize);
        let address = memory.address(rank) + offset_of!(FaRegionHead, epoch) as u64;
        // SAFETY: the epochs lie in the head of the region, and no kernel has been launched.
        unsafe { device.write(address, &epochs) }?;
        Ok(Self { layout, status: device.status(&memory)?, memory, rank })
    }

    pub fn address(&self, rank: usize) -> u64 {
        self.memory.address(rank)
    }

    pub fn status_address(&self) -> u64 {
        self.status.device_address()
    }

    /// Writes a row of the table that kernels look registered buffers up in, while no kernel runs.
    pub fn write_row(&self, device: &D, row: usize, bases: &TableRow) -> Result<()> {
        debug_assert!(row < TABLE_ROWS);
        let offset = self.layout.table_offset + row * size_of::<TableRow>();
        let bytes = bases.map(u64::to_ne_bytes).concat();
        // SAFETY: the row lies in the table of this rank's region.
        unsafe { device.write(self.address(self.rank) + offset as u64, &bytes) }
    }

    /// Address of the table.
    pub fn table_address(&self) -> u64 {
        self.address(self.rank) + self.layout.table_offset as u64
    }

    /// The failure that this rank's kernels have recorded; `FA_OK` if none.
    pub fn failure(&self) -> FaFailure {
        self.status_word(offset_of!(FaStatus, failure)).load(Ordering::Acquire)
    }

    /// The ranks that were missing when a kernel failed, and the epoch.
    pub fn missing(&self) -> (Vec<usize>, u32) {
        let missing = self.status_word(offset_of!(FaStatus, missing)).load(Ordering::Acquire);
        let epoch = self.status_word(offset_of!(FaStatus, epoch)).load(Ordering::Acquire);
        ((0..MAX_RANKS).filter(|rank| missing >> rank & 1 == 1).collect(), epoch)
    }

    /// The calls of ranks that made another than this one, when a kernel found that and knows them.
    pub fn others(&self) -> Vec<(usize, FaCall)> {
        let word = |rank: usize, offset: usize| {
            let offset = offset_of!(FaStatus, others) + rank * size_of::<FaCall>() + offset;
            self.status_long(offset).load(Ordering::Acquire)
        };
        let call = |rank| FaCall {
            what: word(rank, offset_of!(FaCall, what)),
            count: word(rank, offset_of!(FaCall, count)),
            digest: word(rank, offset_of!(FaCall, digest)),
        };
        (0..MAX_RANKS).map(|rank| (rank, call(rank))).filter(|(_, call)| call.what != 0).collect()
    }

    /// Waits for each rank that outlasted the first polls.
    pub fn waits(&self) -> [u32; MAX_RANKS] {
        std::array::from_fn(|rank| {
            let offset = offset_of!(FaStatus, waits) + rank * size_of::<u32>();
            self.status_word(offset).load(Ordering::Relaxed)
        })
    }

    /// Tells kernels that a rank sends nothing any more. Release: after all that it has sent.
    pub fn set_gone(&self, rank: usize) {
        self.status_word(offset_of!(FaStatus, gone)).fetch_or(1 << rank, Ordering::Release);
    }

    /// Makes kernels of this rank that wait give up.
    pub fn abort(&self) {
        self.status_word(offset_of!(FaStatus, abort)).store(1, Ordering::Release);
    }

    /// The 64-bit word at a byte offset of the status.
    fn status_long(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset % 8 == 0 && offset < size_of::<FaStatus>());
        // SAFETY: as in `status_word`; the status is aligned for its 64-bit words.
        unsafe { AtomicU64::from_ptr(self.status.host_pointer().byte_add(offset).cast()) }
    }

    /// The word at a byte offset of the status.
    fn status_word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset % 4 == 0 && offset < size_of::<FaStatus>());
        // SAFETY: a word of the status, which lives as long as self; kernels and this process access its words
        // atomically only.
        unsafe { AtomicU32::from_ptr(self.status.host_pointer().byte_add(offset).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_hold_what_is_staged_and_lie_in_the_generation() {
        for max_bytes in [4 << 10, 50_000, 1 << 20, (1 << 20) + 1, 8 << 20] {
            let layout = Layout::new(max_bytes, 128).unwrap();
            for staged in (0..layout.staging_bytes + 1).step_by(997) {
                for walked in [0, 64 << 10, 1 << 20] {
                    let (place_bytes, last_place) = layout.places(staged, walked);
                    let places = u64::from(last_place) + 1;
                    assert!(places.is_power_of_two() && places * place_bytes <= layout.staging_bytes as u64);
                    assert!(last_place == 0 || place_bytes >= staged as u64 && place_bytes % 64 == 0);
                }
            }
        }
        let layout = Layout::new(1 << 20, 128).unwrap();
        assert_eq!(layout.places(256 << 10, 1 << 20), (256 << 10, 3));
        assert_eq!(layout.places(40_000, 1 << 20), (64 << 10, 15));
        assert_eq!(layout.places(1 << 20, 1 << 20), (0, 0));
        assert_eq!(layout.places(100, 1 << 20), (0, 0));
    }
}
