//! When in-switch reductions (NVLS) are used.

use super::choice::Choice;
use super::thresholds::{NVLS_ABOVE_BYTES, NVLS_BLOCKS, NVLS_LEAST_RANKS, NVLS_THREADS};
use super::{Algorithm, Order};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;

/// Calls of a world that are in-switch reductions. They need windows that are bound to a multicast object.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nvls {
    /// No call: there are no windows, or another algorithm is forced.
    Never,
    /// Every call that the switch can reduce, by this algorithm.
    Always(Algorithm),
    /// Calls of more than this number of bytes, by the two-shot, which gives all ranks the same bits.
    Above(u64),
}

impl Nvls {
    /// Returns whether GPUs have multicast reduction instructions for the type and operation.
    pub const fn can_reduce(dtype: DType, op: ReduceOp) -> bool {
        matches!(op, ReduceOp::Sum) && dtype.is_hot()
    }

    /// Returns the choice for a call of `bytes` bytes; `None` if it is not an in-switch reduction.
    #[inline]
    pub fn choice(self, dtype: DType, op: ReduceOp, bytes: usize) -> Option<Choice> {
        let algorithm = match self {
            Self::Never => return None,
            Self::Always(algorithm) => algorithm,
            Self::Above(most) => (bytes as u64 > most).then_some(Algorithm::TwoShotNvls)?,
        };
        Self::can_reduce(dtype, op).then_some(Choice::cuda(algorithm, NVLS_BLOCKS, NVLS_THREADS))
    }

    /// Returns which calls should be in-switch reductions under these settings.
    pub const fn wanted(forced: Option<Algorithm>, order: Order, world_size: usize) -> Self {
        match (forced, order, world_size) {
            // One rank has nothing to reduce.
            (_, _, 0..=1) => Self::Never,
            (Some(algorithm), _, _) if algorithm.is_nvls() => Self::Always(algorithm),
            (Some(_), _, _) | (None, Order::Fixed, _) => Self::Never,
            (None, Order::Any, 0..NVLS_LEAST_RANKS) => Self::Never,
            (None, Order::Any, NVLS_LEAST_RANKS..) => Self::Above(NVLS_ABOVE_BYTES),
        }
    }
}
