//! What a call must fit in, and the sizes from which on it is done in another way.

use super::thresholds::{SCATTERED_BROADCAST_ABOVE_BYTES, STAGING_RING_BYTES, STAGING_RING_LEAST_BYTES};
use super::{Algorithm, DeviceKind};
use crate::abi::{FA_QUANTIZED_ALIGNMENT, FA_QUANTIZED_GROUP, FA_QUANTIZED_GROUP_BYTES};
use crate::catalogue::CapacityRule;

/// Geometry of a device's packs, which the capacity of a region is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    /// Bytes of a pack.
    pub pack_bytes: usize,
    /// Bytes of the mailbox slot that holds one pack.
    pub slot_bytes: usize,
    /// Bytes of a pack in the mailboxes of packets without tags; 0: there are none.
    pub sentinel_bytes: usize,
}

/// What the launches of a world have room for; equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub device: DeviceKind,
    pub packing: Packing,
    pub world_size: usize,
    /// Of one generation.
    pub mailbox_bytes: usize,
    /// Of one generation.
    pub staging_bytes: usize,
}

impl Limits {
    /// The most elements that one launch of an allreduce can take.
    pub fn capacity(&self, algorithm: Algorithm, element_size: usize) -> usize {
        let Self { packing, world_size, mailbox_bytes, .. } = *self;
        let slots = mailbox_bytes / packing.slot_bytes;
        let packs = match algorithm.capacity_rule() {
            // As much is staged.
            CapacityRule::Staging => mailbox_bytes / packing.pack_bytes,
            CapacityRule::Mailboxes => slots / world_size,
            // A slice is at most packs / world, rounded up, which is what each sender has slots for.
            CapacityRule::TwoSliceMailboxes => slots / (2 * world_size) * world_size,
            // A slice, rounded up, in each step.
            CapacityRule::StepMailboxes => slots / world_size / (2 * world_size - 2).max(1) * world_size,
            CapacityRule::TwoMailboxes => slots / world_size / 2,
        };
        packs * (packing.pack_bytes / element_size)
    }

    /// The most whole rows that one launch of an allreduce with so many blocks can take. One block divides them at any pack,
    /// several have whole rows in each slice of a two-shot.
    pub fn rows(&self, algorithm: Algorithm, row_bytes: usize, element_size: usize, blocks: usize) -> usize {
        let capacity = self.capacity(algorithm, element_size) * element_size;
        match algorithm {
            Algorithm::TwoShotPush if blocks > 1 => capacity / self.world_size / row_bytes * self.world_size,
            _ => capacity / row_bytes,
        }
    }

    /// The most elements that one launch of an allreduce with quantised transport can take. A generation of staging holds a slice
    /// from each rank and a sum of each; the smallest has room for some groups in each. One rank stages its elements as they are.
    pub fn quantized_capacity(&self, element_size: usize) -> usize {
        if self.world_size == 1 {
            return self.capacity(Algorithm::OneShotPull, element_size);
        }
        let slice = self.staging_bytes / (2 * self.world_size);
        let aligned = slice / FA_QUANTIZED_ALIGNMENT as usize * FA_QUANTIZED_ALIGNMENT as usize;
        aligned / FA_QUANTIZED_GROUP_BYTES as usize * FA_QUANTIZED_GROUP as usize * self.world_size
    }

    /// The most bytes of a share that one launch can take of a collective which stages `shares` of them at once, and `most` bytes
    /// in all.
    #[inline]
    pub fn share_bytes(&self, shares: usize, most: usize) -> usize {
        let pack = self.packing.pack_bytes;
        let all = self.staging_bytes.min(most);
        let capacity = if shares > 1 { all / shares } else { all };
        debug_assert!(pack.is_power_of_two());
        (capacity & !(pack - 1)).max(pack)
    }

    /// Whether a broadcast takes two steps.
    #[inline]
    pub fn scatters_broadcast(&self, bytes: usize) -> bool {
        self.device == DeviceKind::Cuda && self.world_size > 2 && bytes > SCATTERED_BROADCAST_ABOVE_BYTES
    }

    /// Whether two ranks stage in each other's regions in every other pull, where the call permits it. A line of memory is best
    /// written next by the processor that last read it.
    #[inline]
    pub fn swaps_staging(&self) -> bool {
        self.device == DeviceKind::Host && self.world_size == 2
    }

    /// The staging ring of a call: its generation of staging in slots, of which a pull uses one for the `staged` bytes of each
    /// launch. The size of a slot, and one less than their number, a power of two. A slot of no bytes is the whole generation.
    #[inline]
    pub fn staging_ring(&self, staged: usize) -> (u64, u32) {
        const ALIGNMENT: usize = 128;
        let ring = match self.device {
            DeviceKind::Host => STAGING_RING_BYTES.min(self.staging_bytes),
            // A GPU's own memory is written past the caches of its peers.
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
        Limits { device, packing, world_size: 3, mailbox_bytes: staging_bytes, staging_bytes }
    }

    #[test]
    fn slots_hold_what_is_staged_and_lie_in_the_generation() {
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
