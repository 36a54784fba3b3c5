//! Lengths of the buffers of each collective, and its operands.

use super::fused::RawFused;
use super::gathered::RawGatheredRows;
pub use super::generated::Collective;
use super::quantized::QuantizedTransport;
use super::sharded::RawShardedRows;
use crate::catalogue::{Extent, InPlace};
use crate::error::{Error, Result};

impl Collective<'_> {
    /// Returns the name of the collective's method, for example `"all_gather"`.
    ///
    /// ```
    /// use fast_allreduce::{Collective, ReduceOp};
    ///
    /// assert_eq!(Collective::ReduceScatter(ReduceOp::Sum).name(), "reduce_scatter");
    /// ```
    pub const fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Returns the number of elements that `rank` reads. `count` is that of the call: the elements of one rank's share.
    /// Where the input is computed from experts' rows, it is the number of their elements.
    ///
    /// ```
    /// use fast_allreduce::{Collective, ReduceOp};
    ///
    /// // Rank 1 of 4 contributes a share for each rank, and receives its own.
    /// let collective = Collective::ReduceScatter(ReduceOp::Sum);
    /// assert_eq!(collective.input_len(100, 1, 4), 400);
    /// assert_eq!(collective.output_len(100, 1, 4), 100);
    /// ```
    #[inline]
    pub fn input_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        if let Some((fused, experts)) = self.fused().and_then(|fused| Some((fused, fused.experts?))) {
            return experts.rows.saturating_mul(fused.hidden);
        }
        self.len(self.kind().reads(), count, rank, world_size, || self.sends().or(self.counts()))
    }

    /// Returns the number of elements that `rank` writes. [`Collective::input_len`] has an example.
    #[inline]
    pub fn output_len(&self, count: usize, rank: usize, world_size: usize) -> usize {
        self.len(self.kind().writes(), count, rank, world_size, || self.receives().or(self.counts()))
    }

    /// Returns the offsets in elements of the input and of the output of `rank` in the buffer of a call in place;
    /// `None` if the collective cannot be in place.
    ///
    /// ```
    /// use fast_allreduce::Collective;
    ///
    /// // In an all-gather in place, the input is the rank's own share of the output.
    /// assert_eq!(Collective::AllGather.in_place(100, 2, 4), Some((200, 0)));
    /// assert_eq!(Collective::AllToAll.in_place(100, 2, 4), None);
    /// ```
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

    /// Returns the number of elements of an extent. `counts` returns the elements of each rank's share, if given by
    /// rank.
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

    /// Refuses counts that are not one for each rank.
    pub(crate) fn check_counts(&self, world_size: usize) -> Result<()> {
        for counts in [self.sends(), self.receives(), self.counts()].into_iter().flatten() {
            if counts.len() != world_size {
                return Err(Error::InvalidSetting {
                    name: "counts",
                    value: format!("{} counts for a world of {world_size}", counts.len()),
                    expected: "one for each rank",
                });
            }
        }
        Ok(())
    }

    /// Returns whether `rank` has an input, possibly an empty one. In some collectives only the root has one.
    #[cfg(feature = "cuda")]
    pub(crate) fn uses_input(&self, rank: usize) -> bool {
        !(self.kind().reads() == Extent::AllSharesOfRoot && self.root() != Some(rank))
    }

    /// Returns whether `rank` has an output, possibly an empty one. In some collectives only the root has one.
    #[cfg(feature = "cuda")]
    pub(crate) fn uses_output(&self, rank: usize) -> bool {
        let is_of_root = matches!(self.kind().writes(), Extent::ShareOfRoot | Extent::AllSharesOfRoot);
        !(is_of_root && self.root() != Some(rank))
    }

    /// Returns the residual, norm and quantisation of a fused call.
    #[inline]
    pub(crate) const fn fused(&self) -> Option<&RawFused> {
        match *self {
            Self::AllReduceFused(fused)
            | Self::ReduceScatterFused(fused)
            | Self::ReduceScatterFusedV(fused, _) => Some(fused),
            _ => None,
        }
    }

    /// Returns the rows of an all-gather of rows.
    #[inline]
    pub(crate) const fn gathered(&self) -> Option<&RawGatheredRows> {
        match *self {
            Self::AllGatherRows(rows) | Self::AllGatherRowsV(rows, _) => Some(rows),
            _ => None,
        }
    }

    /// Returns the parts of the rows of a sharded norm.
    #[inline]
    pub(crate) const fn sharded(&self) -> Option<&[RawShardedRows]> {
        match *self {
            Self::ShardedRmsNorm(parts) => Some(parts),
            _ => None,
        }
    }

    /// Returns the address of the results. `given` is the output of the call.
    #[inline]
    pub(crate) const fn output(&self, given: u64) -> u64 {
        match self.fused() {
            Some(fused) => fused.output(),
            None => given,
        }
    }

    /// Returns the transport of an allreduce with quantised transport.
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
