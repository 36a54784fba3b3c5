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
}

/// Rows from here on are for the inputs of captured calls, which each rank numbers for itself: a rank's id is looked up in that
/// rank's column only.
pub(crate) const FIRST_GRAPH_ROW: usize = TABLE_ROWS / 2;

/// The source word for an offset into the buffer of a row.
pub(crate) fn source_word(row: usize, offset: u64) -> u64 {
    ((row as u64 + 1) << FA_SOURCE_ID_SHIFT) + offset
}
