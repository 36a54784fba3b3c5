//! The collectives as values: which one a call is, and how long its buffers are.

use super::fused::RawFused;
use super::identity::CallKind;
use super::quantized::QuantizedTransport;
use crate::catalogue::{Extent, ReduceOp};

/// A collective, for the calls that take any: [`Communicator::collective_raw`](crate::Communicator::collective_raw), tools and tests.
///
/// The `count` of a call is NCCL's: the elements of one rank's share where buffers hold a share for each rank, and is not looked
/// at where the collective has counts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective<'a> {
    /// Every rank has all ranks' inputs, reduced.
    AllReduce(ReduceOp),
    /// Every rank has the sum of all ranks' inputs, with a residual added, and does with it what else is said there. All places are
    /// said there too: the output of the call is not looked at.
    AllReduceFused(&'a RawFused),
    /// Every rank has the sum of all ranks' inputs, with an error: they and the sum are quantised on their way.
    AllReduceQuantized(QuantizedTransport),
    /// Every rank has all ranks' inputs, one after the other.
    AllGather,
    /// The same with as many elements from each rank as stand here, by rank.
    AllGatherV(&'a [usize]),
    /// Rank r has share r of all ranks' inputs, reduced.
    ReduceScatter(ReduceOp),
    /// The same with shares of as many elements as stand here, by rank.
    ReduceScatterV(ReduceOp, &'a [usize]),
    /// Every rank has the root's input.
    Broadcast {
        /// Whose input.
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
        /// Whose input.
        root: usize,
    },
    /// Rank r has share r of every rank's input, in the order of the ranks.
    AllToAll,
    /// The same with shares of any sizes.
    AllToAllV {
        /// Elements that this rank sends, by receiving rank.
        send: &'a [usize],
        /// Elements that this rank receives, by sending rank.
        receive: &'a [usize],
    },
    /// No rank comes back before all have called.
    Barrier,
}

impl Collective<'_> {
    /// The name of its method: `"all_gather"`, ...
    pub const fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Elements that `rank` reads in a call of `count`.
    #[inline]
    pub fn input_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        self.len(self.kind().reads(), count, rank, world_size, || match self.counts_by_peer() {
            Some([send, _]) => Some(send),
            None => self.counts(),
        })
    }

    /// Elements that `rank` writes.
    #[inline]
    pub fn output_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        self.len(self.kind().writes(), count, rank, world_size, || match self.counts_by_peer() {
            Some([_, receive]) => Some(receive),
            None => self.counts(),
        })
    }

    /// `counts`: the elements of each rank's share, where they are given by rank.
    #[inline]
    fn len<'a>(
        &self,
        extent: Extent,
        count: usize,
        rank: usize,
        world_size: usize,
        counts: impl FnOnce() -> Option<&'a [usize]>,
    ) -> usize {
        let of_root = |elements| if self.root() == Some(rank) { elements } else { 0 };
        match extent {
            Extent::Nothing => 0,
            Extent::Share => counts().map_or(count, |counts| counts.get(rank).copied().unwrap_or(0)),
            Extent::AllShares => counts().map_or(count.saturating_mul(world_size), total),
            Extent::ShareOfRoot => of_root(count),
            Extent::AllSharesOfRoot => of_root(count.saturating_mul(world_size)),
        }
    }

    /// Which one it is, without its arguments.
    #[inline]
    pub const fn kind(&self) -> CallKind {
        match self {
            Self::AllReduce(_) => CallKind::AllReduce,
            Self::AllReduceFused(_) => CallKind::AllReduceFused,
            Self::AllReduceQuantized(_) => CallKind::AllReduceQuantized,
            Self::AllGather => CallKind::AllGather,
            Self::AllGatherV(_) => CallKind::AllGatherV,
            Self::ReduceScatter(_) => CallKind::ReduceScatter,
            Self::ReduceScatterV(..) => CallKind::ReduceScatterV,
            Self::Broadcast { .. } => CallKind::Broadcast,
            Self::Reduce { .. } => CallKind::Reduce,
            Self::Gather { .. } => CallKind::Gather,
            Self::Scatter { .. } => CallKind::Scatter,
            Self::AllToAll => CallKind::AllToAll,
            Self::AllToAllV { .. } => CallKind::AllToAllV,
            Self::Barrier => CallKind::Barrier,
        }
    }

    /// How elements are combined, if they are.
    #[inline]
    pub(crate) const fn reduction(&self) -> Option<ReduceOp> {
        match *self {
            Self::AllReduce(op)
            | Self::ReduceScatter(op)
            | Self::ReduceScatterV(op, _)
            | Self::Reduce { op, .. } => Some(op),
            Self::AllReduceFused(_) | Self::AllReduceQuantized(_) => Some(ReduceOp::Sum),
            _ => None,
        }
    }

    /// Whether `rank` reads anything, however much it is: only the root may.
    #[cfg(feature = "cuda")]
    pub(crate) fn uses_input(&self, rank: usize) -> bool {
        !(self.kind().reads() == Extent::AllSharesOfRoot && self.root() != Some(rank))
    }

    /// Whether `rank` writes anything, however much it is: only the root may.
    #[cfg(feature = "cuda")]
    pub(crate) fn uses_output(&self, rank: usize) -> bool {
        let is_of_root = matches!(self.kind().writes(), Extent::ShareOfRoot | Extent::AllSharesOfRoot);
        !(is_of_root && self.root() != Some(rank))
    }

    /// What is done with a sum.
    #[inline]
    pub(crate) const fn fused(&self) -> Option<&RawFused> {
        match *self {
            Self::AllReduceFused(fused) => Some(fused),
            _ => None,
        }
    }

    /// Where results go in a call that was given an output.
    #[inline]
    pub(crate) const fn output(&self, given: u64) -> u64 {
        match *self {
            Self::AllReduceFused(fused) => fused.output(),
            _ => given,
        }
    }

    /// How the parts of a sum are moved, where they are quantised.
    #[inline]
    pub(crate) const fn quantized(&self) -> Option<QuantizedTransport> {
        match *self {
            Self::AllReduceQuantized(quantized) => Some(quantized),
            _ => None,
        }
    }

    #[inline]
    pub(crate) const fn root(&self) -> Option<usize> {
        match *self {
            Self::Broadcast { root }
            | Self::Reduce { root, .. }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// The counts that all ranks have to agree on.
    #[inline]
    pub(crate) const fn counts(&self) -> Option<&[usize]> {
        match *self {
            Self::AllGatherV(counts) | Self::ReduceScatterV(_, counts) => Some(counts),
            _ => None,
        }
    }

    /// The counts of this rank's shares by the rank that they are for, and by the rank that they are from.
    #[inline]
    pub(crate) const fn counts_by_peer(&self) -> Option<[&[usize]; 2]> {
        match *self {
            Self::AllToAllV { send, receive } => Some([send, receive]),
            _ => None,
        }
    }
}

fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
}
