//! The other collectives in one cooperative launch, and allreduces by the algorithms that partial sums travel in.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr, DeviceSlice};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, CallKind, Collective, DType, ReduceOp};

use super::steps::Budget;
use crate::failure::{driver, Failure};
use crate::harness::elements::{elements, Elements};
use crate::harness::inputs::Inputs;
use crate::harness::memory::{bits, Lines, POISON};
use crate::harness::work::{Part, Source, Work};

/// A type of each size.
const TYPES: [DType; 4] = [DType::I32, DType::U8, DType::F16, DType::F64];
/// Elements of a share. The last takes several launches, and is broadcast in two steps.
const COUNTS: [usize; 3] = [1, 1001, 40_001];
/// Of many ranks, whose shares are more to compare.
const MANY_COUNTS: [usize; 3] = [1, 1001, 9001];
const SMALL_COUNTS: [usize; 2] = [1, 1001];
const OP: ReduceOp = ReduceOp::Sum;

/// Every collective, for each type and count, staged and registered. Counts the cases.
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
            *cases += of_type(world, dtype, count)?;
        }
    }
    Ok(())
}

fn of_type(world: &mut CooperativeRanks, dtype: DType, count: usize) -> Result<u64, Failure> {
    let world_size = world.world_size();
    let numbers = Inputs::new(0x5eed, count as u64, world_size, OP);
    let elements = elements(dtype)?;
    let of_rank = |rank| {
        let mut memory = Lines::new(count * world_size * dtype.size())?;
        elements.fill(&numbers, rank, &mut memory);
        Ok(memory)
    };
    let by_rank = (0..world_size).map(of_rank).collect::<Result<Vec<_>, Failure>>()?;
    let of_type = OfType { dtype, elements, by_rank };
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
                of_type.case(world, &works, &collectives, plan)?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

/// A type's and a count's cases.
struct OfType<'a> {
    dtype: DType,
    elements: &'a dyn Elements,
    /// All that a rank may read.
    by_rank: Vec<Lines>,
}

impl OfType<'_> {
    /// Where these elements are.
    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        elements.start * self.dtype.size()..elements.end * self.dtype.size()
    }

    /// What a rank has in the end, from all ranks' inputs.
    fn expected(&self, work: &Work, inputs: &[&[u8]]) -> Result<Vec<u8>, Failure> {
        let mut expected = Vec::new();
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
        Ok(expected)
    }

    fn case(
        &self,
        world: &mut CooperativeRanks,
        works: &[Work],
        collectives: &[Collective<'_>],
        plan: CooperativePlan,
    ) -> Result<(), Failure> {
        // Before and behind every output, elements.
        const MARGIN: usize = 64;
        let (dtype, count, size) = (self.dtype, works[0].shares[0], self.dtype.size());
        let (world_size, stream) = (world.world_size(), Arc::clone(world.stream()));
        let inputs: Vec<&[u8]> =
            (0..world_size).map(|rank| &self.by_rank[rank][self.bytes(0..works[rank].input_len())]).collect();
        let name = || format!("{} of {count} {dtype}, {plan:?}", collectives[0].name());
        // One more, as nothing is no slice.
        let upload = |input: &[u8]| {
            stream.clone_htod(&[input, &[POISON]].concat()).map_err(driver("cuMemcpyHtoDAsync"))
        };
        let from = inputs.iter().map(|input| upload(input)).collect::<Result<Vec<CudaSlice<u8>>, _>>()?;
        let room = |rank: usize| (works[rank].output_len() + 2 * MARGIN) * size;
        let to = (0..world_size)
            .map(|rank| upload(&vec![POISON; room(rank) - 1]))
            .collect::<Result<Vec<_>, _>>()?;
        let of_rank = |rank: usize| CooperativeRank {
            collective: collectives[rank],
            input: from[rank].device_ptr(&stream).0,
            output: to[rank].device_ptr(&stream).0 + (MARGIN * size) as u64,
        };
        let ranks: Vec<_> = (0..world_size).map(of_rank).collect();
        // The world copies on a stream of its own.
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let told = |error| Failure::Ranks(format!("{}: {error}", name()));
        // SAFETY: the slices are as long as the collective needs, and live until the call has been waited for.
        let mut call = unsafe { world.prepare_raw(&ranks, count, dtype, plan) }.map_err(told)?;
        call.enqueue().and_then(|()| call.finish()).map_err(told)?;
        drop(call);
        for (rank, output) in to.iter().enumerate() {
            let right = self.expected(&works[rank], &inputs)?;
            let margin = vec![POISON; MARGIN * size];
            let right = [&margin[..], &right, &margin[..]].concat();
            let is = download(world, output)?;
            let mut pairs = is.chunks(size).zip(right.chunks(size)).enumerate();
            if let Some((index, (is, right))) = pairs.find(|(_, (is, right))| is != right) {
                return Err(Failure::Ranks(format!(
                    "{}: element {} on rank {rank} is {:#x} instead of {:#x}",
                    name(),
                    index as isize - MARGIN as isize,
                    bits(is),
                    bits(right),
                )));
            }
        }
        Ok(())
    }
}

pub fn download(world: &CooperativeRanks, slice: &CudaSlice<u8>) -> Result<Vec<u8>, Failure> {
    let stream = world.stream();
    let mut bytes = vec![0; DeviceSlice::len(slice)];
    stream.memcpy_dtoh(slice, &mut bytes).map_err(driver("cuMemcpyDtoHAsync"))?;
    stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
    Ok(bytes)
}

/// Blocks and threads for a message: few for a small one, and never a round number of blocks for a large one.
pub fn grid(world: &CooperativeRanks, bytes: usize) -> (usize, usize) {
    const BYTES_PER_BLOCK: usize = 8 << 10;
    let blocks = bytes.div_ceil(BYTES_PER_BLOCK).clamp(1, world.max_blocks());
    (blocks, if bytes < 2048 { 64 } else { 512 })
}
