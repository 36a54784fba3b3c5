//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use super::fused::RawFused;
use super::quantized::QuantizedTransport;
use crate::catalogue::{CallKind, ReduceOp};

/// A collective, for the calls that take any: [`Communicator::collective_raw`](crate::Communicator::collective_raw), tools and tests.
///
/// The `count` of a call is NCCL's: the elements of one rank's share where buffers hold a share for each rank, and is not looked
/// at where the collective has counts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective<'a> {
    /// Every rank has all ranks' inputs, reduced.
    AllReduce(ReduceOp),
    /// Every rank has all ranks' inputs, one after the other.
    AllGather,
    /// Every rank has all ranks' inputs, one after the other: as many elements from each as stand here, by rank.
    AllGatherV(&'a [usize]),
    /// Rank r has share r of all ranks' inputs, reduced.
    ReduceScatter(ReduceOp),
    /// Rank r has share r of all ranks' inputs, reduced: as many elements as stand here, by rank.
    ReduceScatterV(ReduceOp, &'a [usize]),
    /// Every rank has the root's input.
    Broadcast {
        /// Who.
        root: usize,
    },
    /// The root has all ranks' inputs, reduced.
    Reduce {
        /// How.
        op: ReduceOp,
        /// Who.
        root: usize,
    },
    /// The root has all ranks' inputs, one after the other.
    Gather {
        /// Who.
        root: usize,
    },
    /// Rank r has share r of the root's input.
    Scatter {
        /// Who.
        root: usize,
    },
    /// Rank r has share r of every rank's input, in the order of the ranks.
    AllToAll,
    /// Rank r has share r of every rank's input, in the order of the ranks, where shares have any sizes.
    AllToAllV {
        /// Elements that this rank sends, by receiving rank.
        send: &'a [usize],
        /// Elements that this rank receives, by sending rank.
        receive: &'a [usize],
    },
    /// No rank comes back before all have called.
    Barrier,
    /// Every rank has the sum of all ranks' inputs, with a residual added, and does with it what else is said there. All places are said there too: the output of the call is not looked at.
    AllReduceFused(&'a RawFused),
    /// Every rank has the sum of all ranks' inputs, with an error: they and the sum are quantised on their way.
    AllReduceQuantized(QuantizedTransport),
}

impl<'a> Collective<'a> {
    /// Which one it is, without its arguments.
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
        }
    }

    /// How elements are combined, if they are.
    #[inline]
    pub(crate) const fn reduction(&self) -> Option<ReduceOp> {
        match *self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::ReduceScatterV(op, _) | Self::Reduce { op, .. } => Some(op),
            Self::AllReduceFused(..) | Self::AllReduceQuantized(..) => Some(ReduceOp::Sum),
            Self::AllGather | Self::AllGatherV(..) | Self::Broadcast { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier => None,
        }
    }

    /// The rank that has another part than the others.
    #[inline]
    pub(crate) const fn root(&self) -> Option<usize> {
        match *self {
            Self::Broadcast { root, .. } | Self::Reduce { root, .. } | Self::Gather { root, .. } | Self::Scatter { root, .. } => Some(root),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..) | Self::ReduceScatterV(..) | Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier | Self::AllReduceFused(..) | Self::AllReduceQuantized(..) => None,
        }
    }

    /// The counts that all ranks have to agree on.
    #[inline]
    pub(crate) const fn counts(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllGatherV(counts) | Self::ReduceScatterV(_, counts) => Some(counts),
            Self::AllReduce(..) | Self::AllGather | Self::ReduceScatter(..) | Self::Broadcast { .. } | Self::Reduce { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier | Self::AllReduceFused(..) | Self::AllReduceQuantized(..) => None,
        }
    }

    /// The counts of this rank's shares by the rank that they are for.
    #[inline]
    pub(crate) const fn sends(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllToAllV { send, .. } => Some(send),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..) | Self::ReduceScatterV(..) | Self::Broadcast { .. } | Self::Reduce { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll | Self::Barrier | Self::AllReduceFused(..) | Self::AllReduceQuantized(..) => None,
        }
    }

    /// The counts of this rank's shares by the rank that they are from.
    #[inline]
    pub(crate) const fn receives(&self) -> Option<&'a [usize]> {
        match *self {
            Self::AllToAllV { receive, .. } => Some(receive),
            Self::AllReduce(..) | Self::AllGather | Self::AllGatherV(..) | Self::ReduceScatter(..) | Self::ReduceScatterV(..) | Self::Broadcast { .. } | Self::Reduce { .. } | Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll | Self::Barrier | Self::AllReduceFused(..) | Self::AllReduceQuantized(..) => None,
        }
    }

    /// The collective of a kind, with those of these arguments that it takes. `counts` are by rank, `by_peer` those that this rank
    /// sends to each rank, and receives from it. `None` of calls of messages, and of kinds that take others.
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
