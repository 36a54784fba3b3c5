//! The order in which an allreduce algorithm combines the ranks' elements, and the results of that order.

use fast_allreduce::{Algorithm, DType, Plan, ReduceOp, MAX_RANKS};

use crate::oracle::{bits, multiplied, reduce_element};

/// The orders, from the documentation of [`Algorithm`] and the opening comments of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// In rank order, with one rounding to the type at the end: the direct algorithms.
    Ranks,
    /// Ring: slice s starts at rank s and is rounded to the type at each rank. `piece` and `pack` are numbers of
    /// elements.
    Ring { piece: usize, pack: usize },
    /// Ranks beyond a power of two fold in; then halves combine with halves, lower rank first, rounding each time.
    Halving,
    /// Two levels: the ranks of each socket, rounded to the type, then the sockets. `each` is the number of ranks of a
    /// socket.
    Sockets { each: usize },
}

impl Order {
    /// Returns the order of a call as planned. Averages of integers are not sums of elements, so a direct algorithm
    /// computes them.
    pub fn of(plan: &Plan, (dtype, op): (DType, ReduceOp), pack_bytes: usize) -> Self {
        let (piece, pack) = (plan.piece_bytes / dtype.size(), pack_bytes / dtype.size());
        match plan.algorithm {
            _ if op == ReduceOp::Avg && !dtype.is_float() => Self::Ranks,
            Algorithm::Ring => Self::Ring { piece, pack },
            Algorithm::HalvingDoubling => Self::Halving,
            _ => Self::Ranks,
        }
    }

    /// Returns the result for the ranks' inputs in this order.
    pub fn reduce(self, dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
        let (op, inputs) = &multiplied(dtype, op, inputs);
        let op = *op;
        let (size, ranks) = (dtype.size(), inputs.len());
        let count = inputs[0].len() / size;
        let partial = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let combine = |elements: &[u64], whole: bool| {
            reduce_element(dtype, if whole { op } else { partial }, elements, ranks)
        };
        let element = |at: usize| -> u64 {
            let input = |rank: usize| bits(&inputs[rank % ranks][at * size..][..size]);
            match self {
                Self::Ranks => combine(&(0..ranks).map(input).collect::<Vec<_>>(), true),
                Self::Ring { piece, pack } => {
                    let (first, within) = (at / piece * piece, at % piece);
                    let packs = piece.min(count - first).div_ceil(pack);
                    let holds = |slice: &usize| within / pack < packs * (slice + 1) / ranks;
                    let slice = (0..ranks).find(holds).expect("slices hold all packs");
                    let start = combine(&[input(slice)], ranks == 1);
                    (1..ranks)
                        .fold(start, |sum, step| combine(&[sum, input(slice + step)], step + 1 == ranks))
                }
                Self::Sockets { each } => {
                    let inputs: Vec<_> = (0..ranks).map(input).collect();
                    let sums: Vec<_> = inputs.chunks(each).map(|socket| combine(socket, false)).collect();
                    combine(&sums, true)
                }
                Self::Halving => {
                    let mut sums: [u64; MAX_RANKS] = std::array::from_fn(input);
                    // Down to the largest power of two, then each half of it.
                    let mut paired = if ranks.is_power_of_two() { ranks / 2 } else { 1 << ranks.ilog2() };
                    let mut left = ranks;
                    while paired > 0 {
                        for upper in paired..left {
                            let pair = [sums[upper - paired], sums[upper]];
                            sums[upper - paired] = combine(&pair, paired == 1);
                        }
                        (left, paired) = (paired, paired / 2);
                    }
                    if ranks == 1 {
                        combine(&sums[..1], true)
                    } else {
                        sums[0]
                    }
                }
            }
        };
        let mut output = Vec::with_capacity(count * size);
        (0..count).for_each(|at| output.extend_from_slice(&element(at).to_le_bytes()[..size]));
        output
    }
}
