//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use super::fused::RawFused;
use super::gathered::RawGatheredRows;
use super::quantized::QuantizedTransport;
use super::sharded::RawShardedRows;
use crate::catalogue::{CallKind, ReduceOp};

/// Collective with its arguments, for functions that take any collective, such as
/// [`Communicator::collective_raw`](crate::Communicator::collective_raw).
///
/// The `count` of a call is NCCL's. If buffers hold a share for each rank, it is the number of elements of one share.
/// It is ignored if the collective itself has counts.
///
/// ```
/// use fast_allreduce::{CallKind, Collective, ReduceOp};
///
/// let collective = Collective::Reduce { op: ReduceOp::Max, root: 0 };
/// assert_eq!(collective.kind(), CallKind::Reduce);
/// assert_eq!(Collective::of(CallKind::Reduce, ReduceOp::Max, 0, &[], [&[], &[]]), Some(collective));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective<'a> {
    /// Reduces all ranks' inputs. Every rank gets the result.
    AllReduce(ReduceOp),
    /// Concatenates all ranks' inputs. Every rank gets the result.
    AllGather,
    /// Concatenates all ranks' inputs. Every rank gets the result. Shares have these counts, indexed by rank.
    AllGatherV(&'a [usize]),
    /// Reduces all ranks' inputs. Rank r gets share r of the result.
    ReduceScatter(ReduceOp),
    /// Reduces all ranks' inputs. Rank r gets share r of the result. Shares have these counts, indexed by rank.
    ReduceScatterV(ReduceOp, &'a [usize]),
    /// Copies the root's input to every rank.
    Broadcast {
        /// Root rank.
        root: usize,
    },
    /// Reduces all ranks' inputs. The root gets the result.
    Reduce {
        /// Operation.
        op: ReduceOp,
        /// Root rank.
        root: usize,
    },
    /// Concatenates all ranks' inputs. The root gets the result.
    Gather {
        /// Root rank.
        root: usize,
    },
    /// Sends share r of the root's input to rank r.
    Scatter {
        /// Root rank.
        root: usize,
    },
    /// Sends share r of every rank's input to rank r, which receives the shares in rank order.
    AllToAll,
    /// Sends share r of every rank's input to rank r, which receives the shares in rank order. Shares may differ in
    /// size.
    AllToAllV {
        /// Number of elements that this rank sends, by receiving rank.
        send: &'a [usize],
        /// Number of elements that this rank receives, by sending rank.
        receive: &'a [usize],
    },
    /// Waits until all ranks have called it.
    Barrier,
    /// Sums all ranks' inputs and adds a residual; optionally normalises and quantises rows. [`RawFused`] has the
    /// addresses of all results: the output of the call is ignored.
    AllReduceFused(&'a RawFused),
    /// Sums all ranks' inputs with quantised transport: the result has an error, because inputs and sum are quantised.
    AllReduceQuantized(QuantizedTransport),
    /// Sums all ranks' inputs. Rank r gets share r of the sum, and adds its own residual; optionally normalises and
    /// quantises rows. [`RawFused`] has the addresses of all results: the output of the call is ignored.
    ReduceScatterFused(&'a RawFused),
    /// Sums all ranks' inputs, as [`Collective::ReduceScatterFused`] does. Shares are whole rows, and have these
    /// counts of elements, indexed by rank.
    ReduceScatterFusedV(&'a RawFused, &'a [usize]),
    /// Gathers quantised rows: the input has the numbers of this rank's rows, the output those of all ranks, and
    /// [`RawGatheredRows`] has the scales of both.
    AllGatherRows(&'a RawGatheredRows),
    /// Gathers quantised rows, as [`Collective::AllGatherRows`] does. Shares are whole rows, and have these counts of
    /// elements of the input, indexed by rank.
    AllGatherRowsV(&'a RawGatheredRows, &'a [usize]),
    /// Normalises rows whose elements are divided among the ranks, by RMSNorm over the whole rows. `count` is the
    /// number of rows. [`RawShardedRows`] has the addresses of one or two parts of each row: input and output of the
    /// call are ignored.
    ShardedRmsNorm(&'a [RawShardedRows]),
}

impl<'a> Collective<'a> {
    /// Returns the kind of the collective.
    #[inline]
    pub const fn kind(&self) -> CallKind {
        match self {
            Self::AllReduce(..) => CallKind::AllReduce,
            Self::AllGather => CallKind::AllGather,
            Self::AllGatherV(..) => CallKind::AllGatherV,
            Self::ReduceScatter(..) => CallKind::ReduceScatter,
            Self::ReduceScatterV(..) => CallKind::ReduceScatterV,
            Self::Broadcast { .. } => CallKind::Broadcast,
            Self::Reduce { .. } => CallKind::Reduce,
            Self::Gather { .. } => CallKind::Gather,
            Self::Scatter { .. } => CallKind::Scatter,
            Self::AllToAll => CallKind::AllToAll,
            Self::AllToAllV { .. } => CallKind::AllToAllV,
            Self::Barrier => CallKind::Barrier,
            Self::AllReduceFused(..) => CallKind::AllReduceFused,
            Self::AllReduceQuantized(..) => CallKind::AllReduceQuantized,
            Self::ReduceScatterFused(..) => CallKind::ReduceScatterFused,
            Self::ReduceScatterFusedV(..) => CallKind::ReduceScatterFusedV,
            Self::AllGatherRows(..) => CallKind::AllGatherRows,
            Self::AllGatherRowsV(..) => CallKind::AllGatherRowsV,
            Self::ShardedRmsNorm(..) => CallKind::ShardedRmsNorm,
        }
    }

    /// Returns the operation of a collective that reduces.
    #[inline]
    pub(crate) const fn reduction(&self) -> Option<ReduceOp> {
        match *self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::ReduceScatterV(op, _) | Self::Reduce { op,
                .. } => Some(op),
            Self::AllReduceFused(..) | Self::AllReduceQuantized(..) | Self::ReduceScatterFused(..)
                | Self::ReduceScatterFusedV(..) => Some(ReduceOp::Sum),
            Self::AllGather | Self::AllGatherV(..) | Self::Broadcast { .. } | Self::Gather { .. }
                | Self::Scatter { .. } | Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier
                | Self::AllGatherRows(..) | Self::AllGatherRowsV(..) | Self::ShardedRmsNorm(..) => None,
        }
    }

    /// Returns the root.
    #[inline]
    pub(crate) const fn root(&self) -> Option<usize> {
        match *self {
            Self::Broadcast { root, .. } | Self::Reduce { root, .. } | Self::Gather { root, .. }
                | Self::Scatter { root, .. } => Some(root),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..)
                | Self::ReduceScatterV(..) | Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier
                | Self::AllReduceFused(..) | Self::AllReduceQuantized(..) | Self::ReduceScatterFused(..)
                | Self::ReduceScatterFusedV(..) | Self::AllGatherRows(..) | Self::AllGatherRowsV(..)
                | Self::ShardedRmsNorm(..) => None,
        }
    }

    /// Returns the counts by rank, which are equal on all ranks.
    #[inline]
    pub(crate) const fn counts(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllGatherV(counts) | Self::ReduceScatterV(_, counts) | Self::ReduceScatterFusedV(_, counts)
                | Self::AllGatherRowsV(_, counts) => Some(counts),
            Self::AllReduce(..) | Self::AllGather | Self::ReduceScatter(..) | Self::Broadcast { .. }
                | Self::Reduce { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll
                | Self::AllToAllV { .. } | Self::Barrier | Self::AllReduceFused(..) | Self::AllReduceQuantized(..)
                | Self::ReduceScatterFused(..) | Self::AllGatherRows(..) | Self::ShardedRmsNorm(..) => None,
        }
    }

    /// Returns the counts of this rank's shares by receiving rank.
    #[inline]
    pub(crate) const fn sends(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllToAllV { send, .. } => Some(send),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..)
                | Self::ReduceScatterV(..) | Self::Broadcast { .. } | Self::Reduce { .. } | Self::Gather { .. }
                | Self::Scatter { .. } | Self::AllToAll | Self::Barrier | Self::AllReduceFused(..)
                | Self::AllReduceQuantized(..) | Self::ReduceScatterFused(..) | Self::ReduceScatterFusedV(..)
                | Self::AllGatherRows(..) | Self::AllGatherRowsV(..) | Self::ShardedRmsNorm(..) => None,
        }
    }

    /// Returns the counts of this rank's shares by sending rank.
    #[inline]
    pub(crate) const fn receives(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllToAllV { receive, .. } => Some(receive),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..)
                | Self::ReduceScatterV(..) | Self::Broadcast { .. } | Self::Reduce { .. } | Self::Gather { .. }
                | Self::Scatter { .. } | Self::AllToAll | Self::Barrier | Self::AllReduceFused(..)
                | Self::AllReduceQuantized(..) | Self::ReduceScatterFused(..) | Self::ReduceScatterFusedV(..)
                | Self::AllGatherRows(..) | Self::AllGatherRowsV(..) | Self::ShardedRmsNorm(..) => None,
        }
    }

/// Creates the collective of a kind from the arguments that it takes; others are ignored. `counts` are indexed by
    /// rank. `send` and `receive` are the counts that this rank sends to and receives from each rank. Returns `None`
    /// for calls of messages, of rows, and with quantised transport.
    pub fn of(
        kind: CallKind,
        op: ReduceOp,
        root: usize,
        counts: &'a [usize],
        [send, receive]: [&'a [usize]; 2],
    ) -> Option<Self> {
        Some(match kind {
            CallKind::AllReduce => Self::AllReduce(op),
            CallKind::AllGather => Self::AllGather,
            CallKind::AllGatherV => Self::AllGatherV(counts),
            CallKind::ReduceScatter => Self::ReduceScatter(op),
            CallKind::ReduceScatterV => Self::ReduceScatterV(op, counts),
            CallKind::Broadcast => Self::Broadcast { root },
            CallKind::Reduce => Self::Reduce { op, root },
            CallKind::Gather => Self::Gather { root },
            CallKind::Scatter => Self::Scatter { root },
            CallKind::AllToAll => Self::AllToAll,
            CallKind::AllToAllV => Self::AllToAllV { send, receive },
            CallKind::Barrier => Self::Barrier,
            _ => return None,
        })
    }
}
