//! Fills `FaLaunch`, the struct that kernels read.

use std::time::Duration;

use super::arguments::Call;
use super::collective::Collective;
use crate::abi::{FaCall, FaLaunch, FaShare, FA_MAX_RANKS, MAX_RANKS};
use crate::catalogue::ReduceOp;
use crate::plan::{DeviceKind, Limits, Plan};
use crate::region::{Layout, TABLE_ROWS};
use crate::scale::Scale;

/// Addresses of the world's memory, for the launches of one rank.
#[derive(Debug)]
pub(crate) struct LaunchContext<'a> {
    pub rank: usize,
    pub world_size: usize,
    pub layout: &'a Layout,
    /// Addresses of the regions, indexed by rank.
    pub regions: [u64; MAX_RANKS],
    /// Address of this rank's table of registered buffers.
    pub table: u64,
    /// Address of this rank's status.
    pub status: u64,
    /// Bit mask of the ranks that are threads of this process.
    pub threads: u32,
    /// Address of an `FaDirect`, or 0.
    pub direct: u64,
    /// Address of this rank's window, or 0.
    pub window: u64,
    /// Multicast address of all ranks' windows, or 0.
    pub multicast: u64,
}

impl LaunchContext<'_> {
    /// Creates a launch with the fields that are equal in all launches of the rank.
    pub fn launch(&self) -> FaLaunch {
        FaLaunch {
            regions: self.regions,
            own: self.regions[self.rank],
            input: 0,
            output: 0,
            count: 0,
            source: 0,
            buffers: self.table,
            buffer_count: TABLE_ROWS as u64,
            status: self.status,
            mailbox_offset: self.layout.mailbox_offset as u64,
            mailbox_bytes: self.layout.mailbox_bytes as u64,
            staging_offset: self.layout.staging_offset as u64,
            staging_bytes: self.layout.staging_bytes as u64,
            staging_slot_bytes: 0,
            channel_offset: self.layout.channel_offset as u64,
            channel_bytes: self.layout.channel_bytes as u64,
            chunk_bytes: self.layout.chunk_bytes as u64,
            operands: 0,
            launches: 0,
            timeout_ns: NO_LIMIT,
            rank: self.rank as u32,
            world: self.world_size as u32,
            blocks: 0,
            dtype: 0,
            op: 0,
            algorithm: 0,
            spin: 0,
            checked: 0,
            root: 0,
            staging_last_slot: 0,
            swaps_staging: 0,
            channel_slots: self.layout.channel_slots as u32,
            threads: self.threads,
            transport: 0,
            channel_stripes: self.layout.stripes.count as u32,
            packet_bytes: self.layout.packet_bytes as u32,
            direct: self.direct,
            call: FaCall { what: 0, count: 0, digest: 0 },
            scale: 1.0,
            shares: [FaShare { first: 0, count: 0 }; FA_MAX_RANKS as usize],
            window: self.window,
            multicast: self.multicast,
            goes_on: 0,
            socket_ranks: 0,
            shares_core: 0,
            streams_output: 0,
        }
    }
}

impl Call<'_> {
    /// Returns whether results bypass the caches of a CPU: of a large allreduce, whose output the caches do not have
    /// from its input. Equal calls may differ in this.
    pub fn streams_output(&self, limits: &Limits) -> bool {
        let bytes = self.count.saturating_mul(self.dtype.size());
        let is_large = limits.device == DeviceKind::Host && bytes >= limits.stream_from;
        is_large && matches!(self.collective, Collective::AllReduce(_)) && self.input != self.output
    }

    /// Sets the fields of a launch that depend on the call but not on the piece.
    #[inline]
    pub fn set_call(&self, launch: &mut FaLaunch, plan: &Plan, limits: &Limits) {
        launch.blocks = plan.blocks as u32;
        launch.dtype = self.dtype as u32;
        let op = self.collective.reduction().unwrap_or(ReduceOp::Sum);
        launch.op = op.code();
        launch.scale = op.scale().map_or(1.0, Scale::get);
        launch.algorithm = self.kernel(plan.algorithm, limits);
        let staged = self.ring_bytes(plan.piece_bytes, limits.world_size);
        (launch.staging_slot_bytes, launch.staging_last_slot) =
            staged.map_or((0, 0), |staged| limits.staging_ring(staged));
        let swaps = limits.swaps_staging() && launch.staging_last_slot == 0 && self.can_swap(plan.algorithm);
        launch.swaps_staging = u32::from(swaps);
        launch.socket_ranks = match self.collective {
            Collective::AllReduce(op) => limits.levels(plan.algorithm, self.dtype, op, self.count) as u32,
            _ => 0,
        };
        launch.transport = self.collective.quantized().map_or(0, |quantized| quantized.transport as u32);
        launch.root = self.collective.root().unwrap_or(0) as u32;
    }
}

/// Time limit that no wait reaches: half of the range, because kernels add the time of their clock.
pub(crate) const NO_LIMIT: u64 = u64::MAX / 2;

/// Converts a time limit to nanoseconds for kernels.
pub(crate) fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(NO_LIMIT).min(NO_LIMIT)
}
