//! The symmetric region: one allocation of each rank, with the same layout on all ranks, that every peer maps.
//!
//! In order: head (signals, epochs, status), table of registered buffers, two generations of mailboxes, two
//! generations of staging, channels.

use crate::abi::{
    FaChunk, FaRegionHead, FA_CUDA_PACK_BYTES, FA_CUDA_SLOT_BYTES, FA_MAX_STRIPES, FA_PART_ALIGNMENT,
    FA_SOURCE_ID_SHIFT, MAX_RANKS,
};
use crate::error::{Error, Result};
use crate::plan::thresholds::{LEAST_CHANNEL_BYTES, LEAST_PART_BYTES, LEAST_STRIPE_BYTES};
use crate::plan::Packing;

/// Maximum number of registered buffers of a communicator: rows of the table.
pub(crate) const TABLE_ROWS: usize = 4096;

/// Alignment of the parts of a region.
const ALIGNMENT: usize = 128;

/// Base addresses of one registered buffer, by rank; 0 if it is not mapped.
pub(crate) type TableRow = [u64; MAX_RANKS];

/// Sizes of a device's message channels.
#[derive(Debug, Clone, Copy)]
pub struct Channels {
    /// Total size of the channels to a rank.
    pub bytes: usize,
    /// Maximum data of a chunk.
    pub chunk_bytes: usize,
    /// Minimum number of chunks in a stripe; if they do not fit, chunks get smaller.
    pub least_slots: usize,
    /// Maximum number of stripes of a channel, each with a ring of chunks; a power of two.
    pub stripes: usize,
    /// Parts of a message of at most this size are sent as packets, for which a slot has room.
    pub packet_bytes: usize,
}

/// Division of messages among the stripes of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stripes {
    pub count: usize,
}

impl Stripes {
    /// Returns the size of a message's part in each stripe, in units of `FA_PART_ALIGNMENT`, and the number of
    /// stripes that have a part. A size of 0 means that one stripe has the whole message.
    #[inline]
    pub fn parts(self, bytes: u64) -> (u32, u32) {
        if self.count == 1 {
            return (0, 1);
        }
        let part = bytes.div_ceil(self.count as u64).max(LEAST_PART_BYTES).div_ceil(FA_PART_ALIGNMENT.into());
        (part as u32, bytes.div_ceil(part * u64::from(FA_PART_ALIGNMENT)).max(1) as u32)
    }
}

/// Byte offsets in a region; they depend on `max_bytes` and the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub table_offset: usize,
    pub mailbox_offset: usize,
    pub mailbox_bytes: usize,
    pub staging_offset: usize,
    pub staging_bytes: usize,
    pub channel_offset: usize,
    /// Total size of the channels to a rank.
    pub channel_bytes: usize,
    /// Stripes of each channel.
    pub stripes: Stripes,
    /// Slots of each stripe; a power of two.
    pub channel_slots: usize,
    /// Maximum data of a chunk.
    pub chunk_bytes: usize,
    /// Maximum data of the packets in a slot.
    pub packet_bytes: usize,
    pub total_bytes: usize,
}

impl Layout {
    /// Computes the layout. A region has at most 6 x `max_bytes` + 1 MiB, of which 2 x `max_bytes` are for channels,
    /// and 1 x `max_bytes` more for packets without tags. `most` is the device's limit of `max_bytes`.
    pub fn new(
        max_bytes: usize,
        world_size: usize,
        packing: &Packing,
        channels: &Channels,
        most: usize,
    ) -> Result<Self> {
        if !(4 << 10..=most).contains(&max_bytes) {
            let value = max_bytes.to_string();
            let expected = "4 KiB to 1 TiB, or to 32 GiB on a GPU";
            return Err(Error::InvalidSetting { name: "max_bytes", value, expected });
        }
        // A generation of mailboxes is a whole number of slots, so that generation 1 is aligned to slots too.
        let slots = max_bytes / packing.slot_bytes;
        let mailbox_bytes = slots * packing.slot_bytes;
        // The mailboxes of packets without tags follow, also in two generations.
        let mailboxes = 2 * slots * (packing.slot_bytes + packing.sentinel_bytes);
        let staging_bytes = max_bytes.next_multiple_of(ALIGNMENT);
        let table_offset = size_of::<FaRegionHead>();
        let mailbox_offset = table_offset + TABLE_ROWS * size_of::<TableRow>();
        let staging_offset = (mailbox_offset + mailboxes).next_multiple_of(ALIGNMENT);
        let channel_offset = staging_offset + 2 * staging_bytes;
        let most_bytes = channels.bytes.min(2 * max_bytes).max(LEAST_CHANNEL_BYTES);
        let Ring { stripes, slots: channel_slots, chunk_bytes, packet_bytes } =
            Ring::new(most_bytes / (world_size - 1).max(1), world_size, channels);
        let all_slots = (world_size - 1) * stripes * channel_slots;
        let slot_bytes = size_of::<FaChunk>() + packet_room(packet_bytes) + chunk_bytes;
        let channel_bytes = all_slots * slot_bytes;
        let total_bytes = channel_offset + channel_bytes;
        let signals = all_slots * size_of::<FaChunk>();
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
            stripes: Stripes { count: stripes },
            channel_slots,
            chunk_bytes,
            packet_bytes,
            total_bytes,
        })
    }
}

/// Returns the size of packets with `bytes` bytes of data.
fn packet_room(bytes: usize) -> usize {
    bytes * (FA_CUDA_SLOT_BYTES / FA_CUDA_PACK_BYTES) as usize
}

/// Rings of a channel, one for each stripe.
struct Ring {
    stripes: usize,
    slots: usize,
    chunk_bytes: usize,
    packet_bytes: usize,
}

impl Ring {
    /// Computes the rings of a channel of at most `bytes`. If the slots hold full chunks, their signals are not
    /// counted: otherwise the number of slots would be rounded down to the next smaller power of two, half of the
    /// ring.
    fn new(bytes: usize, world_size: usize, channels: &Channels) -> Self {
        // A single block must have room for the stripes of all channels (csrc/algorithms/transfer.cuh).
        const MOST_STRIPES: usize = 8 * FA_MAX_STRIPES as usize;
        let most = (MOST_STRIPES / (world_size - 1).max(1)).min(bytes / LEAST_STRIPE_BYTES).max(1);
        let stripes = channels.stripes.min(1 << most.ilog2());
        let bytes = bytes / stripes;
        let slot_bytes = packet_room(channels.packet_bytes) + channels.chunk_bytes;
        match (bytes / slot_bytes).checked_ilog2() {
            Some(exponent) if 1 << exponent >= channels.least_slots => {
                let Channels { chunk_bytes, packet_bytes, .. } = *channels;
                Self { stripes, slots: 1 << exponent, chunk_bytes, packet_bytes }
            }
            _ => {
                let slot_bytes = bytes / channels.least_slots - size_of::<FaChunk>();
                // Most of a slot is for chunks.
                let packet_bytes = channels.packet_bytes.min(slot_bytes / 8 / ALIGNMENT * ALIGNMENT);
                let chunk_bytes = (slot_bytes - packet_room(packet_bytes)) / ALIGNMENT * ALIGNMENT;
                Self { stripes, slots: channels.least_slots, chunk_bytes, packet_bytes }
            }
        }
    }
}

/// First row for inputs of captured calls. Each rank allocates these rows for itself, because a rank's ID is looked
/// up in that rank's column only.
pub(crate) const FIRST_GRAPH_ROW: usize = TABLE_ROWS / 2;

/// Returns the source word for an offset in the buffer of a row.
pub(crate) fn source_word(row: usize, offset: u64) -> u64 {
    ((row as u64 + 1) << FA_SOURCE_ID_SHIFT) + offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fill_their_channel() {
        let host =
            Channels { bytes: 2 << 20, chunk_bytes: 16 << 10, least_slots: 8, stripes: 1, packet_bytes: 0 };
        let packing = Packing { pack_bytes: 64, slot_bytes: 72, sentinel_bytes: 0 };
        for max_bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20] {
            for world_size in 1..=MAX_RANKS {
                let layout = Layout::new(max_bytes, world_size, &packing, &host, 1 << 40).unwrap();
                let Layout { channel_slots, chunk_bytes, channel_bytes, total_bytes, .. } = layout;
                assert!(channel_slots.is_power_of_two() && channel_slots >= 8 && chunk_bytes % 128 == 0);
                assert!((512..=16 << 10).contains(&chunk_bytes), "{layout:?}");
                assert!(total_bytes <= 6 * max_bytes + (1 << 20), "{layout:?}");
                assert!(total_bytes <= 4 * max_bytes + (3 << 20), "{layout:?}");
                // Rounding down to a power of two may leave almost half unused.
                let most = (2 << 20).min(2 * max_bytes).max(100 << 10);
                assert!(world_size == 1 || channel_bytes > most / 3, "{layout:?}");
                assert_eq!((layout.stripes.count, layout.packet_bytes), (1, 0));
            }
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn rings_of_gpus_have_stripes() {
        let cuda = <crate::device::cuda::Cuda as crate::device::sealed::Device>::CHANNELS;
        let packing = <crate::device::cuda::Cuda as crate::device::sealed::Device>::PACKING;
        for max_bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20, 1 << 30] {
            for world_size in 1..=MAX_RANKS {
                let layout = Layout::new(max_bytes, world_size, &packing, &cuda, 1 << 40).unwrap();
                let Layout { stripes, channel_slots, chunk_bytes, packet_bytes, .. } = layout;
                assert!(channel_slots.is_power_of_two() && channel_slots >= 2, "{layout:?}");
                assert!(chunk_bytes >= 1024 && chunk_bytes % 128 == 0, "{layout:?}");
                assert!(packet_bytes % 16 == 0 && 4 * packet_bytes <= chunk_bytes, "{layout:?}");
                assert!(layout.total_bytes <= 7 * max_bytes + (1 << 20), "{layout:?}");
                // A block has room for all stripes that a launch may use: channels in both directions, and copies.
                let used = (2 * (world_size - 1) + 1) * stripes.count;
                assert!(used <= 17 * FA_MAX_STRIPES as usize, "{layout:?}");
                let expected = if world_size <= 9 { 16 } else { 8 };
                assert!(max_bytes < 8 << 20 || stripes.count == expected, "{layout:?}");
            }
        }
    }

    #[test]
    fn parts_cover_the_message() {
        for count in [1, 2, 8, 16] {
            for bytes in [0, 1, 4096, 4097, 65536, 65537, (1 << 20) + 1, (5 << 30) + 77] {
                let (part, stripes) = Stripes { count }.parts(bytes);
                let part = if part == 0 { u64::MAX } else { u64::from(part * FA_PART_ALIGNMENT) };
                assert!(stripes >= 1 && stripes as usize <= count, "{bytes} in {count}");
                assert!(bytes <= part.saturating_mul(stripes.into()), "{bytes} in {count}");
                assert!(stripes == 1 || bytes > part * u64::from(stripes - 1), "{bytes} in {count}");
            }
        }
    }
}
