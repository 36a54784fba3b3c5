//! The symmetric region: one allocation for each rank that every peer maps, with the same layout on all.
//!
//! Head (signals, epochs, status), table of registered buffers, two generations of mailboxes and two of staging, channels.

use crate::abi::{FaRegionHead, FA_SOURCE_ID_SHIFT, MAX_RANKS};
use crate::error::{Error, Result};

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

/// Rows from here on are for the inputs of captured calls, which each rank numbers for itself: a rank's id is looked up in that
/// rank's column only.
pub(crate) const FIRST_GRAPH_ROW: usize = TABLE_ROWS / 2;

/// The source word for an offset into the buffer of a row.
pub(crate) fn source_word(row: usize, offset: u64) -> u64 {
    ((row as u64 + 1) << FA_SOURCE_ID_SHIFT) + offset
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
