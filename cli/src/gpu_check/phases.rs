//! The steps `phases` and `link`: the time of a call of the hot set, and of its phases, when one launch makes the
//! call many times. No gap between kernels is included.

use std::time::Duration;

use cudarc::driver::{CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::probes::{Probes, STAMPS};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks, RegionMemory};
use fast_allreduce::{Algorithm, ReduceOp};
use half::bf16;

use super::budget::Budget;
use super::probe::{context, synchronize, wait_limit, ProbeRunner};
use super::record::{check, fact, figure, out_of_time, skipped, CLOCK};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

const TIMEOUT: Duration = Duration::from_secs(5);
/// Large enough that each message is one launch.
const REGION_BYTES: usize = 64 << 20;

/// The measurements of a step: a table for each number of ranks.
pub struct Sweep {
    memory: RegionMemory,
    worlds: &'static [usize],
    sizes: &'static [usize],
    /// Threads of a block, if there is work for several blocks: 64 as in the plans, and others for comparison.
    threads: &'static [usize],
    /// Calls of a launch.
    calls: u32,
    name: &'static str,
}

pub const GPU: Sweep = Sweep {
    memory: RegionMemory::Device,
    worlds: &[2, 4, 8],
    sizes: &[8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20],
    threads: &[64, 512],
    calls: 200,
    name: "regions on the GPU",
};

/// Regions in pinned host memory, to imitate a link: what ranks read of each other crosses PCIe, and so do their
/// stores to each other, which are posted as over NVLink. Unlike there, a rank's own region is behind the link too.
pub const LINK: Sweep = Sweep {
    memory: RegionMemory::Host,
    worlds: &[2, 8],
    sizes: &[8 << 10, 64 << 10, 512 << 10],
    threads: &[64],
    calls: 50,
    name: "regions in pinned host memory",
};

pub fn run(options: &GpuCheck, budget: Budget, sweep: &Sweep) -> Result<(), Failure> {
    let probes = Probes::worlds(&context(options.gpu)?)?;
    let clock = ProbeRunner::new(options)?;
    let (ghz, _) = clock.warm_clock()?;
    fact("GHz while it was measured", format!("{ghz:.3}"))?;
    let (worlds, sizes) = match options.small {
        true => (&sweep.worlds[..1], &sweep.sizes[..1]),
        false => (sweep.worlds, sweep.sizes),
    };
    let timeout = wait_limit(options.gpu, TIMEOUT)?;
    'worlds: for &world_size in worlds {
        let mut world =
            CooperativeRanks::in_memory(options.gpu, world_size, REGION_BYTES, 0, timeout, sweep.memory)?;
        // SAFETY: all work on memory of this context is on the world's stream, in whose order it is also freed.
        unsafe { world.stream().context().disable_event_tracking() };
        for &bytes in sizes {
            if budget.is_spent() {
                out_of_time(format!("{world_size} ranks, from {bytes} B on, and larger worlds"))?;
                break 'worlds;
            }
            let size = Size { sweep, ghz, bytes, small: options.small };
            if let Err(failure) = size.measure(&mut world, &probes) {
                check(format!("{world_size} ranks, {bytes} B"), 0, Err(failure))?;
            }
        }
    }
    check(CLOCK, 1, clock.check_clock(ghz))
}

/// The measurements of one message size.
struct Size<'a> {
    sweep: &'a Sweep,
    ghz: f64,
    bytes: usize,
    small: bool,
}

impl Size<'_> {
    fn measure(&self, world: &mut CooperativeRanks, probes: &Probes) -> Result<(), Failure> {
        let (count, stream) = (self.bytes / size_of::<bf16>(), std::sync::Arc::clone(world.stream()));
        let slices = |value: f32| -> Result<Vec<CudaSlice<bf16>>, Failure> {
            let elements = vec![bf16::from_f32(value); count];
            let upload = |_| stream.clone_htod(&elements).map_err(driver("cuMemcpyHtoDAsync"));
            (0..world.world_size()).map(upload).collect()
        };
        let (inputs, mut outputs) = (slices(1.0)?, slices(0.0)?);
        for algorithm in Algorithm::DIRECT {
            for registered in [false, true] {
                if registered && !matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull) {
                    continue;
                }
                for &threads in self.sweep.threads {
                    let plan = self.plan(world, algorithm, registered, threads);
                    self.measure_plan(world, probes, (&inputs, &mut outputs), plan, threads)?;
                }
            }
        }
        Ok(())
    }

    /// Returns a plan of as many blocks as there is work for, of at least `threads` threads.
    fn plan(
        &self,
        world: &CooperativeRanks,
        algorithm: Algorithm,
        registered: bool,
        threads: usize,
    ) -> CooperativePlan {
        const PACK: usize = 16;
        const WARP: usize = 32;
        const MOST_THREADS: usize = 512;
        let slices = match algorithm {
            Algorithm::TwoShotPull | Algorithm::TwoShotPush => world.world_size(),
            _ => 1,
        };
        let packs = (self.bytes / PACK).div_ceil(slices);
        let blocks = packs.div_ceil(threads).clamp(1, world.max_blocks());
        let threads = packs.div_ceil(blocks).next_multiple_of(WARP).clamp(WARP, MOST_THREADS);
        CooperativePlan { algorithm, blocks, threads, registered }
    }

    fn measure_plan(
        &self,
        world: &mut CooperativeRanks,
        probes: &Probes,
        (inputs, outputs): (&[CudaSlice<bf16>], &mut [CudaSlice<bf16>]),
        plan: CooperativePlan,
        threads: usize,
    ) -> Result<(), Failure> {
        let (world_size, stream) = (world.world_size(), std::sync::Arc::clone(world.stream()));
        let calls = if self.small { 2 } else { self.sweep.calls };
        let words = STAMPS.len() + 1;
        let mut sums =
            stream.alloc_zeros::<u64>(words * world_size * plan.blocks).map_err(driver("cuMemAlloc"))?;
        synchronize(&stream)?;
        let (count, address) = (self.bytes / size_of::<bf16>(), sums.device_ptr(&stream).0);
        let call = world.prepare(inputs, outputs, 0, count, ReduceOp::Sum, plan)?;
        // SAFETY: the module and the sums outlive the call, which is waited for here.
        let mut call = unsafe { call.repeated(probes, calls, address) }?;
        // The first launch loads code, and does not count.
        call.enqueue()?;
        call.finish()?;
        stream.memset_zeros(&mut sums).map_err(driver("cuMemsetD8Async"))?;
        call.enqueue()?;
        call.finish()?;
        drop(call);
        let sums = stream.clone_dtoh(&sums).map_err(driver("cuMemcpyDtoHAsync"))?;
        let result = stream.clone_dtoh(&outputs[0]).map_err(driver("cuMemcpyDtoHAsync"))?;
        synchronize(&stream)?;
        let name = format!("{}{}", plan.algorithm, if plan.registered { "+" } else { "" });
        if let Some(wrong) = result.iter().find(|value| value.to_f32() != world_size as f32) {
            return Err(Failure::Ranks(format!("{name}: an element is {wrong} and not {world_size}")));
        }
        self.write(&name, world_size, threads, &sums)
    }

    /// Writes the means over all calls and blocks.
    fn write(&self, name: &str, world_size: usize, threads: usize, sums: &[u64]) -> Result<(), Failure> {
        let words = STAMPS.len() + 1;
        let mean = |point: usize| {
            let sum = |word: usize| sums.chunks_exact(words).map(|block| block[word] as f64).sum::<f64>();
            sum(point + 1) / sum(0) / self.ghz * 1e-3
        };
        let end = STAMPS.iter().position(|&point| point == "end").map_or(0.0, mean);
        // It is NaN if no block has made a call.
        if end.is_nan() || end <= 0.0 {
            return skipped(format!("{name}, {world_size} ranks, {} B", self.bytes), "nothing was stamped");
        }
        let of = format!("{world_size} ranks in one launch, bf16 sum, {}", self.sweep.name);
        let column = match threads {
            64 => name.to_owned(),
            threads => format!("{name}, blocks of {threads}"),
        };
        figure(&format!("{of}: microseconds of a call"), self.bytes, column, end)?;
        for (point, what) in STAMPS.iter().enumerate() {
            let at = mean(point);
            if threads == 64 && at > 0.0 {
                let table = format!("{of}: microseconds from the beginning of a call, + registered inputs");
                figure(&table, format!("{} {what}", self.bytes), name, at)?;
            }
        }
        Ok(())
    }
}
