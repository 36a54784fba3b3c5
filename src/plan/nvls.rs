//! When the switch between the GPUs adds up.

use super::choice::Choice;
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
    /// 16384 threads with a request of 16 bytes each. With more under way others have measured less.
    const BLOCKS: u32 = 32;
    const THREADS: u32 = 512;

    /// Whether there are instructions for it.
    pub const fn can_reduce(dtype: DType, op: ReduceOp) -> bool {
        matches!(op, ReduceOp::Sum) && matches!(dtype, DType::F16 | DType::Bf16 | DType::F32)
    }

    /// How a call of so many bytes is done by the switch, if it is.
    #[inline]
    pub fn choice(self, dtype: DType, op: ReduceOp, bytes: usize) -> Option<Choice> {
        let algorithm = match self {
            Self::Never => return None,
            Self::Always(algorithm) => algorithm,
            Self::Above(most) => (bytes as u64 > most).then_some(Algorithm::TwoShotNvls)?,
        };
        Self::can_reduce(dtype, op).then_some(Choice::cuda(algorithm, Self::BLOCKS, Self::THREADS))
    }

    /// What a world of so many ranks wants.
    pub const fn wanted(forced: Option<Algorithm>, order: Order, world_size: usize) -> Self {
        match (forced, order, world_size) {
            // One rank has nothing to add up.
            (_, _, 0..=1) => Self::Never,
            (Some(algorithm), _, _) if algorithm.is_nvls() => Self::Always(algorithm),
            (Some(_), _, _) | (None, Order::Fixed, _) => Self::Never,
            (None, Order::Any, _) => Self::above(world_size),
        }
    }

    /// Where the switch is not expected to be slower. Nobody has measured it; docs/gpu-model.md has what the PTX machine's clock predicts:
    /// up to 8 MiB packets are faster, as windows cost two copies. Up to 4 ranks the switch is slower beyond that too.
    const fn above(world_size: usize) -> Self {
        match world_size {
            0..=4 => Self::Never,
            _ => Self::Above(8 << 20),
        }
    }
}
