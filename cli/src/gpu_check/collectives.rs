//! All collectives in one cooperative launch, and allreduces by the algorithms that are not direct.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, CallKind, Collective, DType, ReduceOp};

use super::budget::Budget;
use super::calls::{compare, grid, make_inputs};
use super::probe::synchronize;
use crate::failure::{driver, Failure};
use crate::harness::elements::{elements, Elements};
use crate::harness::memory::{Lines, POISON};
use crate::harness::work::{Part, Source, Work};

/// A type of each size.
const TYPES: [DType; 4] = [DType::I32, DType::U8, DType::F16, DType::F64];
/// Elements of a share. The last takes several launches, and is broadcast in two steps.
const COUNTS: [usize; 3] = [1, 1001, 40_001];
/// Elements of a share with many ranks, where there is more to compare.
const MANY_COUNTS: [usize; 3] = [1, 1001, 9001];
const SMALL_COUNTS: [usize; 2] = [1, 1001];
const OP: ReduceOp = ReduceOp::Sum;
/// Elements before and after every output that no launch may write.
const MARGIN: usize = 64;

/// Checks every collective, for each type and count, staged and registered; counts the cases.
pub fn check(
    world: &mut CooperativeRanks,
    small: bool,
    budget: Budget,
    cases: &mut u64,
) -> Result<(), Failure> {
    let counts: &[usize] = match world.world_size() {
        _ if small => &SMALL_COUNTS,
        ..=4 => &COUNTS,
        _ => &MANY_COUNTS,
    };
    for dtype in TYPES {
        for &count in counts {
            if budget.is_spent() {
                return Ok(());
            }
            *cases += check_type(world, dtype, count)?;
        }
    }
    Ok(())
}

fn check_type(world: &mut CooperativeRanks, dtype: DType, count: usize) -> Result<u64, Failure> {
    let world_size = world.world_size();
    let (_, by_rank) = make_inputs(dtype, count * world_size, world_size, OP)?;
    let inputs = InputsOfType { dtype, elements: elements(dtype)?, by_rank };
    let mut cases = 0;
    for &kind in CallKind::ALL {
        let most = if kind.is_whole() { count } else { count * world_size };
        let of_rank = |rank| Work::new(kind, dtype, OP, world_size / 2, most, rank, world_size);
        let works: Vec<_> = (0..world_size).map(of_rank).collect();
        let collectives: Vec<_> = works.iter().filter_map(Work::collective).collect();
        if collectives.is_empty() {
            continue;
        }
        // Sums of integers do not depend on their order.
        let algorithms = match kind == CallKind::AllReduce && matches!(dtype, DType::I32 | DType::U8) {
            true => &Algorithm::ALL[..],
            false => &[Algorithm::OneShotPull],
        };
        for &algorithm in algorithms {
            for registered in [false, true] {
                let (blocks, threads) = grid(world, count * dtype.size());
                let plan = CooperativePlan { algorithm, blocks, threads, registered };
                inputs.check(world, &works, &collectives, plan)?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

/// The inputs of a type and count.
struct InputsOfType {
    dtype: DType,
    elements: &'static dyn Elements,
    /// The longest input of any collective.
    by_rank: Vec<Lines>,
}

impl InputsOfType {
    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        elements.start * self.dtype.size()..elements.end * self.dtype.size()
    }

    /// Computes a rank's output buffer, margins included, from all ranks' inputs.
    fn expected(&self, work: &Work, inputs: &[&[u8]]) -> Result<Vec<u8>, Failure> {
        let margin = [POISON].repeat(MARGIN * self.dtype.size());
        let mut expected = margin.clone();
        for Part { length, source } in work.parts() {
            match source {
                Source::Copied { rank, first } => {
                    expected.extend_from_slice(&inputs[rank][self.bytes(first..first + length)]);
                }
                Source::Reduced { first } => {
                    let range = self.bytes(first..first + length);
                    let inputs: Vec<_> = inputs.iter().map(|input| &input[range.clone()]).collect();
                    let mut result = Lines::new(range.len())?;
                    self.elements.reduce(OP, &inputs, &mut result);
                    expected.extend_from_slice(&result);
                }
            }
        }
        Ok([expected, margin].concat())
    }

    fn check(
        &self,
        world: &mut CooperativeRanks,
        works: &[Work],
        collectives: &[Collective<'_>],
        plan: CooperativePlan,
    ) -> Result<(), Failure> {
        let (dtype, count, size) = (self.dtype, works[0].shares[0], self.dtype.size());
        let stream = Arc::clone(world.stream());
        let ranks = 0..world.world_size();
        let input = |rank: usize| &self.by_rank[rank][self.bytes(0..works[rank].input_len())];
        let inputs: Vec<&[u8]> = ranks.clone().map(input).collect();
        // One byte more: a slice cannot be empty.
        let upload = |input: &[u8]| {
            stream.clone_htod(&[input, &[POISON]].concat()).map_err(driver("cuMemcpyHtoDAsync"))
        };
        let from = inputs.iter().map(|input| upload(input)).collect::<Result<Vec<CudaSlice<u8>>, _>>()?;
        let room = |rank: usize| (works[rank].output_len() + 2 * MARGIN) * size;
        let output = |rank| upload(&vec![POISON; room(rank) - 1]);
        let to = ranks.clone().map(output).collect::<Result<Vec<_>, _>>()?;
        let of_rank = |rank: usize| CooperativeRank {
            collective: collectives[rank],
            input: from[rank].device_ptr(&stream).0,
            output: to[rank].device_ptr(&stream).0 + (MARGIN * size) as u64,
        };
        let calls: Vec<_> = ranks.map(of_rank).collect();
        // The world copies on another stream.
        synchronize(&stream)?;
        let name = format!("{} of {count} {dtype}, {plan:?}", collectives[0].name());
        let failed = |error| Failure::Ranks(format!("{name}: {error}"));
        // SAFETY: the slices are as long as the collective needs, and live until the call has been waited for.
        let mut call = unsafe { world.prepare_raw(&calls, count, dtype, plan) }.map_err(failed)?;
        call.enqueue().and_then(|()| call.finish()).map_err(failed)?;
        drop(call);
        for (rank, output) in to.iter().enumerate() {
            let expected = self.expected(&works[rank], &inputs)?;
            compare(world, output, &expected, size, &format!("{name}, on rank {rank}"))?;
        }
        Ok(())
    }
}
