//! When the switch between the GPUs adds up.

use super::choice::Choice;
use super::thresholds::{NVLS_ABOVE_BYTES, NVLS_BLOCKS, NVLS_LEAST_RANKS, NVLS_THREADS};
use super::{Algorithm, Order};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;

/// What a world whose windows are shared by multicast does by its switch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nvls {
    /// Nothing: there are no windows, or an algorithm is forced that has no use for them.
    Never,
    /// Every call that it can do, by this algorithm.
    Always(Algorithm),
    /// What is larger than so many bytes, by the two-shot: all ranks have the same bits.
    Above(u64),
}

impl Nvls {
    /// Whether there are instructions for it.
    pub const fn can_reduce(dtype: DType, op: ReduceOp) -> bool {
        matches!(op, ReduceOp::Sum) && dtype.is_hot()
    }

    /// How a call of so many bytes is done by the switch, if it is.
    #[inline]
    pub fn choice(self, dtype: DType, op: ReduceOp, bytes: usize) -> Option<Choice> {
        let algorithm = match self {
            Self::Never => return None,
            Self::Always(algorithm) => algorithm,
            Self::Above(most) => (bytes as u64 > most).then_some(Algorithm::TwoShotNvls)?,
        };
        Self::can_reduce(dtype, op).then_some(Choice::cuda(algorithm, NVLS_BLOCKS, NVLS_THREADS))
    }

    /// What a world of so many ranks wants.
    pub const fn wanted(forced: Option<Algorithm>, order: Order, world_size: usize) -> Self {
        match (forced, order, world_size) {
            // One rank has nothing to add up.
            (_, _, 0..=1) => Self::Never,
            (Some(algorithm), _, _) if algorithm.is_nvls() => Self::Always(algorithm),
            (Some(_), _, _) | (None, Order::Fixed, _) => Self::Never,
            (None, Order::Any, 0..NVLS_LEAST_RANKS) => Self::Never,
            (None, Order::Any, NVLS_LEAST_RANKS..) => Self::Above(NVLS_ABOVE_BYTES),
        }
    }
}
