//! The collectives and messages. A code is what ranks compare: the position in the table, and 1.

use crate::facts::{BusFactor, Extent, InPlace, Partition, SwapsStaging};

/// A collective, or a call of messages.
#[derive(Debug)]
pub struct Collective {
    /// The name of its method: `all_reduce`.
    pub name: &'static str,
    /// The variant of `CallKind`.
    pub variant: &'static str,
    /// What a rank reads.
    pub reads: Extent,
    /// What a rank writes.
    pub writes: Extent,
    /// When it is in place.
    pub in_place: InPlace,
    /// How it is divided among launches.
    pub partition: Partition,
    /// Its kernel, where it is the same in every call.
    pub kernel: Option<&'static str>,
    /// Another kernel, for large messages between more than two GPUs.
    pub kernel_of_large: Option<&'static str>,
    /// Whether two ranks may swap their staging.
    pub swaps_staging: SwapsStaging,
    /// Whether elements are combined.
    pub reduces: bool,
    /// Whether one rank has another part than the others.
    pub has_root: bool,
    /// Whether shares have counts by rank.
    pub has_counts: bool,
    /// The rows of a plan's table that are for it: a variant of `PlannedCall`.
    pub planned_as: &'static str,
    /// Its bus bandwidth.
    pub bus: BusFactor,
    /// Whether `bench`, `compare` and `soak` make it as one of the calls of nccl-tests.
    pub is_measured: bool,
}

use BusFactor::{One, Others, TwiceOthers};
use Extent::{AllShares, AllSharesOfRoot, Nothing, Share, ShareOfRoot};
use InPlace::{Never, OwnShareOfInput, OwnShareOfOutput, Same};

/// All collectives and messages.
#[rustfmt::skip]
pub const COLLECTIVES: [Collective; 18] = [
    Collective { name: "all_reduce", variant: "AllReduce", reads: Share, writes: Share, in_place: Same,
                 partition: Partition::Whole, kernel: None, kernel_of_large: None,
                 swaps_staging: SwapsStaging::AsTheAlgorithm, reduces: true, has_root: false, has_counts: false,
                 planned_as: "AllReduce", bus: TwiceOthers, is_measured: true },
    Collective { name: "all_gather", variant: "AllGather", reads: Share, writes: AllShares, in_place: OwnShareOfOutput,
                 partition: Partition::Shares, kernel: Some("all_gather"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Always, reduces: false, has_root: false, has_counts: false,
                 planned_as: "AllGather", bus: Others, is_measured: true },
    Collective { name: "all_gather_v", variant: "AllGatherV", reads: Share, writes: AllShares, in_place: OwnShareOfOutput,
                 partition: Partition::Shares, kernel: Some("all_gather"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Always, reduces: false, has_root: false, has_counts: true,
                 planned_as: "AllGather", bus: Others, is_measured: true },
    Collective { name: "reduce_scatter", variant: "ReduceScatter", reads: AllShares, writes: Share, in_place: OwnShareOfInput,
                 partition: Partition::Shares, kernel: Some("reduce_scatter"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Always, reduces: true, has_root: false, has_counts: false,
                 planned_as: "ReduceScatter", bus: Others, is_measured: true },
    Collective { name: "reduce_scatter_v", variant: "ReduceScatterV", reads: AllShares, writes: Share, in_place: OwnShareOfInput,
                 partition: Partition::Shares, kernel: Some("reduce_scatter"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Always, reduces: true, has_root: false, has_counts: true,
                 planned_as: "ReduceScatter", bus: Others, is_measured: true },
    Collective { name: "broadcast", variant: "Broadcast", reads: ShareOfRoot, writes: Share, in_place: Same,
                 partition: Partition::Whole, kernel: Some("broadcast"), kernel_of_large: Some("scattered_broadcast"),
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: true, has_counts: false,
                 planned_as: "Broadcast", bus: One, is_measured: true },
    Collective { name: "reduce", variant: "Reduce", reads: Share, writes: ShareOfRoot, in_place: Same,
                 partition: Partition::Whole, kernel: Some("reduce"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: true, has_root: true, has_counts: false,
                 planned_as: "Reduce", bus: One, is_measured: true },
    Collective { name: "gather", variant: "Gather", reads: Share, writes: AllSharesOfRoot, in_place: OwnShareOfOutput,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: true, has_counts: false,
                 planned_as: "Messages", bus: Others, is_measured: true },
    Collective { name: "scatter", variant: "Scatter", reads: AllSharesOfRoot, writes: Share, in_place: OwnShareOfInput,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: true, has_counts: false,
                 planned_as: "Messages", bus: Others, is_measured: true },
    Collective { name: "all_to_all", variant: "AllToAll", reads: AllShares, writes: AllShares, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: Others, is_measured: true },
    Collective { name: "all_to_all_v", variant: "AllToAllV", reads: AllShares, writes: AllShares, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: true,
                 planned_as: "Messages", bus: Others, is_measured: true },
    Collective { name: "barrier", variant: "Barrier", reads: Nothing, writes: Nothing, in_place: Never,
                 partition: Partition::Empty, kernel: Some("barrier"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: Others, is_measured: false },
    Collective { name: "send", variant: "Send", reads: Share, writes: Nothing, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: One, is_measured: false },
    Collective { name: "recv", variant: "Recv", reads: Nothing, writes: Share, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: One, is_measured: false },
    Collective { name: "send_recv", variant: "SendRecv", reads: Share, writes: Share, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: One, is_measured: true },
    Collective { name: "group", variant: "Group", reads: Share, writes: Share, in_place: Never,
                 partition: Partition::Transfers, kernel: Some("transfer"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: false, has_root: false, has_counts: false,
                 planned_as: "Messages", bus: One, is_measured: false },
    Collective { name: "all_reduce_fused", variant: "AllReduceFused", reads: Share, writes: Share, in_place: Same,
                 partition: Partition::Whole, kernel: None, kernel_of_large: None,
                 swaps_staging: SwapsStaging::AsTheAlgorithm, reduces: true, has_root: false, has_counts: false,
                 planned_as: "AllReduce", bus: TwiceOthers, is_measured: false },
    Collective { name: "all_reduce_quantized", variant: "AllReduceQuantized", reads: Share, writes: Share, in_place: Same,
                 partition: Partition::Whole, kernel: Some("two_shot_quantized"), kernel_of_large: None,
                 swaps_staging: SwapsStaging::Never, reduces: true, has_root: false, has_counts: false,
                 planned_as: "AllReduce", bus: TwiceOthers, is_measured: false },
];
