//! The collectives as values: how long their buffers are.

use super::fused::RawFused;
pub use super::generated::Collective;
use super::quantized::QuantizedTransport;
use crate::catalogue::{Extent, InPlace};

impl Collective<'_> {
    /// The name of its method: `"all_gather"`, ...
    pub const fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Elements that `rank` reads in a call of `count`.
    #[inline]
    pub fn input_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        self.len(self.kind().reads(), count, rank, world_size, || self.sends().or(self.counts()))
    }

    /// Elements that `rank` writes.
    #[inline]
    pub fn output_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        self.len(self.kind().writes(), count, rank, world_size, || self.receives().or(self.counts()))
    }

    /// Elements before the input and before the output of `rank` in the one buffer of a call in place; `None` where it cannot be in
    /// place.
    #[inline]
    pub fn in_place(&self, count: usize, rank: usize, world_size: usize) -> Option<(usize, usize)> {
        debug_assert!(rank < world_size);
        let before = || {
            self.counts()
                .map_or(rank.saturating_mul(count), |counts| total(&counts[..rank.min(counts.len())]))
        };
        match self.kind().in_place() {
            InPlace::Same => Some((0, 0)),
            InPlace::OwnShareOfOutput => Some((before(), 0)),
            InPlace::OwnShareOfInput => Some((0, before())),
            InPlace::Never => None,
        }
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
}

fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
}
