//! The step `costs`: microbenchmarks, and the constants that the clock of the PTX machine takes from them (lab/gpu-model.md).

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::gaps;
use super::probe::{median, Bench, Block, Pinned, Work};
use super::record::{constant, Record};
use super::steps::Budget;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

const LINE: usize = 128;
/// As GPU.md's table has them: cycles, but where the name says otherwise.
const CYCLES: &str = "Cycles";

/// What is known of the GPU so far.
struct Costs {
    bench: Bench,
    /// Cycles in a nanosecond.
    ghz: f64,
}

/// A part of the step, which can fail alone.
type Part = (&'static str, fn(&Costs) -> Result<(), Failure>);

const PARTS: [Part; 8] = [
    ("loads", loads),
    ("fences", fences),
    ("syncs", syncs),
    ("signals", signals),
    ("parameters", parameters),
    ("code", code),
    ("bandwidth", bandwidth),
    ("launches", |costs| gaps::run(&costs.bench)),
];

pub fn run(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let bench = Bench::new(options)?;
    constant("sms", f64::from(bench.multiprocessors))?;
    let turns = bench.turns(20_000);
    let measured =
        bench.run("cost_arithmetic", (1, 32), Work { turns, count: 1, ..Work::default() }, false)?;
    let Block { cycles, start_ns, end_ns } = measured[0];
    let ghz = cycles / (end_ns - start_ns);
    if !(ghz.is_finite() && ghz > 0.0) {
        return Err(Failure::Ranks(format!("no clock: {cycles} cycles from {start_ns} to {end_ns} ns")));
    }
    constant("ghz", ghz)?;
    constant("alu_cycles", cycles / f64::from(turns) / 64.0)?;
    let costs = Costs { bench, ghz };
    for (name, part) in PARTS {
        if budget.is_spent() {
            Record::skipped(name, "the step's time was over").write()?;
        } else if let Err(failure) = part(&costs) {
            Record::check(name, 0, Err(failure)).write()?;
        } else {
            Record::check(name, 1, Ok(())).write()?;
        }
    }
    Ok(())
}

impl Costs {
    /// Cycles of each turn of a kernel's first block: the median of some runs.
    fn cycles(&self, name: &str, grid: (u32, u32), work: Work) -> Result<f64, Failure> {
        const RUNS: usize = 5;
        let run = |_| Ok(self.bench.run(name, grid, work, false)?[0].cycles / f64::from(work.turns));
        Ok(median((0..RUNS).map(run).collect::<Result<_, Failure>>()?))
    }

    /// GB/s of all blocks of a kernel, which move `count` bytes each in a turn.
    fn rate(&self, name: &str, grid: (u32, u32), work: Work) -> Result<f64, Failure> {
        let run = |_| {
            let blocks = self.bench.run(name, grid, work, false)?;
            let start = blocks.iter().map(|block| block.start_ns).fold(f64::INFINITY, f64::min);
            let end = blocks.iter().map(|block| block.end_ns).fold(0.0, f64::max);
            Ok(blocks.len() as f64 * work.count as f64 * f64::from(work.turns) / (end - start))
        };
        Ok(median((0..3).map(run).collect::<Result<_, Failure>>()?))
    }
}

/// A ring through `lines` places that are `stride` bytes apart, in which no step goes to the next one.
fn ring(lines: usize, stride: usize) -> Vec<u64> {
    // Odd, and so without a divisor in common with a power of two.
    let step = (lines / 2 + lines / 8) | 1;
    let mut words = vec![0; lines * stride / 8];
    for line in 0..lines {
        words[line * stride / 8] = ((line + step) % lines * stride) as u64;
    }
    words
}

fn loads(costs: &Costs) -> Result<(), Failure> {
    let bench = &costs.bench;
    let turns = bench.turns(4096);
    let upload = |words: &[u64]| {
        let slice = bench.stream.clone_htod(words).map_err(driver("cuMemcpyHtoDAsync"))?;
        bench.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        Ok::<_, Failure>(slice)
    };
    let chase = |name: &str, memory| costs.cycles(name, (1, 1), Work { memory, turns, ..Work::default() });
    let address = |slice: &cudarc::driver::CudaSlice<u64>| {
        use cudarc::driver::DevicePtr as _;
        slice.device_ptr(&bench.stream).0
    };

    let shared = costs.cycles("cost_load_shared", (1, 32), Work { turns, ..Work::default() })?;
    constant("shared_cycles", shared)?;
    let near = upload(&ring(32, LINE))?;
    constant("l1_cycles", chase("cost_load_weak", address(&near))?)?;
    let far = upload(&ring(2048, 4 * LINE))?;
    let (relaxed, acquire) =
        (chase("cost_load_relaxed", address(&far))?, chase("cost_load_acquire", address(&far))?);
    constant("l2_cycles", relaxed)?;
    constant("acquire_cycles", (acquire - relaxed).max(0.0))?;
    Record::figure(CYCLES, "load that hits L2", "relaxed", relaxed).write()?;
    Record::figure(CYCLES, "load that hits L2", "acquire", acquire).write()?;
    if !bench.small {
        // More lines than the turns that warm up and those that are timed touch, in more memory than the cache holds.
        let memory = upload(&ring(1 << 17, 4096))?;
        constant("dram_cycles", chase("cost_load_weak", address(&memory))?)?;
    }

    let mut host = Pinned::new(&bench.context, 2048 * 4 * LINE)?;
    host.write(&ring(2048, 4 * LINE));
    for (name, column) in [("cost_load_relaxed", "relaxed"), ("cost_load_acquire", "acquire")] {
        let cycles = chase(name, host.address)?;
        Record::figure(CYCLES, "load from pinned host memory", column, cycles).write()?;
        Record::figure(NANOSECONDS, "load from pinned host memory", column, cycles / costs.ghz).write()?;
    }
    Ok(())
}

const NANOSECONDS: &str = "Nanoseconds";

fn fences(costs: &Costs) -> Result<(), Failure> {
    const MOST: u64 = 64;
    let bench = &costs.bench;
    let turns = bench.turns(500);
    let all = (bench.multiprocessors, 512);
    let (_device, local) = bench.device_memory(all.0 as usize * 512 * LINE)?;
    let host = Pinned::new(&bench.context, MOST as usize * LINE)?;
    for (name, scope) in
        [("cost_fence_block", "block"), ("cost_fence_gpu", "GPU"), ("cost_fence_system", "system")]
    {
        for (place, memory) in [("local", local), ("pinned host", host.address)] {
            for count in [0, 1, 16, MOST] {
                if count == 0 && memory != local {
                    continue;
                }
                let cycles = costs.cycles(name, (1, 1), Work { memory, count, turns })?;
                let row = match count {
                    0 => format!("fence of the {scope}'s scope, nothing outstanding"),
                    count => format!("fence of the {scope}'s scope, {count} {place} stores outstanding"),
                };
                Record::figure(NANOSECONDS, row, "one thread", cycles / costs.ghz).write()?;
                match (count, name) {
                    (0, "cost_fence_block") => constant("fence_block_cycles", cycles)?,
                    (0, "cost_fence_gpu") => constant("fence_gpu_ns", cycles / costs.ghz)?,
                    (0, "cost_fence_system") => constant("fence_system_ns", cycles / costs.ghz)?,
                    _ => {}
                }
            }
        }
        // Every multiprocessor at once, each thread with a store of its own.
        for count in [0, 1] {
            let cycles = costs.cycles(name, all, Work { memory: local, count, turns: turns.min(50) })?;
            let row =
                format!("fence of the {scope}'s scope, {count} local stores of each thread outstanding");
            Record::figure(NANOSECONDS, row, "512 threads on all multiprocessors", cycles / costs.ghz)
                .write()?;
        }
    }
    Ok(())
}

fn syncs(costs: &Costs) -> Result<(), Failure> {
    let turns = costs.bench.turns(2000);
    let mut cycles = Vec::new();
    for threads in [32, 64, 128, 256, 512] {
        let of = costs.cycles("cost_sync", (1, threads), Work { turns, ..Work::default() })?;
        Record::figure(CYCLES, format!("sync of {threads} threads"), "cycles", of).write()?;
        cycles.push(of);
    }
    // By the smallest and the largest: 1 and 16 warps.
    let each = (cycles[4] - cycles[0]).max(0.0) / 15.0;
    constant("sync_warp_cycles", each)?;
    constant("sync_cycles", (cycles[0] - each).max(0.0))
}

fn signals(costs: &Costs) -> Result<(), Failure> {
    let bench = &costs.bench;
    let turns = bench.turns(1000);
    let (_device, local) = bench.device_memory(2 * LINE)?;
    for (place, host) in [("memory of the GPU", false), ("pinned host memory", true)] {
        for (column, count) in [("relaxed", 0), ("release and acquire", 1)] {
            let pinned = Pinned::new(&bench.context, 2 * LINE)?;
            if !host {
                let (words, address) = ([0_u64; 2 * LINE / 8], local);
                // SAFETY: the memory is of that size, and no kernel uses it.
                unsafe { cudarc::driver::result::memcpy_htod_sync(address, &words) }
                    .map_err(driver("cuMemcpyHtoD"))?;
            }
            let memory = if host { pinned.address } else { local };
            let blocks = bench.run("cost_signal", (2, 32), Work { memory, count, turns }, true)?;
            if blocks.iter().any(|block| block.cycles == 0.0) {
                return Err(Failure::Ranks(format!("two blocks lost each other's signals in {place}")));
            }
            let ns = blocks[0].cycles / f64::from(turns) / 2.0 / costs.ghz;
            Record::figure(
                NANOSECONDS,
                format!("signal from block to block in {place}, one way"),
                column,
                ns,
            )
            .write()?;
        }
    }
    Ok(())
}

fn parameters(costs: &Costs) -> Result<(), Failure> {
    let bench = &costs.bench;
    for (name, bytes) in [("parameters_64", 64), ("parameters_576", 576)] {
        let touch = |_| {
            gaps::launch_with_parameters(bench, &bench.stream, name, bytes)?;
            Ok(bench.words(3)?[0] as f64)
        };
        let cycles = median((0..20).map(touch).collect::<Result<_, Failure>>()?);
        Record::figure(
            CYCLES,
            format!("first touch of the last line of {bytes} bytes of parameters"),
            "cycles",
            cycles,
        )
        .write()?;
        if bytes == 576 {
            constant("constant_cycles", cycles)?;
        }
    }
    Ok(())
}

/// Code of 16 KiB, after code of 256 KiB has been through the caches.
fn code(costs: &Costs) -> Result<(), Failure> {
    const LINES: f64 = (16 << 10) as f64 / LINE as f64;
    const PASSES: u32 = 4;
    let bench = &costs.bench;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        bench.run(
            "evict_code",
            (bench.multiprocessors, 32),
            Work { count: 1, turns: 1, memory: 0 },
            false,
        )?;
        bench.run("cost_code", (1, 32), Work { count: 1, turns: PASSES, memory: 0 }, false)?;
        let passes = bench.sink(PASSES as usize)?;
        cold.push(passes[0] as f64);
        warm.push(passes[PASSES as usize - 1] as f64);
    }
    let (cold, warm) = (median(cold), median(warm));
    for (column, cycles) in [("cold", cold), ("warm", warm)] {
        Record::figure(CYCLES, "1024 dependent instructions, 16 KiB of code", column, cycles).write()?;
    }
    constant("cold_line_cycles", ((cold - warm) / LINES).max(0.0))
}

fn bandwidth(costs: &Costs) -> Result<(), Failure> {
    let bench = &costs.bench;
    let cache = Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let cache = bench.context.attribute(cache).map_err(driver("cuDeviceGetAttribute"))?.max(1 << 20) as usize;
    constant("l2_bytes", cache as f64)?;
    let all = (bench.multiprocessors, 512);
    // Half of the cache for all, in whole rounds of a block's loads; as much of memory as many caches.
    let round = 4 * 512 * 16;
    let cached = (cache / 2 / all.0 as usize).max(round) / round * round;
    let large = if bench.small { cached } else { 8 << 20 };
    let (_memory, memory) = bench.device_memory(all.0 as usize * large.max(cached))?;
    let turns = bench.turns(100);
    let work = |count: usize, turns| Work { memory, count: count as u64, turns };
    for (name, own) in [("rate_load", "sm_load_bytes"), ("rate_store", "sm_store_bytes")] {
        let cycles = costs.cycles(name, (1, 512), work(cached, turns))?;
        constant(own, cached as f64 / cycles)?;
        for (row, count, turns) in [("second-level cache", cached, turns), ("memory", large, 2)] {
            let rate = costs.rate(name, all, work(count, turns))?;
            Record::figure("GB/s of all multiprocessors", row, name, rate).write()?;
            match (name, row) {
                ("rate_load", "memory") if !bench.small => constant("dram_gbps", rate)?,
                ("rate_load", "second-level cache") => constant("l2_gbps", rate)?,
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_comes_to_all_places_before_it_closes() {
        for (lines, stride) in [(32, 128), (2048, 512)] {
            let ring = ring(lines, stride);
            let mut at = 0;
            for step in 1..=lines {
                at = ring[at as usize / 8];
                assert_eq!(at == 0, step == lines);
            }
        }
    }
}
