//! All ranks in one cooperative launch: all collectives, then every direct algorithm, type and operation; staged,
//! registered and in place; against the reference of `bench`.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::probes::{Probes, STAMPS};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks, HOT_WORLDS};
use fast_allreduce::{Algorithm, Collective, DType, ReduceOp};

use super::budget::Budget;
use super::calls::{compare, download, grid, make_inputs};
use super::collectives;
use super::probe::{context, synchronize, wait_limit};
use super::record::{answer, check, out_of_time};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::elements::elements;
use crate::harness::memory::Lines;

/// Bytes of a launch: the largest count below needs several.
const LAUNCH_BYTES: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(5);
/// Near the wrap-around, so that the launches pass it.
const EPOCH: u32 = u32::MAX - 1000;
/// Pairs of offset and count. Odd ones, so that neither the start nor the end is on a pack's boundary.
const SHAPES: [(usize, usize); 8] =
    [(0, 1), (1, 1), (0, 7), (3, 64), (0, 1000), (1, 4099), (0, 16384), (5, 40_001)];
const SMALL_SHAPES: [(usize, usize); 3] = [(0, 1), (1, 100), (3, 1001)];
/// Elements after the largest shape that no launch may write.
const MARGIN: usize = 64;

/// The cases that are checked in a world.
#[derive(Clone, Copy)]
struct Cases<'a> {
    dtypes: &'a [DType],
    ops: &'a [ReduceOp],
    shapes: &'a [(usize, usize)],
}

pub fn run(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let worlds: &[usize] = if options.small { &[2, 3] } else { &[2, 3, 4, 5, 6, 7, 8, 16] };
    let tried = match options.small {
        true => Cases {
            dtypes: &[DType::F16, DType::F32, DType::I8],
            ops: &[ReduceOp::Sum, ReduceOp::Max],
            shapes: &SMALL_SHAPES,
        },
        false => Cases { dtypes: &DType::ALL, ops: &ReduceOp::ARITHMETIC, shapes: &SHAPES },
    };
    let (_context, timeout) = (context(options.gpu)?, wait_limit(options.gpu, TIMEOUT)?);
    for (index, &world_size) in worlds.iter().enumerate() {
        let mut cases = 0;
        let world = CooperativeRanks::new(options.gpu, world_size, LAUNCH_BYTES, EPOCH, timeout);
        let outcome = world
            .map_err(Failure::from)
            .and_then(|mut world| collectives::check(&mut world, options.small, budget, &mut cases))
            .and_then(|()| check_world(options, world_size, tried, budget, &mut cases));
        check(format!("world of {world_size}"), cases, outcome)?;
        if budget.is_spent() {
            let later = &worlds[index + 1..];
            return out_of_time(format!("after {cases} cases of the world of {world_size}, and {later:?}"));
        }
    }
    Ok(())
}

/// Runs the step `hot`: every specialised kernel.
pub fn hot(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    /// Large enough that each message is one launch.
    const REGION_BYTES: usize = 2 << 20;
    // Whole packs in each slice, for all numbers of ranks.
    const SHAPES: [(usize, usize); 3] = [(0, 6720), (8, 13_440), (16, 26_880)];
    let shapes = if options.small { &SHAPES[..1] } else { &SHAPES[..] };
    let probes = Probes::worlds(&context(options.gpu)?)?;
    let timeout = wait_limit(options.gpu, TIMEOUT)?;
    let (mut all, mut is_right, mut is_whole) = (0, true, true);
    for &world_size in HOT_WORLDS {
        let mut cases = 0;
        let mut run = || {
            let mut world = CooperativeRanks::new(options.gpu, world_size, REGION_BYTES, EPOCH, timeout)?;
            for dtype in [DType::F16, DType::Bf16, DType::F32] {
                if budget.is_spent() {
                    return Ok(());
                }
                let mut buffers = Buffers::new(&world, dtype, ReduceOp::Sum, shapes)?;
                cases += buffers.check(&mut world, shapes, Some(&probes))?;
            }
            Ok(())
        };
        let outcome = run();
        (all, is_right) = (all + cases, is_right && outcome.is_ok());
        check(format!("hot kernels of {world_size} ranks"), cases, outcome)?;
        if budget.is_spent() {
            out_of_time(format!("after {cases} cases of {world_size} ranks"))?;
            is_whole = HOT_WORLDS.last() == Some(&world_size);
            break;
        }
    }
    answer(
        "Do the hot kernels pass in one cooperative launch, for each of their world sizes and three types?",
        match (is_right, is_whole) {
            (true, true) => format!("yes, {all} cases"),
            (true, false) => format!("as far as there was time, {all} cases"),
            (false, _) => "no".to_owned(),
        },
    )
}

/// Runs the step `cooperative`: whether worlds of every size run.
pub fn cooperative(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let tried = Cases { dtypes: &[DType::F32], ops: &[ReduceOp::Sum], shapes: &SMALL_SHAPES };
    let _context = context(options.gpu)?;
    let (mut passed, mut failed, mut cases) = (Vec::new(), Vec::new(), 0);
    for world_size in 2..=fast_allreduce::MAX_RANKS {
        if budget.is_spent() {
            out_of_time(format!("worlds from {world_size} ranks on"))?;
            break;
        }
        match check_world(options, world_size, tried, budget, &mut cases) {
            Ok(()) => passed.push(world_size),
            Err(failure) => {
                failed.push(world_size);
                check(format!("world of {world_size}"), 0, Err(failure))?;
            }
        }
    }
    let is_all = passed.len() == fast_allreduce::MAX_RANKS - 1;
    answer(
        "Does the world of one cooperative launch pass for 2 to 16 ranks?",
        match (is_all, failed.is_empty()) {
            (true, _) => format!("yes, {cases} cases"),
            (_, true) => format!("as far as there was time: {passed:?}"),
            _ => format!("no: not for {failed:?}; it does for {passed:?}"),
        },
    )?;
    match passed.is_empty() {
        true => Ok(()),
        false => check(format!("worlds of {passed:?}"), cases, Ok(())),
    }
}

fn check_world(
    options: &GpuCheck,
    world_size: usize,
    Cases { dtypes, ops, shapes }: Cases<'_>,
    budget: Budget,
    cases: &mut u64,
) -> Result<(), Failure> {
    let timeout = wait_limit(options.gpu, TIMEOUT)?;
    let mut world = CooperativeRanks::new(options.gpu, world_size, LAUNCH_BYTES, EPOCH, timeout)?;
    for &dtype in dtypes {
        for &op in ops {
            if budget.is_spent() {
                return Ok(());
            }
            *cases += Buffers::new(&world, dtype, op, shapes)?.check(&mut world, shapes, None)?;
        }
    }
    Ok(())
}

/// The buffers of all ranks, and the expected result. All are of bytes, and equally long.
struct Buffers {
    dtype: DType,
    op: ReduceOp,
    inputs: Vec<CudaSlice<u8>>,
    outputs: Vec<CudaSlice<u8>>,
    expected: Lines,
    poison: Lines,
    /// Written by the kernels that stamp their phases.
    stamps: CudaSlice<u64>,
}

impl Buffers {
    fn new(
        world: &CooperativeRanks,
        dtype: DType,
        op: ReduceOp,
        shapes: &[(usize, usize)],
    ) -> Result<Self, Failure> {
        let length = shapes.iter().map(|(offset, count)| offset + count).max().unwrap_or(0) + MARGIN;
        let (bytes, by_rank) = make_inputs(dtype, length, world.world_size(), op)?;
        let (mut expected, poison) = (Lines::new(bytes)?, Lines::new(bytes)?);
        let inputs: Vec<&[u8]> = by_rank.iter().map(|memory| &**memory).collect();
        if !elements(dtype)?.reduce(op, &inputs, &mut expected) {
            return Err(Failure::Usage(format!("the reference of {dtype} {op} is not plausible")));
        }
        let stream = world.stream();
        let upload = |memory: &Lines| stream.clone_htod(&memory[..]).map_err(driver("cuMemcpyHtoDAsync"));
        let stamps = (STAMPS.len() + 1) * world.world_size() * world.max_blocks();
        Ok(Self {
            dtype,
            op,
            inputs: by_rank.iter().map(upload).collect::<Result<_, _>>()?,
            outputs: by_rank.iter().map(|_| upload(&poison)).collect::<Result<_, _>>()?,
            expected,
            poison,
            stamps: stream.alloc_zeros(stamps).map_err(driver("cuMemAlloc"))?,
        })
    }

    /// Checks every algorithm and shape, out of place and in place, staged and registered; returns the number of cases.
    fn check(
        &mut self,
        world: &mut CooperativeRanks,
        shapes: &[(usize, usize)],
        probes: Option<&Probes>,
    ) -> Result<u64, Failure> {
        let mut cases = 0;
        for algorithm in Algorithm::DIRECT {
            for (in_place, registered) in [(false, false), (false, true), (true, false), (true, true)] {
                let is_pull = matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull);
                if registered && !is_pull {
                    continue; // Pushes read no registered inputs.
                }
                for &shape in shapes {
                    let (blocks, threads) = grid(world, shape.1 * self.dtype.size());
                    let plan = CooperativePlan { algorithm, blocks, threads, registered };
                    self.check_shape(world, plan, in_place, shape, probes)?;
                    cases += 1;
                }
            }
        }
        Ok(cases)
    }

    fn check_shape(
        &mut self,
        world: &mut CooperativeRanks,
        plan: CooperativePlan,
        in_place: bool,
        (offset, count): (usize, usize),
        probes: Option<&Probes>,
    ) -> Result<(), Failure> {
        let stream = Arc::clone(world.stream());
        for (input, output) in self.inputs.iter().zip(&mut self.outputs) {
            match in_place {
                true => stream.memcpy_dtod(input, output).map_err(driver("cuMemcpyDtoDAsync"))?,
                false => stream.memcpy_htod(&self.poison[..], output).map_err(driver("cuMemcpyHtoDAsync"))?,
            }
        }
        // The world copies on another stream.
        synchronize(&stream)?;
        let (dtype, size) = (self.dtype, self.dtype.size());
        let name = format!("{count} {dtype} from {offset}, {}, in place: {in_place}, {plan:?}", self.op);
        let start = (offset * size) as u64;
        let of_rank = |rank: usize| {
            let input = if in_place { &self.outputs[rank] } else { &self.inputs[rank] };
            CooperativeRank {
                collective: Collective::AllReduce(self.op),
                input: input.device_ptr(&stream).0 + start,
                output: self.outputs[rank].device_ptr(&stream).0 + start,
            }
        };
        let ranks: Vec<_> = (0..world.world_size()).map(of_rank).collect();
        let failed = |error| Failure::Ranks(format!("{name}: {error}"));
        // SAFETY: the slices hold every shape, and live until the call has been waited for.
        let mut call = unsafe { world.prepare_raw(&ranks, count, dtype, plan) }.map_err(failed)?;
        if let Some(probes) = probes {
            let sums = self.stamps.device_ptr(&stream).0;
            // SAFETY: the module and the words outlive the call, which is waited for.
            call = unsafe { call.repeated(probes, 1, sums) }.map_err(failed)?;
        }
        call.enqueue().and_then(|()| call.finish()).map_err(failed)?;
        drop(call);
        let reduced = offset * size..(offset + count) * size;
        for (rank, output) in self.outputs.iter().enumerate() {
            let mut expected = match in_place {
                true => download(world, &self.inputs[rank])?,
                false => self.poison.to_vec(),
            };
            expected[reduced.clone()].copy_from_slice(&self.expected[reduced.clone()]);
            compare(world, output, &expected, size, &format!("{name}, on rank {rank}"))?;
        }
        Ok(())
    }
}
