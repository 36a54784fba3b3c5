//! The steps `turns` and `link`: what a call of the hot set takes when a launch does it many times, and where in it the time goes.
//! No gap between kernels is in it.

use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::probes::{Probes, STAMPS};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks, RegionMemory};
use fast_allreduce::{Algorithm, ReduceOp};
use half::bf16;

use super::probe::{Bench, Work};
use super::record::Record;
use super::steps::Budget;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

const TIMEOUT: Duration = Duration::from_secs(5);
/// In which each message is one launch.
const REGION_BYTES: usize = 64 << 20;

/// What is measured: a table for each number of ranks.
struct Sweep {
    memory: RegionMemory,
    worlds: &'static [usize],
    sizes: &'static [usize],
    /// Threads of a block, where there is work for more than one: 64 as the plans have it, others to compare.
    threads: &'static [usize],
    turns: u32,
    name: &'static str,
}

const TURNS: Sweep = Sweep {
    memory: RegionMemory::Device,
    worlds: &[2, 4, 8],
    sizes: &[8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20],
    threads: &[64, 512],
    turns: 200,
    name: "regions on the GPU",
};

/// Regions in pinned host memory: what ranks read of each other comes from there, and what they store goes there, and so does what
/// a rank of several GPUs has at hand. Stores are posted, as over a link.
const LINK: Sweep = Sweep {
    memory: RegionMemory::Host,
    worlds: &[2, 8],
    sizes: &[8 << 10, 64 << 10, 512 << 10],
    threads: &[64],
    turns: 50,
    name: "regions in pinned host memory",
};

pub fn turns(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    run(options, budget, &TURNS)
}

pub fn link(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    run(options, budget, &LINK)
}

fn run(options: &GpuCheck, budget: Budget, sweep: &Sweep) -> Result<(), Failure> {
    let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
    let probes = Probes::worlds(&context)?;
    let ghz = clock(options)?;
    Record::fact("GHz while it was measured", format!("{ghz:.3}")).write()?;
    let (worlds, sizes) = match options.small {
        true => (&sweep.worlds[..1], &sweep.sizes[..1]),
        false => (sweep.worlds, sweep.sizes),
    };
    for &world_size in worlds {
        let mut world =
            CooperativeRanks::in_memory(options.gpu, world_size, REGION_BYTES, 0, TIMEOUT, sweep.memory)?;
        // SAFETY: all work on memory of this context is on the world's stream, in whose order it is also freed.
        unsafe { world.stream().context().disable_event_tracking() };
        for &bytes in sizes {
            if budget.is_spent() {
                let left = format!("{world_size} ranks, from {bytes} B on, and larger worlds");
                return Record::skipped(left, "the step's time was over").write();
            }
            let measured = Measured { sweep, ghz, bytes, small: options.small };
            if let Err(failure) = measured.all(&mut world, &probes) {
                Record::check(format!("{world_size} ranks, {bytes} B"), 0, Err(failure)).write()?;
            }
        }
    }
    Ok(())
}

/// Of the multiprocessors, by a chain of instructions; the driver's attribute where this driver does not run that.
fn clock(options: &GpuCheck) -> Result<f64, Failure> {
    use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
    let bench = Bench::new(options)?;
    let work = Work { turns: bench.turns(20_000), count: 1, memory: 0 };
    if let Ok(measured) = bench.run("cost_arithmetic", (1, 32), work, false) {
        let ghz = measured[0].cycles / (measured[0].end_ns - measured[0].start_ns);
        if ghz.is_finite() && ghz > 0.0 {
            return Ok(ghz);
        }
    }
    let khz =
        bench.context.attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE).map_err(driver("cuDeviceGetAttribute"))?;
    Ok(f64::from(khz.max(1)) / 1e6)
}

/// Of messages of one size.
struct Measured<'a> {
    sweep: &'a Sweep,
    ghz: f64,
    bytes: usize,
    small: bool,
}

impl Measured<'_> {
    fn all(&self, world: &mut CooperativeRanks, probes: &Probes) -> Result<(), Failure> {
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
                    self.one(world, probes, (&inputs, &mut outputs), plan, threads)?;
                }
            }
        }
        Ok(())
    }

    /// As many blocks as there is work for, of at least so many threads.
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
        let parts = match algorithm {
            Algorithm::TwoShotPull | Algorithm::TwoShotPush => world.world_size(),
            _ => 1,
        };
        let packs = (self.bytes / PACK).div_ceil(parts);
        let blocks = packs.div_ceil(threads).clamp(1, world.max_blocks());
        let threads = packs.div_ceil(blocks).next_multiple_of(WARP).clamp(WARP, MOST_THREADS);
        CooperativePlan { algorithm, blocks, threads, registered }
    }

    fn one(
        &self,
        world: &mut CooperativeRanks,
        probes: &Probes,
        (inputs, outputs): (&[CudaSlice<bf16>], &mut [CudaSlice<bf16>]),
        plan: CooperativePlan,
        threads: usize,
    ) -> Result<(), Failure> {
        let (world_size, stream) = (world.world_size(), std::sync::Arc::clone(world.stream()));
        let turns = if self.small { 2 } else { self.sweep.turns };
        let words = STAMPS.len() + 1;
        let mut sums =
            stream.alloc_zeros::<u64>(words * world_size * plan.blocks).map_err(driver("cuMemAlloc"))?;
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let (count, address) = (self.bytes / size_of::<bf16>(), sums.device_ptr(&stream).0);
        let call = world.prepare(inputs, outputs, 0, count, ReduceOp::Sum, plan)?;
        // SAFETY: the module and the sums outlive the call, which is waited for here.
        let mut call = unsafe { call.repeated(probes, turns, address) }?;
        // The first fetches code, and is not looked at.
        call.enqueue()?;
        call.finish()?;
        stream.memset_zeros(&mut sums).map_err(driver("cuMemsetD8Async"))?;
        call.enqueue()?;
        call.finish()?;
        drop(call);
        let sums = stream.clone_dtoh(&sums).map_err(driver("cuMemcpyDtoHAsync"))?;
        let result = stream.clone_dtoh(&outputs[0]).map_err(driver("cuMemcpyDtoHAsync"))?;
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let registered = if plan.registered { "+" } else { "" };
        let name = format!("{}{registered}", plan.algorithm);
        if let Some(wrong) = result.iter().find(|value| value.to_f32() != world_size as f32) {
            return Err(Failure::Ranks(format!("{name}: an element is {wrong} and not {world_size}")));
        }
        self.write(&name, world_size, threads, &sums)
    }

    /// The means over all turns and blocks.
    fn write(&self, name: &str, world_size: usize, threads: usize, sums: &[u64]) -> Result<(), Failure> {
        let words = STAMPS.len() + 1;
        let mean = |point: usize| {
            let of = |block: &[u64]| (block[point + 1] as f64, block[0] as f64);
            let (cycles, turns) =
                sums.chunks_exact(words).map(of).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            cycles / turns / self.ghz * 1e-3
        };
        let Some(end) = STAMPS.iter().position(|&point| point == "end").map(mean).filter(|end| *end > 0.0)
        else {
            return Record::skipped(
                format!("{name}, {world_size} ranks, {} B", self.bytes),
                "nothing was stamped",
            )
            .write();
        };
        let of = format!("{world_size} ranks in one launch, bf16 sum, {}", self.sweep.name);
        let column = match threads {
            64 => name.to_owned(),
            threads => format!("{name}, blocks of {threads}"),
        };
        Record::figure(&format!("{of}: microseconds of a call"), self.bytes, &column, end).write()?;
        for (point, what) in STAMPS.iter().enumerate() {
            let at = mean(point);
            if threads == 64 && at > 0.0 {
                let table = format!("{of}: microseconds from the beginning of a call, + registered inputs");
                Record::figure(&table, format!("{} {what}", self.bytes), name, at).write()?;
            }
        }
        Ok(())
    }
}
