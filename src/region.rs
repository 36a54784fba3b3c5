//! The symmetric region: one allocation for each rank that every peer maps, with the same layout on all.
//!
//! Head (signals, epochs, status), table of registered buffers, two generations of mailboxes and two of staging, channels.

use crate::abi::{FaChunk, FaRegionHead, FA_SOURCE_ID_SHIFT, MAX_RANKS};
use crate::error::{Error, Result};
use crate::plan::Packing;

/// Registered buffers that a communicator can have, each a row of the table.
pub(crate) const TABLE_ROWS: usize = 4096;

/// Of the parts of a region.
const ALIGNMENT: usize = 128;

/// Base addresses of one registered buffer, by rank; 0 where it is not mapped.
pub(crate) type TableRow = [u64; MAX_RANKS];

/// How large a device wants the channels of messages.
#[derive(Debug, Clone, Copy)]
pub struct Channels {
    /// All channels to a rank.
    pub bytes: usize,
    /// Most data of a chunk.
    pub chunk_bytes: usize,
    /// Least chunks that a channel holds: fewer would be of more bytes.
    pub least_slots: usize,
}

/// Byte offsets in a region; a function of `max_bytes` and the size of the world.
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
    /// Of each channel, a power of two.
    pub channel_slots: usize,
    /// Most data of a chunk.
    pub chunk_bytes: usize,
    pub total_bytes: usize,
}

impl Layout {
    /// At most 6 x max_bytes + 1 MiB, and 2 x max_bytes of that for channels; 1 x max_bytes more for packets without tags. `most` is the device's limit of `max_bytes`.
    pub fn new(
        max_bytes: usize,
        world_size: usize,
        packing: &Packing,
        channels: &Channels,
        most: usize,
    ) -> Result<Self> {
        // What is left of the MiB.
        const LEAST_CHANNEL_BYTES: usize = 120 << 10;
        if !(4 << 10..=most).contains(&max_bytes) {
            let value = max_bytes.to_string();
            let expected = "4 KiB to 1 TiB, on a GPU 32 GiB";
            return Err(Error::InvalidSetting { name: "max_bytes", value, expected });
        }
        // A generation of mailboxes is whole slots, so that generation 1 is on the slot grid as well.
        let slots = max_bytes / packing.slot_bytes;
        let mailbox_bytes = slots * packing.slot_bytes;
        // Those of packets without tags follow, also of two generations.
        let mailboxes = 2 * slots * (packing.slot_bytes + packing.sentinel_bytes);
        let staging_bytes = max_bytes.next_multiple_of(ALIGNMENT);
        let table_offset = size_of::<FaRegionHead>();
        let mailbox_offset = table_offset + TABLE_ROWS * size_of::<TableRow>();
        let staging_offset = (mailbox_offset + mailboxes).next_multiple_of(ALIGNMENT);
        let channel_offset = staging_offset + 2 * staging_bytes;
        let most_bytes = channels.bytes.min(2 * max_bytes).max(LEAST_CHANNEL_BYTES);
        let (channel_slots, chunk_bytes) = ring(most_bytes / (world_size - 1).max(1), channels);
        let channel_bytes = (world_size - 1) * channel_slots * (size_of::<FaChunk>() + chunk_bytes);
        let total_bytes = channel_offset + channel_bytes;
        let signals = (world_size - 1) * channel_slots * size_of::<FaChunk>();
        let most_bytes = most_bytes + 2 * slots * packing.sentinel_bytes;
        debug_assert!(total_bytes <= 4 * max_bytes + (1 << 20) + most_bytes - LEAST_CHANNEL_BYTES + signals);
        Ok(Self {
            table_offset,
            mailbox_offset,
            mailbox_bytes,
            staging_offset,
            staging_bytes,
            channel_offset,
            channel_bytes,
            channel_slots,
            chunk_bytes,
            total_bytes,
        })
    }
}

/// The slots of a channel of at most `bytes`, and the data of each. Where they hold all that a chunk may, their signals come on top:
/// else the next smaller power of two would be taken, and the ring be half as long.
fn ring(bytes: usize, channels: &Channels) -> (usize, usize) {
    match (bytes / channels.chunk_bytes).checked_ilog2() {
        Some(exponent) if 1 << exponent >= channels.least_slots => (1 << exponent, channels.chunk_bytes),
        _ => {
            let chunk_bytes = bytes / channels.least_slots - size_of::<FaChunk>();
            (channels.least_slots, chunk_bytes / ALIGNMENT * ALIGNMENT)
        }
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
    fn rings_fill_what_they_are_given() {
        let host = Channels { bytes: 2 << 20, chunk_bytes: 16 << 10, least_slots: 8 };
        let packing = Packing { pack_bytes: 64, slot_bytes: 72, sentinel_bytes: 0 };
        for max_bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20] {
            for world_size in 1..=MAX_RANKS {
                let layout = Layout::new(max_bytes, world_size, &packing, &host, 1 << 40).unwrap();
                let Layout { channel_slots, chunk_bytes, channel_bytes, total_bytes, .. } = layout;
                assert!(channel_slots.is_power_of_two() && channel_slots >= 8 && chunk_bytes % 128 == 0);
                assert!((512..=16 << 10).contains(&chunk_bytes), "{layout:?}");
                assert!(total_bytes <= 6 * max_bytes + (1 << 20), "{layout:?}");
                assert!(total_bytes <= 4 * max_bytes + (3 << 20), "{layout:?}");
                // A power of two may leave almost half.
                let most = (2 << 20).min(2 * max_bytes).max(120 << 10);
                assert!(world_size == 1 || channel_bytes > most / 3, "{layout:?}");
            }
        }
    }
}
