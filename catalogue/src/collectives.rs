//! The collectives and messages. A code is what ranks compare: the position in the table, and 1.

use crate::facts::{BusFactor, Division, Extent, InPlace, SwapsStaging};

/// The elements of each share in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// All shares have as many.
    Equal,
    /// Counts by rank, which all ranks have to agree on.
    ByRank,
    /// Counts of a rank's shares by the rank that they are for, and by the rank that they are from.
    ByPeer,
}

/// A collective, or a call of messages.
#[derive(Debug)]
pub struct Collective {
    /// The name of its method: `all_reduce`.
    pub name: &'static str,
    /// The variant of `CallKind`.
    pub variant: &'static str,
    /// Documentation for Rust; `None` of calls of messages, which are no variants of `Collective`.
    pub doc: Option<&'static str>,
    /// What the variant of `Collective` holds in the place of an operation, root or counts.
    pub holds: Option<&'static str>,
    /// What a rank reads.
    pub reads: Extent,
    /// What a rank writes.
    pub writes: Extent,
    /// When it is in place.
    pub in_place: InPlace,
    /// How it is divided among launches.
    pub division: Division,
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
    /// The elements of each share.
    pub counts: Counts,
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

/// A call of messages between pairs of ranks: what most rows have in common.
const TRANSFERS: Collective = Collective {
    name: "",
    variant: "",
    doc: None,
    holds: None,
    reads: Nothing,
    writes: Nothing,
    in_place: Never,
    division: Division::Transfers,
    kernel: Some("transfer"),
    kernel_of_large: None,
    swaps_staging: SwapsStaging::Never,
    reduces: false,
    has_root: false,
    counts: Counts::Equal,
    planned_as: "Messages",
    bus: One,
    is_measured: false,
};

/// All collectives and messages.
#[rustfmt::skip]
pub const COLLECTIVES: [Collective; 18] = [
    Collective { name: "all_reduce", variant: "AllReduce",
                 doc: Some("Every rank has all ranks' inputs, reduced."),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole, kernel: None,
                 swaps_staging: SwapsStaging::AsTheAlgorithm, reduces: true, planned_as: "AllReduce",
                 bus: TwiceOthers, is_measured: true, ..TRANSFERS },
    Collective { name: "all_gather", variant: "AllGather",
                 doc: Some("Every rank has all ranks' inputs, one after the other."),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather"), swaps_staging: SwapsStaging::Always, planned_as: "AllGather",
                 bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "all_gather_v", variant: "AllGatherV",
                 doc: Some("Every rank has all ranks' inputs, one after the other: as many elements from each as stand here, by rank."),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather"), swaps_staging: SwapsStaging::Always, counts: Counts::ByRank,
                 planned_as: "AllGather", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "reduce_scatter", variant: "ReduceScatter",
                 doc: Some("Rank r has share r of all ranks' inputs, reduced."),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter"), swaps_staging: SwapsStaging::Always, reduces: true,
                 planned_as: "ReduceScatter", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "reduce_scatter_v", variant: "ReduceScatterV",
                 doc: Some("Rank r has share r of all ranks' inputs, reduced: as many elements as stand here, by rank."),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter"), swaps_staging: SwapsStaging::Always, reduces: true,
                 counts: Counts::ByRank, planned_as: "ReduceScatter", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "broadcast", variant: "Broadcast",
                 doc: Some("Every rank has the root's input."),
                 reads: ShareOfRoot, writes: Share, in_place: Same, division: Division::Whole,
                 kernel: Some("broadcast"), kernel_of_large: Some("scattered_broadcast"),
                 swaps_staging: SwapsStaging::Never, has_root: true, planned_as: "Broadcast", bus: One,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "reduce", variant: "Reduce",
                 doc: Some("The root has all ranks' inputs, reduced."),
                 reads: Share, writes: ShareOfRoot, in_place: Same, division: Division::Whole,
                 kernel: Some("reduce"), swaps_staging: SwapsStaging::Never, reduces: true, has_root: true,
                 planned_as: "Reduce", bus: One, is_measured: true, ..TRANSFERS },
    Collective { name: "gather", variant: "Gather",
                 doc: Some("The root has all ranks' inputs, one after the other."),
                 reads: Share, writes: AllSharesOfRoot, in_place: OwnShareOfOutput, has_root: true, bus: Others,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "scatter", variant: "Scatter",
                 doc: Some("Rank r has share r of the root's input."),
                 reads: AllSharesOfRoot, writes: Share, in_place: OwnShareOfInput, has_root: true, bus: Others,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "all_to_all", variant: "AllToAll",
                 doc: Some("Rank r has share r of every rank's input, in the order of the ranks."),
                 reads: AllShares, writes: AllShares, bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "all_to_all_v", variant: "AllToAllV",
                 doc: Some("Rank r has share r of every rank's input, in the order of the ranks, where shares have any sizes."),
                 reads: AllShares, writes: AllShares, counts: Counts::ByPeer, bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "barrier", variant: "Barrier",
                 doc: Some("No rank comes back before all have called."),
                 reads: Nothing, writes: Nothing, in_place: Never, division: Division::Empty,
                 kernel: Some("barrier"), swaps_staging: SwapsStaging::Never, planned_as: "Messages", bus: Others,
                 is_measured: false, ..TRANSFERS },
    Collective { name: "send", variant: "Send",
                 reads: Share, ..TRANSFERS },
    Collective { name: "recv", variant: "Recv",
                 writes: Share, ..TRANSFERS },
    Collective { name: "send_recv", variant: "SendRecv",
                 reads: Share, writes: Share, is_measured: true, ..TRANSFERS },
    Collective { name: "group", variant: "Group",
                 reads: Share, writes: Share, ..TRANSFERS },
    Collective { name: "all_reduce_fused", variant: "AllReduceFused",
                 doc: Some("Every rank has the sum of all ranks' inputs, with a residual added, and does with it what else is said there. All places are said there too: the output of the call is not looked at."),
                 holds: Some("&'a RawFused"),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole, kernel: None,
                 swaps_staging: SwapsStaging::AsTheAlgorithm, reduces: true, planned_as: "AllReduce",
                 bus: TwiceOthers, is_measured: false, ..TRANSFERS },
    Collective { name: "all_reduce_quantized", variant: "AllReduceQuantized",
                 doc: Some("Every rank has the sum of all ranks' inputs, with an error: they and the sum are quantised on their way."),
                 holds: Some("QuantizedTransport"),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole,
                 kernel: Some("two_shot_quantized"), swaps_staging: SwapsStaging::Never, reduces: true,
                 planned_as: "AllReduce", bus: TwiceOthers, is_measured: false, ..TRANSFERS },
];
