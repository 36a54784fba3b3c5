//! Collectives and calls of messages. A code, which ranks compare, is the position in the table plus 1.

use crate::facts::{BusFactor, Division, Extent, InPlace, SwapsStaging};

/// Number of elements of each share in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// All shares have the same number.
    Equal,
    /// Counts by rank, equal on all ranks.
    ByRank,
    /// Counts by receiving rank and counts by sending rank, which differ among ranks.
    ByPeer,
}

/// Collective, or call of messages between pairs of ranks.
#[derive(Debug)]
pub struct Collective {
    /// Name of its method, for example `all_reduce`.
    pub name: &'static str,
    /// Variant of `CallKind`.
    pub variant: &'static str,
    /// Documentation for Rust; `None` for calls of messages, which are not variants of `Collective`.
    pub doc: Option<&'static str>,
    /// Type that the variant of `Collective` holds instead of an operation or a root.
    pub holds: Option<&'static str>,
    /// Elements that a rank reads.
    pub reads: Extent,
    /// Elements that a rank writes.
    pub writes: Extent,
    /// Overlap of input and output that makes the call in place.
    pub in_place: InPlace,
    /// Division among launches.
    pub division: Division,
    /// Kernel, if all calls have the same.
    pub kernel: Option<&'static str>,
    /// Another kernel for large messages between more than two GPUs.
    pub kernel_of_large: Option<&'static str>,
    /// Whether two ranks may swap their staging.
    pub swaps_staging: SwapsStaging,
    /// Whether elements are reduced.
    pub reduces: bool,
    /// Whether it has a root.
    pub has_root: bool,
    /// Number of elements of each share.
    pub counts: Counts,
    /// Variant of `PlannedCall`: the rows of a plan's table that are for the call.
    pub planned_as: &'static str,
    /// Ratio of bus bandwidth to algorithm bandwidth.
    pub bus: BusFactor,
    /// Whether `bench`, `compare` and `soak` measure it, as nccl-tests does.
    pub is_measured: bool,
}

use BusFactor::{One, Others, TwiceOthers};
use Extent::{AllShares, AllSharesOfRoot, Nothing, Share, ShareOfRoot};
use InPlace::{Never, OwnShareOfInput, OwnShareOfOutput, Same};

/// Default values of the rows: those of a call of messages.
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

/// All collectives and calls of messages.
#[rustfmt::skip]
pub const COLLECTIVES: [Collective; 23] = [
    Collective { name: "all_reduce", variant: "AllReduce",
                 doc: Some("Reduces all ranks' inputs. Every rank gets the result."),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole, kernel: None,
                 swaps_staging: SwapsStaging::ByAlgorithm, reduces: true, planned_as: "AllReduce",
                 bus: TwiceOthers, is_measured: true, ..TRANSFERS },
    Collective { name: "all_gather", variant: "AllGather",
                 doc: Some("Concatenates all ranks' inputs. Every rank gets the result."),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather"), swaps_staging: SwapsStaging::Always, planned_as: "AllGather",
                 bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "all_gather_v", variant: "AllGatherV",
                 doc: Some("Concatenates all ranks' inputs. Every rank gets the result. Shares have these counts, \
                            indexed by rank."),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather"), swaps_staging: SwapsStaging::Always, counts: Counts::ByRank,
                 planned_as: "AllGather", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "reduce_scatter", variant: "ReduceScatter",
                 doc: Some("Reduces all ranks' inputs. Rank r gets share r of the result."),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter"), swaps_staging: SwapsStaging::Always, reduces: true,
                 planned_as: "ReduceScatter", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "reduce_scatter_v", variant: "ReduceScatterV",
                 doc: Some("Reduces all ranks' inputs. Rank r gets share r of the result. Shares have these \
                            counts, indexed by rank."),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter"), swaps_staging: SwapsStaging::Always, reduces: true,
                 counts: Counts::ByRank, planned_as: "ReduceScatter", bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "broadcast", variant: "Broadcast",
                 doc: Some("Copies the root's input to every rank."),
                 reads: ShareOfRoot, writes: Share, in_place: Same, division: Division::Whole,
                 kernel: Some("broadcast"), kernel_of_large: Some("scattered_broadcast"),
                 swaps_staging: SwapsStaging::Never, has_root: true, planned_as: "Broadcast", bus: One,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "reduce", variant: "Reduce",
                 doc: Some("Reduces all ranks' inputs. The root gets the result."),
                 reads: Share, writes: ShareOfRoot, in_place: Same, division: Division::Whole,
                 kernel: Some("reduce"), swaps_staging: SwapsStaging::Never, reduces: true, has_root: true,
                 planned_as: "Reduce", bus: One, is_measured: true, ..TRANSFERS },
    Collective { name: "gather", variant: "Gather",
                 doc: Some("Concatenates all ranks' inputs. The root gets the result."),
                 reads: Share, writes: AllSharesOfRoot, in_place: OwnShareOfOutput, has_root: true, bus: Others,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "scatter", variant: "Scatter",
                 doc: Some("Sends share r of the root's input to rank r."),
                 reads: AllSharesOfRoot, writes: Share, in_place: OwnShareOfInput, has_root: true, bus: Others,
                 is_measured: true, ..TRANSFERS },
    Collective { name: "all_to_all", variant: "AllToAll",
                 doc: Some("Sends share r of every rank's input to rank r, which receives the shares in rank order."),
                 reads: AllShares, writes: AllShares, bus: Others, is_measured: true, ..TRANSFERS },
    Collective { name: "all_to_all_v", variant: "AllToAllV",
                 doc: Some("Sends share r of every rank's input to rank r, which receives the shares in rank \
                            order. Shares may differ in size."),
                 reads: AllShares, writes: AllShares, counts: Counts::ByPeer, bus: Others, is_measured: true,
                 ..TRANSFERS },
    Collective { name: "barrier", variant: "Barrier",
                 doc: Some("Waits until all ranks have called it."),
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
                 doc: Some("Sums all ranks' inputs and adds a residual; optionally normalises and quantises rows. \
                            [`RawFused`] has the addresses of all results: the output of the call is ignored."),
                 holds: Some("&'a RawFused"),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole, kernel: None,
                 swaps_staging: SwapsStaging::ByAlgorithm, reduces: true, planned_as: "AllReduce",
                 bus: TwiceOthers, is_measured: false, ..TRANSFERS },
    Collective { name: "all_reduce_quantized", variant: "AllReduceQuantized",
                 doc: Some("Sums all ranks' inputs with quantised transport: the result has an error, because \
                            inputs and sum are quantised."),
                 holds: Some("QuantizedTransport"),
                 reads: Share, writes: Share, in_place: Same, division: Division::Whole,
                 kernel: Some("two_shot_quantized"), swaps_staging: SwapsStaging::Never, reduces: true,
                 planned_as: "AllReduce", bus: TwiceOthers, is_measured: false, ..TRANSFERS },
    Collective { name: "reduce_scatter_fused", variant: "ReduceScatterFused",
                 doc: Some("Sums all ranks' inputs. Rank r gets share r of the sum, and adds its own residual; \
                            optionally normalises and quantises rows. [`RawFused`] has the addresses of all results: \
                            the output of the call is ignored."),
                 holds: Some("&'a RawFused"),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter_norm"), swaps_staging: SwapsStaging::Always, reduces: true,
                 planned_as: "ReduceScatter", bus: Others, is_measured: false, ..TRANSFERS },
    Collective { name: "reduce_scatter_fused_v", variant: "ReduceScatterFusedV",
                 doc: Some("Sums all ranks' inputs, as [`Collective::ReduceScatterFused`] does. Shares are whole rows, \
                            and have these counts of elements, indexed by rank."),
                 holds: Some("&'a RawFused"),
                 reads: AllShares, writes: Share, in_place: OwnShareOfInput, division: Division::Shares,
                 kernel: Some("reduce_scatter_norm"), swaps_staging: SwapsStaging::Always, reduces: true,
                 counts: Counts::ByRank, planned_as: "ReduceScatter", bus: Others, is_measured: false, ..TRANSFERS },
    Collective { name: "all_gather_rows", variant: "AllGatherRows",
                 doc: Some("Gathers quantised rows: the input has the numbers of this rank's rows, the output those of \
                            all ranks, and [`RawGatheredRows`] has the scales of both."),
                 holds: Some("&'a RawGatheredRows"),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather_rows"), swaps_staging: SwapsStaging::Always, planned_as: "AllGather",
                 bus: Others, is_measured: false, ..TRANSFERS },
    Collective { name: "all_gather_rows_v", variant: "AllGatherRowsV",
                 doc: Some("Gathers quantised rows, as [`Collective::AllGatherRows`] does. Shares are whole rows, and \
                            have these counts of elements of the input, indexed by rank."),
                 holds: Some("&'a RawGatheredRows"),
                 reads: Share, writes: AllShares, in_place: OwnShareOfOutput, division: Division::Shares,
                 kernel: Some("all_gather_rows"), swaps_staging: SwapsStaging::Always, counts: Counts::ByRank,
                 planned_as: "AllGather", bus: Others, is_measured: false, ..TRANSFERS },
    Collective { name: "sharded_rms_norm", variant: "ShardedRmsNorm",
                 doc: Some("Normalises rows whose elements are divided among the ranks, by RMSNorm over the whole \
                            rows. `count` is the number of rows. [`RawShardedRows`] has the addresses of one or two \
                            parts of each row: input and output of the call are ignored."),
                 holds: Some("&'a [RawShardedRows]"),
                 division: Division::Whole, kernel: Some("sharded_rms_norm"), ..TRANSFERS },
];
