//! The step `costs`: microbenchmarks, and the constants of the PTX machine's clock that they yield (lab/gpu-model.md).

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaSlice, DevicePtr as _};

use super::budget::Budget;
use super::gaps;
use super::probe::{median, ring, synchronize, Pinned, ProbeRunner, Workload};
use super::record::{check, constant, figure, out_of_time, CLOCK, GHZ};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

const LINE: usize = 128;
const CYCLES: &str = "Cycles";
const NANOSECONDS: &str = "Nanoseconds";

struct Costs {
    probes: ProbeRunner,
    ghz: f64,
}

/// A part of the step; each can fail alone.
type Part = (&'static str, fn(&Costs) -> Result<(), Failure>);

const PARTS: [Part; 8] = [
    ("loads", loads),
    ("fences", fences),
    ("syncs", syncs),
    ("signals", signals),
    ("parameters", parameters),
    ("code", code),
    ("bandwidth", bandwidth),
    ("launches", |costs| gaps::run(&costs.probes)),
];

pub fn run(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let probes = ProbeRunner::new(options)?;
    constant("sms", f64::from(probes.multiprocessors))?;
    let (ghz, alu_cycles) = probes.warm_clock()?;
    constant(GHZ, ghz)?;
    constant("alu_cycles", alu_cycles)?;
    let costs = Costs { probes, ghz };
    for (name, part) in PARTS {
        match budget.is_spent() {
            true => out_of_time(name)?,
            false => {
                let outcome = part(&costs);
                check(name, outcome.is_ok().into(), outcome)?;
            }
        }
    }
    check(CLOCK, 1, costs.probes.check_clock(ghz))
}

impl Costs {
    /// Returns the cycles of each iteration of a kernel's first block: the median of several runs.
    fn cycles(&self, name: &str, grid: (u32, u32), workload: Workload) -> Result<f64, Failure> {
        const RUNS: usize = 5;
        let run =
            |_| Ok(self.probes.run(name, grid, workload, false)?[0].cycles / f64::from(workload.iterations));
        Ok(median((0..RUNS).map(run).collect::<Result<_, Failure>>()?))
    }

    /// Returns the GB/s of all blocks of a kernel, each of which moves `count` bytes in an iteration.
    fn rate(&self, name: &str, grid: (u32, u32), workload: Workload) -> Result<f64, Failure> {
        let run = |_| {
            let blocks = self.probes.run(name, grid, workload, false)?;
            let start = blocks.iter().map(|block| block.start_ns).fold(f64::INFINITY, f64::min);
            let end = blocks.iter().map(|block| block.end_ns).fold(0.0, f64::max);
            let bytes = blocks.len() as f64 * workload.count as f64 * f64::from(workload.iterations);
            Ok(bytes / (end - start))
        };
        Ok(median((0..3).map(run).collect::<Result<_, Failure>>()?))
    }

    /// Copies words to the GPU.
    fn upload(&self, words: &[u64]) -> Result<CudaSlice<u64>, Failure> {
        let slice = self.probes.stream.clone_htod(words).map_err(driver("cuMemcpyHtoDAsync"))?;
        synchronize(&self.probes.stream)?;
        Ok(slice)
    }

    fn nanoseconds(&self, row: String, column: &str, cycles: f64) -> Result<(), Failure> {
        figure(NANOSECONDS, row, column, cycles / self.ghz)
    }
}

fn loads(costs: &Costs) -> Result<(), Failure> {
    let probes = &costs.probes;
    let iterations = probes.iterations(4096);
    let workload = |memory| Workload { memory, iterations, ..Workload::default() };
    let chase = |name: &str, memory| costs.cycles(name, (1, 1), workload(memory));
    let address = |slice: &CudaSlice<u64>| slice.device_ptr(&probes.stream).0;

    constant("shared_cycles", costs.cycles("cost_load_shared", (1, 32), workload(0))?)?;
    let near = costs.upload(&ring(32, LINE))?;
    constant("l1_cycles", chase("cost_load_weak", address(&near))?)?;
    let far = costs.upload(&ring(2048, 4 * LINE))?;
    let relaxed = chase("cost_load_relaxed", address(&far))?;
    let acquire = chase("cost_load_acquire", address(&far))?;
    constant("l2_cycles", relaxed)?;
    constant("acquire_cycles", (acquire - relaxed).max(0.0))?;
    figure(CYCLES, "load that hits L2", "relaxed", relaxed)?;
    figure(CYCLES, "load that hits L2", "acquire", acquire)?;
    memory_loads(costs)?;

    let mut host = Pinned::new(&probes.context, 2048 * 4 * LINE)?;
    host.write(&ring(2048, 4 * LINE));
    for (name, column) in [("cost_load_relaxed", "relaxed"), ("cost_load_acquire", "acquire")] {
        let cycles = chase(name, host.address)?;
        figure(CYCLES, "load from pinned host memory", column, cycles)?;
        costs.nanoseconds("load from pinned host memory".into(), column, cycles)?;
    }
    Ok(())
}

/// Measures loads that miss the second-level cache, after other memory has displaced the lines, twice: in so much
/// memory that translations of addresses may have been displaced too, and in memory whose translations are cached.
fn memory_loads(costs: &Costs) -> Result<(), Failure> {
    const STRIDE: usize = 4096;
    const ROW: &str = "load that misses L2";
    let probes = &costs.probes;
    let iterations = probes.iterations(4096);
    let address = |slice: &CudaSlice<u64>| slice.device_ptr(&probes.stream).0;
    let (blocks, round) = (probes.multiprocessors, 4 * 512 * 16);
    let other_bytes =
        if probes.small { round } else { (3 * l2_bytes(probes)? / blocks as usize / round + 1) * round };
    let (_other, other) = probes.device_memory(blocks as usize * other_bytes)?;
    let displace = Workload { memory: other, count: other_bytes as u64, iterations: 1 };
    // The kernel loads a line of each of the first `translated` bytes' pages before it is timed.
    let misses = |lines: usize, translated: usize| {
        let memory = costs.upload(&ring(lines, STRIDE))?;
        let workload = Workload { memory: address(&memory), count: translated as u64, iterations };
        let run = |_| {
            probes.run("rate_load", (blocks, 512), displace, false)?;
            Ok(probes.run("cost_load_once", (1, 1), workload, false)?[0].cycles / f64::from(iterations))
        };
        let cycles = median((0..5).map(run).collect::<Result<_, Failure>>()?);
        figure(CYCLES, ROW, format!("in {} MiB", (lines * STRIDE) >> 20), cycles)?;
        Ok::<_, Failure>(cycles)
    };
    if !probes.small {
        misses(1 << 17, 0)?;
    }
    let lines = if probes.small { 1 << 10 } else { 1 << 13 };
    let cycles = misses(lines, lines * STRIDE)?;
    constant("dram_cycles", cycles)
}

fn l2_bytes(probes: &ProbeRunner) -> Result<usize, Failure> {
    let cache = probes.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    Ok(cache.map_err(driver("cuDeviceGetAttribute"))?.max(1 << 20) as usize)
}

fn fences(costs: &Costs) -> Result<(), Failure> {
    const MOST: u64 = 64;
    let probes = &costs.probes;
    let iterations = probes.iterations(500);
    let all = (probes.multiprocessors, 512);
    let (_device, local) = probes.device_memory(all.0 as usize * 512 * LINE)?;
    let host = Pinned::new(&probes.context, MOST as usize * LINE)?;
    for (name, fence) in [
        ("cost_fence_block", "fence of block scope"),
        ("cost_fence_gpu", "fence of GPU scope"),
        ("cost_fence_system", "fence of system scope"),
        ("cost_fence_sc", "sequentially consistent fence of system scope"),
    ] {
        for (kind, memory) in [("local", local), ("pinned host", host.address)] {
            for count in [0, 1, 16, MOST] {
                if count == 0 && memory != local {
                    continue;
                }
                let cycles = costs.cycles(name, (1, 1), Workload { memory, count, iterations })?;
                let row = match count {
                    0 => format!("{fence}, nothing outstanding"),
                    count => format!("{fence}, {count} {kind} stores outstanding"),
                };
                costs.nanoseconds(row, "one thread", cycles)?;
                match (count, name) {
                    (0, "cost_fence_block") => constant("fence_block_cycles", cycles)?,
                    (0, "cost_fence_gpu") => constant("fence_gpu_ns", cycles / costs.ghz)?,
                    (0, "cost_fence_system") => constant("fence_system_ns", cycles / costs.ghz)?,
                    (0, "cost_fence_sc") => constant("fence_sc_system_ns", cycles / costs.ghz)?,
                    _ => {}
                }
            }
        }
        // All multiprocessors at once; each thread stores to its own line.
        for count in [0, 1] {
            let workload = Workload { memory: local, count, iterations: iterations.min(50) };
            let row = format!("{fence}, {count} local stores of each thread outstanding");
            let cycles = costs.cycles(name, all, workload)?;
            costs.nanoseconds(row, "512 threads on all multiprocessors", cycles)?;
        }
    }
    Ok(())
}

fn syncs(costs: &Costs) -> Result<(), Failure> {
    let workload = Workload { iterations: costs.probes.iterations(2000), ..Workload::default() };
    let mut cycles = Vec::new();
    for threads in [32, 64, 128, 256, 512] {
        let of = costs.cycles("cost_sync", (1, threads), workload)?;
        figure(CYCLES, format!("sync of {threads} threads"), "cycles", of)?;
        cycles.push(of);
    }
    // From the smallest and the largest block: 1 and 16 warps.
    let each = (cycles[4] - cycles[0]).max(0.0) / 15.0;
    constant("sync_warp_cycles", each)?;
    constant("sync_cycles", (cycles[0] - each).max(0.0))
}

fn signals(costs: &Costs) -> Result<(), Failure> {
    let probes = &costs.probes;
    let iterations = probes.iterations(1000);
    for in_host_memory in [false, true] {
        let kind = if in_host_memory { "pinned host memory" } else { "memory of the GPU" };
        for (column, count) in [("relaxed", 0), ("release and acquire", 1)] {
            let (pinned, (_device, local)) =
                (Pinned::new(&probes.context, 2 * LINE)?, probes.device_memory(2 * LINE)?);
            let memory = if in_host_memory { pinned.address } else { local };
            let workload = Workload { memory, count, iterations };
            let blocks = probes.run("cost_signal", (2, 32), workload, true)?;
            if blocks.iter().any(|block| block.cycles == 0.0) {
                return Err(Failure::Ranks(format!("two blocks missed each other's signals in {kind}")));
            }
            let row = format!("signal from block to block in {kind}, one way");
            costs.nanoseconds(row, column, blocks[0].cycles / f64::from(iterations) / 2.0)?;
        }
    }
    Ok(())
}

fn parameters(costs: &Costs) -> Result<(), Failure> {
    let probes = &costs.probes;
    for (name, bytes) in [("parameters_64", 64), ("parameters_576", 576)] {
        let touch = |_| {
            gaps::launch_with_parameters(probes, &probes.stream, name, bytes)?;
            Ok(probes.words(3)?[0] as f64)
        };
        let cycles = median((0..20).map(touch).collect::<Result<_, Failure>>()?);
        let row = format!("first touch of the last line of {bytes} bytes of parameters");
        figure(CYCLES, row, "cycles", cycles)?;
        if bytes == 576 {
            constant("constant_cycles", cycles)?;
        }
    }
    Ok(())
}

/// Measures 16 KiB of code after 256 KiB of other code has been through the caches.
fn code(costs: &Costs) -> Result<(), Failure> {
    const LINES: f64 = (16 << 10) as f64 / LINE as f64;
    const PASSES: u32 = 4;
    let probes = &costs.probes;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    let workload = |iterations| Workload { count: 1, iterations, memory: 0 };
    for _ in 0..10 {
        probes.run("evict_code", (probes.multiprocessors, 32), workload(1), false)?;
        probes.run("cost_code", (1, 32), workload(PASSES), false)?;
        let passes = probes.sink(PASSES as usize)?;
        cold.push(passes[0] as f64);
        warm.push(passes[PASSES as usize - 1] as f64);
    }
    let (cold, warm) = (median(cold), median(warm));
    for (column, cycles) in [("cold", cold), ("warm", warm)] {
        figure(CYCLES, "1024 dependent instructions, 16 KiB of code", column, cycles)?;
    }
    constant("cold_line_cycles", ((cold - warm) / LINES).max(0.0))
}

fn bandwidth(costs: &Costs) -> Result<(), Failure> {
    let probes = &costs.probes;
    let cache = l2_bytes(probes)?;
    constant("l2_bytes", cache as f64)?;
    let all = (probes.multiprocessors, 512);
    // Cached: half of the cache, in whole rounds of a block's loads. Large: several times the cache.
    let round = 4 * 512 * 16;
    let cached = (cache / 2 / all.0 as usize).max(round) / round * round;
    let large = if probes.small { cached } else { 8 << 20 };
    let (_memory, memory) = probes.device_memory(all.0 as usize * large.max(cached))?;
    let iterations = probes.iterations(100);
    let workload = |count: usize, iterations| Workload { memory, count: count as u64, iterations };
    for (name, own) in [("rate_load", "sm_load_bytes"), ("rate_store", "sm_store_bytes")] {
        let cycles = costs.cycles(name, (1, 512), workload(cached, iterations))?;
        constant(own, cached as f64 / cycles)?;
        for (row, count, iterations) in [("second-level cache", cached, iterations), ("memory", large, 2)] {
            let rate = costs.rate(name, all, workload(count, iterations))?;
            figure("GB/s of all multiprocessors", row, name, rate)?;
            match (name, row) {
                ("rate_load", "memory") if !probes.small => constant("dram_gbps", rate)?,
                ("rate_load", "second-level cache") => constant("l2_gbps", rate)?,
                _ => {}
            }
        }
    }
    Ok(())
}
