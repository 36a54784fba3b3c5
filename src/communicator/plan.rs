//! What is done with a call: the table's choice, made to fit the device and the region.

use super::Communicator;
use crate::device::Device;
use crate::dtype::DType;
use crate::op::ReduceOp;
use crate::plan::{Algorithm, Call, Plan};

impl<D: Device> Communicator<D> {
    /// An allreduce. An algorithm that cannot do it is replaced, on all ranks alike.
    pub(super) fn plan_reduction(&self, count: usize, dtype: DType, op: ReduceOp) -> Plan {
        let bytes = count.saturating_mul(dtype.size());
        let (plan, capacity) = self.plan_with(bytes, dtype, self.algorithm);
        match plan.algorithm.can_reduce(dtype, op, capacity) {
            true => cut(plan, capacity, dtype, D::PACKING.pack_bytes),
            false => {
                let (plan, capacity) = self.plan_with(bytes, dtype, Some(Algorithm::TwoShotPush));
                cut(plan, capacity, dtype, D::PACKING.pack_bytes)
            }
        }
    }

    /// A collective of which each rank's share is at most `bytes`, and `shares` of them are staged at once: its grid, and the
    /// bytes of a share that one launch takes.
    pub(super) fn plan_shares(&self, bytes: usize, shares: usize) -> Plan {
        let (mut plan, _) = self.plan_with(bytes, DType::U8, Some(Algorithm::OneShotPull));
        let capacity = self.endpoint.region.layout.staging_bytes.min(plan.piece_bytes) / shares.max(1);
        let pack = D::PACKING.pack_bytes;
        plan.piece_bytes = (capacity / pack * pack).max(pack);
        plan
    }

    fn plan_with(&self, bytes: usize, dtype: DType, algorithm: Option<Algorithm>) -> (Plan, usize) {
        let choice = self.steps.choice(bytes, algorithm);
        let call = Call { bytes, world_size: self.world_size, choice };
        let plan = self.endpoint.device.plan(&call);
        let generation = self.endpoint.region.layout.mailbox_bytes;
        (plan, plan.algorithm.capacity(generation, D::PACKING, dtype.size(), self.world_size))
    }
}

/// Whole packs, so that every piece is aligned as the message is.
fn cut(mut plan: Plan, capacity: usize, dtype: DType, pack_bytes: usize) -> Plan {
    let piece = plan.piece_bytes / pack_bytes * pack_bytes;
    plan.piece_bytes = piece.clamp(pack_bytes, capacity * dtype.size());
    plan
}
