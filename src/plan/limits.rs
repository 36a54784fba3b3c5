//! Capacity of a region: how much of a call one launch can take, and what follows from it.

use super::thresholds::{
    SCATTERED_BROADCAST_ABOVE_BYTES, STAGING_RING_BYTES, STAGING_RING_LEAST_BYTES, TWO_LEVEL_LEAST_BYTES,
};
use super::{Algorithm, DeviceKind, Order};
use crate::abi::{FA_QUANTIZED_ALIGNMENT, FA_QUANTIZED_GROUP, FA_QUANTIZED_GROUP_BYTES, FA_SCALES_ALIGNMENT};
use crate::catalogue::{CapacityRule, DType, ReduceOp};

/// Sizes of a device's packs. The capacity of a region is computed from them.
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    /// Size of a pack in bytes.
    pub pack_bytes: usize,
    /// Size in bytes of the mailbox slot of one pack.
    pub slot_bytes: usize,
    /// Size in bytes of a pack in the mailboxes for sentinel packets; 0 if the device has none.
    pub sentinel_bytes: usize,
}

/// Memory that is available to each launch of a world. Equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub device: DeviceKind,
    pub packing: Packing,
    pub world_size: usize,
    /// Size of one generation of mailboxes.
    pub mailbox_bytes: usize,
    /// Size of one generation of staging.
    pub staging_bytes: usize,
    pub levels: Levels,
    /// Host: smallest allreduce whose results bypass the caches. It may differ among ranks.
    pub stream_from: usize,
}

/// Host: which allreduces have two levels.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Levels {
    /// Number of ranks of each socket; 0: none has.
    pub socket_ranks: usize,
    /// Smallest message.
    pub least_bytes: usize,
}

impl Levels {
    /// Returns the levels of a world whose sockets have that many ranks each. Only [`Order::Any`] permits them. A
    /// program that sets the algorithm means all sizes.
    pub fn new(socket_ranks: usize, order: Order, forced: Option<Algorithm>) -> Self {
        let least_bytes = if forced == Some(Algorithm::TwoShotPull) { 0 } else { TWO_LEVEL_LEAST_BYTES };
        match order {
            Order::Any => Self { socket_ranks, least_bytes },
            Order::Fixed => Self::default(),
        }
    }
}

impl Limits {
    /// Returns the number of ranks of each socket if the allreduce of `count` elements has two levels, else 0. An
    /// average of integers needs the wide sum, which partial sums are not.
    pub fn levels(&self, algorithm: Algorithm, dtype: DType, op: ReduceOp, count: usize) -> usize {
        let is_large = count.saturating_mul(dtype.size()) >= self.levels.least_bytes;
        let is_possible = algorithm == Algorithm::TwoShotPull && (op != ReduceOp::Avg || dtype.is_float());
        if is_large && is_possible {
            self.levels.socket_ranks
        } else {
            0
        }
    }

    /// Returns the largest number of elements of one launch of an allreduce.
    pub fn capacity(&self, algorithm: Algorithm, element_size: usize) -> usize {
        let Self { packing, world_size, mailbox_bytes, .. } = *self;
        let slots = mailbox_bytes / packing.slot_bytes;
        let packs = match algorithm.capacity_rule() {
            // Staging has the size of the mailboxes.
            CapacityRule::Staging => mailbox_bytes / packing.pack_bytes,
            CapacityRule::Mailboxes => slots / world_size,
            // Each sender has slots for one slice: packs / world_size, rounded up.
            CapacityRule::TwoSliceMailboxes => slots / (2 * world_size) * world_size,
            // Each step has slots for one slice, rounded up.
            CapacityRule::StepMailboxes => slots / world_size / (2 * world_size - 2).max(1) * world_size,
            CapacityRule::TwoMailboxes => slots / world_size / 2,
        };
        packs * (packing.pack_bytes / element_size)
    }

    /// Returns the largest number of whole rows of one launch of a fused allreduce. With one block, a two-shot divides
    /// rows among ranks at any pack; with several blocks, each slice is whole rows.
    pub fn rows(&self, algorithm: Algorithm, row_bytes: usize, element_size: usize, blocks: usize) -> usize {
        let capacity = self.capacity(algorithm, element_size) * element_size;
        match algorithm {
            Algorithm::TwoShotPush if blocks > 1 => capacity / self.world_size / row_bytes * self.world_size,
            _ => capacity / row_bytes,
        }
    }

    /// Returns the largest number of rows of one launch of a sharded norm: each has a packet of each rank.
    pub fn sharded_rows(&self) -> usize {
        self.mailbox_bytes / self.packing.slot_bytes / self.world_size
    }

    /// Returns the largest number of elements of one launch of an allreduce with quantised transport. A generation of
    /// staging holds a slice from each rank and the sum of each slice. The smallest staging has room for at least one
    /// group in each. A world of one rank stages its elements unquantised.
    pub fn quantized_capacity(&self, element_size: usize) -> usize {
        if self.world_size == 1 {
            return self.capacity(Algorithm::OneShotPull, element_size);
        }
        let slice = self.staging_bytes / (2 * self.world_size);
        let aligned = slice / FA_QUANTIZED_ALIGNMENT as usize * FA_QUANTIZED_ALIGNMENT as usize;
        aligned / FA_QUANTIZED_GROUP_BYTES as usize * FA_QUANTIZED_GROUP as usize * self.world_size
    }

    /// Returns the largest part of a share, in bytes, that one launch can take if it stages `shares` shares at once
    /// and at most `most` bytes in total.
    #[inline]
    pub fn share_bytes(&self, shares: usize, most: usize) -> usize {
        let pack = self.packing.pack_bytes;
        let all = self.staging_bytes.min(most);
        let capacity = if shares > 1 { all / shares } else { all };
        debug_assert!(pack.is_power_of_two());
        (capacity & !(pack - 1)).max(pack)
    }

    /// Returns the largest number of quantised rows that one launch can stage, if a row takes `staged_row` bytes with
    /// its scales, which are aligned.
    pub fn staged_rows(&self, staged_row: usize) -> usize {
        self.staging_bytes.saturating_sub(FA_SCALES_ALIGNMENT as usize) / staged_row
    }

    /// Returns whether a broadcast takes two steps: a scatter, then an all-gather.
    #[inline]
    pub fn scatters_broadcast(&self, bytes: usize) -> bool {
        self.device == DeviceKind::Cuda && self.world_size > 2 && bytes > SCATTERED_BROADCAST_ABOVE_BYTES
    }

    /// Returns whether two ranks swap their staging in every other pull, if the call permits it: each rank then stages
    /// in the other's region. Writing a cache line is fastest for the core that last read it.
    #[inline]
    pub fn swaps_staging(&self) -> bool {
        self.device == DeviceKind::Host && self.world_size == 2
    }

    /// Returns the staging ring of a call whose launches stage `staged` bytes each: the size of a slot, and the number
    /// of slots (a power of two) minus 1. The ring divides a generation of staging into slots, and each launch of a
    /// pull uses the next slot. A slot size of 0 means no ring: each launch uses the whole generation.
    #[inline]
    pub fn staging_ring(&self, staged: usize) -> (u64, u32) {
        const ALIGNMENT: usize = 128;
        let ring = match self.device {
            DeviceKind::Host => STAGING_RING_BYTES.min(self.staging_bytes),
            // No ring: peers do not keep a GPU's memory in their caches, so writes have no lines to invalidate.
            DeviceKind::Cuda => return (0, 0),
        };
        if !(STAGING_RING_LEAST_BYTES..=ring / 2).contains(&staged) {
            return (0, 0);
        }
        let slots = 1 << (ring / staged.next_multiple_of(ALIGNMENT)).max(1).ilog2();
        ((ring / slots / ALIGNMENT * ALIGNMENT) as u64, slots as u32 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(device: DeviceKind, staging_bytes: usize) -> Limits {
        let packing = Packing { pack_bytes: 64, slot_bytes: 128, sentinel_bytes: 0 };
        Limits {
            device,
            packing,
            world_size: 3,
            mailbox_bytes: staging_bytes,
            staging_bytes,
            levels: Levels::default(),
            stream_from: usize::MAX,
        }
    }

    #[test]
    fn slots_hold_what_is_staged_and_fit_into_the_generation() {
        for staging_bytes in [4 << 10, 50_048, 1 << 20, (1 << 20) + 128, 8 << 20] {
            let limits = limits(DeviceKind::Host, staging_bytes);
            for staged in (0..staging_bytes + 1).step_by(997) {
                let (slot_bytes, last_slot) = limits.staging_ring(staged);
                let slots = u64::from(last_slot) + 1;
                assert!(slots.is_power_of_two() && slots * slot_bytes <= staging_bytes as u64);
                assert!(last_slot == 0 || slot_bytes >= staged as u64 && slot_bytes % 64 == 0);
            }
        }
        let host = limits(DeviceKind::Host, 1 << 20);
        assert_eq!(host.staging_ring(256 << 10), (256 << 10, 3));
        assert_eq!(host.staging_ring(40_000), (64 << 10, 15));
        assert_eq!(host.staging_ring(1 << 20), (0, 0));
        assert_eq!(host.staging_ring(100), (0, 0));
        assert_eq!(limits(DeviceKind::Cuda, 1 << 20).staging_ring(40_000), (0, 0));
    }
}
