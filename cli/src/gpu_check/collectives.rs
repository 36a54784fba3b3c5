//! The other collectives in one cooperative launch, and allreduces by the algorithms that partial sums travel in.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr, DeviceSlice};
use fast_allreduce::device::cuda::{CudaWorld, WorldPlan, WorldRank};
use fast_allreduce::{Algorithm, Collective, DType, ReduceOp};

use super::steps::Budget;
use crate::failure::{driver, Failure};
use crate::harness::elements::{elements, Elements};
use crate::harness::inputs::Inputs;
use crate::harness::memory::{bits, Lines, POISON};

/// A type of each size.
const TYPES: [DType; 4] = [DType::I32, DType::U8, DType::F16, DType::F64];
/// Elements of a share. The last takes several launches, and is broadcast in two steps.
const COUNTS: [usize; 3] = [1, 1001, 40_001];
/// Of many ranks, whose shares are more to compare.
const MANY_COUNTS: [usize; 3] = [1, 1001, 9001];
const SMALL_COUNTS: [usize; 2] = [1, 1001];
const OP: ReduceOp = ReduceOp::Sum;

/// Every collective, for each type and count, staged and registered. Counts the cases.
pub fn check(world: &mut CudaWorld, small: bool, budget: Budget, cases: &mut u64) -> Result<(), Failure> {
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

/// What the ranks count differently by: shares of other sizes, none among them.
struct Counts {
    shares: Vec<usize>,
    /// By sending, then by receiving rank; as many the other way.
    pairs: Vec<Vec<usize>>,
}

impl Counts {
    fn new(world_size: usize, count: usize) -> Self {
        let part = |number: usize| number % 3 * count / 2;
        let pairs = |from: usize| (0..world_size).map(|to| part(from + to)).collect();
        Self { shares: (0..world_size).map(part).collect(), pairs: (0..world_size).map(pairs).collect() }
    }

    /// All collectives as `rank` makes them.
    fn collectives(&self, rank: usize) -> [Collective<'_>; 12] {
        let root = self.shares.len() / 2;
        [
            Collective::AllReduce(OP),
            Collective::AllGather,
            Collective::AllGatherV(&self.shares),
            Collective::ReduceScatter(OP),
            Collective::ReduceScatterV(OP, &self.shares),
            Collective::Broadcast { root },
            Collective::Reduce { op: OP, root },
            Collective::Gather { root },
            Collective::Scatter { root },
            Collective::AllToAll,
            Collective::AllToAllV { send: &self.pairs[rank], receive: &self.pairs[rank] },
            Collective::Barrier,
        ]
    }
}

fn of_type(world: &mut CudaWorld, dtype: DType, count: usize) -> Result<u64, Failure> {
    let world_size = world.world_size();
    let counts = Counts::new(world_size, count);
    let numbers = Inputs::new(0x5eed, count as u64, world_size, OP);
    let elements = elements(dtype)?;
    let of_rank = |rank| {
        let mut memory = Lines::new(count * world_size * dtype.size())?;
        elements.fill(&numbers, rank, &mut memory);
        Ok(memory)
    };
    let by_rank = (0..world_size).map(of_rank).collect::<Result<Vec<_>, Failure>>()?;
    let of_type = OfType { dtype, elements, count, by_rank, counts: &counts };
    let mut cases = 0;
    for number in 0..counts.collectives(0).len() {
        let collectives: Vec<_> = (0..world_size).map(|rank| counts.collectives(rank)[number]).collect();
        let is_allreduce = matches!(collectives[0], Collective::AllReduce(_));
        // Sums of integers do not depend on their order.
        let algorithms = match is_allreduce && matches!(dtype, DType::I32 | DType::U8) {
            true => &Algorithm::ALL[..],
            false => &[Algorithm::OneShotPull],
        };
        for &algorithm in algorithms {
            for registered in [false, true] {
                let (blocks, threads) = grid(world, count * dtype.size());
                let plan = WorldPlan { algorithm, blocks, threads, registered };
                of_type.case(world, &collectives, plan)?;
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
    count: usize,
    /// All that a rank may read.
    by_rank: Vec<Lines>,
    counts: &'a Counts,
}

impl OfType<'_> {
    /// Where these elements are.
    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        elements.start * self.dtype.size()..elements.end * self.dtype.size()
    }

    /// What `rank` has in the end, from all ranks' inputs.
    fn expected(
        &self,
        collective: &Collective<'_>,
        rank: usize,
        inputs: &[&[u8]],
    ) -> Result<Vec<u8>, Failure> {
        let reduced = |indices: Range<usize>| {
            let range = self.bytes(indices);
            let inputs: Vec<_> = inputs.iter().map(|input| &input[range.clone()]).collect();
            let mut result = Lines::new(range.len())?;
            self.elements.reduce(OP, &inputs, &mut result);
            Ok::<_, Failure>(result.to_vec())
        };
        let elements = rank * self.count..(rank + 1) * self.count;
        let own = self.bytes(elements.clone());
        Ok(match *collective {
            Collective::AllReduce(_) => reduced(0..self.count)?,
            Collective::Reduce { root, .. } if root == rank => reduced(0..self.count)?,
            Collective::AllGather | Collective::AllGatherV(_) => inputs.concat(),
            Collective::Gather { root } if root == rank => inputs.concat(),
            Collective::ReduceScatter(_) => reduced(elements)?,
            Collective::ReduceScatterV(_, shares) => {
                let first = shares[..rank].iter().sum();
                reduced(first..first + shares[rank])?
            }
            Collective::Broadcast { root } => inputs[root].to_vec(),
            Collective::Scatter { root } => inputs[root][own].to_vec(),
            Collective::AllToAll => inputs.iter().flat_map(|input| input[own.clone()].to_vec()).collect(),
            Collective::AllToAllV { .. } => {
                let share = |(from, input): (usize, &&[u8])| {
                    let first = self.counts.pairs[from][..rank].iter().sum::<usize>();
                    input[self.bytes(first..first + self.counts.pairs[from][rank])].to_vec()
                };
                inputs.iter().enumerate().flat_map(share).collect()
            }
            _ => Vec::new(),
        })
    }

    fn case(
        &self,
        world: &mut CudaWorld,
        collectives: &[Collective<'_>],
        plan: WorldPlan,
    ) -> Result<(), Failure> {
        // Before and behind every output, elements.
        const MARGIN: usize = 64;
        let (dtype, count, size) = (self.dtype, self.count, self.dtype.size());
        let (world_size, stream) = (world.world_size(), Arc::clone(world.stream()));
        let inputs: Vec<&[u8]> = (0..world_size)
            .map(|rank| {
                let length = collectives[rank].input_len(count, rank, world_size);
                &self.by_rank[rank][self.bytes(0..length)]
            })
            .collect();
        let name = || format!("{} of {count} {dtype}, {plan:?}", collectives[0].name());
        // One more, as nothing is no slice.
        let upload = |input: &[u8]| {
            stream.clone_htod(&[input, &[POISON]].concat()).map_err(driver("cuMemcpyHtoDAsync"))
        };
        let from = inputs.iter().map(|input| upload(input)).collect::<Result<Vec<CudaSlice<u8>>, _>>()?;
        let room = |rank: usize| (collectives[rank].output_len(count, rank, world_size) + 2 * MARGIN) * size;
        let to = (0..world_size)
            .map(|rank| upload(&vec![POISON; room(rank) - 1]))
            .collect::<Result<Vec<_>, _>>()?;
        let of_rank = |rank: usize| WorldRank {
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
            let right = self.expected(&collectives[rank], rank, &inputs)?;
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

pub fn download(world: &CudaWorld, slice: &CudaSlice<u8>) -> Result<Vec<u8>, Failure> {
    let stream = world.stream();
    let mut bytes = vec![0; DeviceSlice::len(slice)];
    stream.memcpy_dtoh(slice, &mut bytes).map_err(driver("cuMemcpyDtoHAsync"))?;
    stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
    Ok(bytes)
}

/// Blocks and threads for a message: few for a small one, and never a round number of blocks for a large one.
pub fn grid(world: &CudaWorld, bytes: usize) -> (usize, usize) {
    const BYTES_PER_BLOCK: usize = 8 << 10;
    let blocks = bytes.div_ceil(BYTES_PER_BLOCK).clamp(1, world.max_blocks());
    (blocks, if bytes < 2048 { 64 } else { 512 })
}
