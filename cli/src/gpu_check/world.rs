//! All ranks in one cooperative launch: the other collectives, then every direct algorithm, type and operation, staged,
//! registered and in place, against the reference of `bench`.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::probes::{Probes, STAMPS};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, Collective, DType, ReduceOp};

use super::collectives::{self, download, grid};
use super::record::Record;
use super::steps::Budget;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::elements::elements;
use crate::harness::inputs::Inputs;
use crate::harness::memory::{bits, Lines};

/// What a launch takes through the regions: the largest count below needs several.
const LAUNCH_BYTES: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(5);
/// The numbers of the launches pass their end.
const EPOCH: u32 = u32::MAX - 1000;
/// In `(offset, count)`; odd ones, so that neither the start nor the end is on a pack's boundary.
const SHAPES: [(usize, usize); 8] =
    [(0, 1), (1, 1), (0, 7), (3, 64), (0, 1000), (1, 4099), (0, 16384), (5, 40_001)];
const SMALL_SHAPES: [(usize, usize); 3] = [(0, 1), (1, 100), (3, 1001)];
/// Elements beyond the largest shape, which no launch may touch.
const MARGIN: usize = 64;

/// What is tried in a world.
#[derive(Clone, Copy)]
struct Cases<'a> {
    dtypes: &'a [DType],
    ops: &'a [ReduceOp],
    shapes: &'a [(usize, usize)],
}

/// Writes a check for each world.
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
    for (index, &world_size) in worlds.iter().enumerate() {
        let mut cases = 0;
        let outcome = check_collectives(options, world_size, budget, &mut cases)
            .and_then(|()| check_world(options, world_size, tried, budget, &mut cases));
        Record::check(format!("world of {world_size}"), cases, outcome).write()?;
        if budget.is_spent() {
            let left = format!(
                "what came after {cases} cases of the world of {world_size}, and {:?}",
                &worlds[index + 1..]
            );
            Record::skipped(left, "the step's time was over").write()?;
            break;
        }
    }
    Ok(())
}

/// The step `hot`: the specialised kernels, of all that they are made for.
pub fn hot(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    const QUESTION: &str =
        "Do the hot kernels pass in one cooperative launch, of 2 to 8 ranks and three types?";
    /// Room for each message in one launch.
    const REGION_BYTES: usize = 2 << 20;
    // Whole packs in each slice, whatever the number of ranks.
    const SHAPES: [(usize, usize); 3] = [(0, 6720), (8, 13_440), (16, 26_880)];
    let shapes = if options.small { &SHAPES[..1] } else { &SHAPES[..] };
    let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
    let probes = Probes::worlds(&context)?;
    let (mut all, mut right, mut last) = (0, true, 0);
    for world_size in 2..=8 {
        let mut cases = 0;
        let outcome = (|| {
            let mut world = CooperativeRanks::new(options.gpu, world_size, REGION_BYTES, EPOCH, TIMEOUT)?;
            for dtype in [DType::F16, DType::Bf16, DType::F32] {
                if budget.is_spent() {
                    return Ok(());
                }
                cases += Buffers::new(&world, dtype, ReduceOp::Sum, shapes)?.check(
                    &mut world,
                    shapes,
                    Some(&probes),
                )?;
            }
            Ok(())
        })();
        (all, right, last) = (all + cases, right && outcome.is_ok(), world_size);
        Record::check(format!("hot kernels of {world_size} ranks"), cases, outcome).write()?;
        if budget.is_spent() {
            Record::skipped(
                format!("what came after {cases} cases of {world_size} ranks"),
                "the step's time was over",
            )
            .write()?;
            break;
        }
    }
    let answer = match (right, last) {
        (true, 8) => format!("yes, {all} cases"),
        (true, _) => format!("as far as there was time, {all} cases"),
        (false, _) => "no".to_owned(),
    };
    Record::answer(QUESTION, answer).write()
}

/// The step `cooperative`: whether all worlds run at all.
pub fn cooperative(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    const QUESTION: &str = "Does the world of one cooperative launch pass for 2 to 16 ranks?";
    let tried = Cases { dtypes: &[DType::F32], ops: &[ReduceOp::Sum], shapes: &SMALL_SHAPES };
    let (mut passed, mut failed, mut cases) = (Vec::new(), Vec::new(), 0);
    for world_size in 2..=fast_allreduce::MAX_RANKS {
        if budget.is_spent() {
            Record::skipped(format!("worlds from {world_size} ranks on"), "the step's time was over")
                .write()?;
            break;
        }
        match check_world(options, world_size, tried, budget, &mut cases) {
            Ok(()) => passed.push(world_size),
            Err(failure) => {
                failed.push(world_size);
                Record::check(format!("world of {world_size}"), 0, Err(failure)).write()?;
            }
        }
    }
    let is_all = passed.len() == fast_allreduce::MAX_RANKS - 1;
    let answer = match (is_all, failed.is_empty()) {
        (true, _) => format!("yes, {cases} cases"),
        (_, true) => format!("as far as there was time: {passed:?}"),
        _ => format!("no: not for {failed:?}; it does for {passed:?}"),
    };
    Record::answer(QUESTION, answer).write()?;
    if !passed.is_empty() {
        Record::check(format!("worlds of {passed:?}"), cases, Ok(())).write()?;
    }
    Ok(())
}

fn check_world(
    options: &GpuCheck,
    world_size: usize,
    Cases { dtypes, ops, shapes }: Cases<'_>,
    budget: Budget,
    cases: &mut u64,
) -> Result<(), Failure> {
    let mut world = CooperativeRanks::new(options.gpu, world_size, LAUNCH_BYTES, EPOCH, TIMEOUT)?;
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

fn check_collectives(
    options: &GpuCheck,
    world_size: usize,
    budget: Budget,
    cases: &mut u64,
) -> Result<(), Failure> {
    let mut world = CooperativeRanks::new(options.gpu, world_size, LAUNCH_BYTES, EPOCH, TIMEOUT)?;
    collectives::check(&mut world, options.small, budget, cases)
}

/// The buffers of all ranks, and what is to come out. All are of bytes, and as long.
struct Buffers {
    dtype: DType,
    op: ReduceOp,
    inputs: Vec<CudaSlice<u8>>,
    outputs: Vec<CudaSlice<u8>>,
    /// Element by element.
    expected: Lines,
    poison: Lines,
    /// What kernels that stamp write to.
    stamps: CudaSlice<u64>,
}

/// Where a call reads, and whether its peers read the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InputMode {
    Staged,
    Registered,
    InPlace,
    InPlaceRegistered,
}

impl InputMode {
    const ALL: [Self; 4] = [Self::Staged, Self::Registered, Self::InPlace, Self::InPlaceRegistered];

    fn is_in_place(self) -> bool {
        matches!(self, Self::InPlace | Self::InPlaceRegistered)
    }

    fn is_registered(self) -> bool {
        matches!(self, Self::Registered | Self::InPlaceRegistered)
    }
}

impl Buffers {
    fn new(
        world: &CooperativeRanks,
        dtype: DType,
        op: ReduceOp,
        shapes: &[(usize, usize)],
    ) -> Result<Self, Failure> {
        let length = shapes.iter().map(|(offset, count)| offset + count).max().unwrap_or(0) + MARGIN;
        let bytes = length * dtype.size();
        let (world_size, elements) = (world.world_size(), elements(dtype)?);
        let numbers = Inputs::new(0x5eed, length as u64, world_size, op);
        let of_rank = |rank| {
            let mut memory = Lines::new(bytes)?;
            elements.fill(&numbers, rank, &mut memory);
            Ok(memory)
        };
        let by_rank = (0..world_size).map(of_rank).collect::<Result<Vec<_>, Failure>>()?;
        let mut expected = Lines::new(bytes)?;
        let inputs: Vec<&[u8]> = by_rank.iter().map(|memory| &**memory).collect();
        if !elements.reduce(op, &inputs, &mut expected) {
            return Err(Failure::Usage(format!("the reference of {dtype} {op} is not plausible")));
        }
        let stream = world.stream();
        let poison = Lines::new(bytes)?;
        let upload = |memory: &Lines| stream.clone_htod(&memory[..]).map_err(driver("cuMemcpyHtoDAsync"));
        Ok(Self {
            dtype,
            op,
            inputs: by_rank.iter().map(upload).collect::<Result<_, _>>()?,
            outputs: by_rank.iter().map(|_| upload(&poison)).collect::<Result<_, _>>()?,
            expected,
            poison,
            stamps: stream
                .alloc_zeros((STAMPS.len() + 1) * world_size * world.max_blocks())
                .map_err(driver("cuMemAlloc"))?,
        })
    }

    /// Every algorithm, mode and shape: the number of cases.
    fn check(
        &mut self,
        world: &mut CooperativeRanks,
        shapes: &[(usize, usize)],
        probes: Option<&Probes>,
    ) -> Result<u64, Failure> {
        let mut cases = 0;
        for algorithm in Algorithm::DIRECT {
            for mode in InputMode::ALL {
                let is_pull = matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull);
                if mode.is_registered() && !is_pull {
                    continue; // Nothing is read in place then.
                }
                for &(offset, count) in shapes {
                    self.case(world, algorithm, mode, (offset, count), probes)?;
                    cases += 1;
                }
            }
        }
        Ok(cases)
    }

    fn case(
        &mut self,
        world: &mut CooperativeRanks,
        algorithm: Algorithm,
        mode: InputMode,
        (offset, count): (usize, usize),
        probes: Option<&Probes>,
    ) -> Result<(), Failure> {
        let stream = Arc::clone(world.stream());
        for (input, output) in self.inputs.iter().zip(&mut self.outputs) {
            match mode.is_in_place() {
                true => stream.memcpy_dtod(input, output).map_err(driver("cuMemcpyDtoDAsync"))?,
                false => stream.memcpy_htod(&self.poison[..], output).map_err(driver("cuMemcpyHtoDAsync"))?,
            }
        }
        // The world copies on a stream of its own.
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let (dtype, size) = (self.dtype, self.dtype.size());
        let (blocks, threads) = grid(world, count * size);
        let plan = CooperativePlan { algorithm, blocks, threads, registered: mode.is_registered() };
        let name = || {
            format!(
                "{algorithm} of {count} {dtype} from {offset}, {}, {mode:?}, {blocks} x {threads}",
                self.op
            )
        };
        let start = (offset * size) as u64;
        let of_rank = |rank: usize| {
            let input = if mode.is_in_place() { &self.outputs[rank] } else { &self.inputs[rank] };
            CooperativeRank {
                collective: Collective::AllReduce(self.op),
                input: input.device_ptr(&stream).0 + start,
                output: self.outputs[rank].device_ptr(&stream).0 + start,
            }
        };
        let ranks: Vec<_> = (0..world.world_size()).map(of_rank).collect();
        let told = |error| Failure::Ranks(format!("{}: {error}", name()));
        // SAFETY: the slices hold every shape, and live until the call has been waited for.
        let mut call = unsafe { world.prepare_raw(&ranks, count, dtype, plan) }.map_err(told)?;
        if let Some(probes) = probes {
            let sums = self.stamps.device_ptr(&stream).0;
            // SAFETY: the module and the words outlive the call, which is waited for.
            call = unsafe { call.repeated(probes, 1, sums) }.map_err(told)?;
        }
        call.enqueue().and_then(|()| call.finish()).map_err(told)?;
        drop(call);
        let reduced = offset * size..(offset + count) * size;
        for (rank, output) in self.outputs.iter().enumerate() {
            let result = download(world, output)?;
            let mut right = match mode.is_in_place() {
                true => download(world, &self.inputs[rank])?,
                false => self.poison.to_vec(),
            };
            right[reduced.clone()].copy_from_slice(&self.expected[reduced.clone()]);
            let all = result.chunks(size).zip(right.chunks(size)).enumerate();
            let mut wrong = all.filter(|(_, (is, right))| is != right);
            if let Some((index, (is, right))) = wrong.next() {
                return Err(Failure::Ranks(format!(
                    "{}: {} wrong elements on rank {rank}, the first is number {index}: {:#x} instead of {:#x}",
                    name(),
                    wrong.count() + 1,
                    bits(is),
                    bits(right),
                )));
            }
        }
        Ok(())
    }
}
