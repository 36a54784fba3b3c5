//! The steps `latency`, `fixed` and `bandwidth`.
//!
//! Latency is measured twice: with ranks as threads, which launch as programs do, and with all ranks in one cooperative
//! launch, in which CUDA guarantees that all of them make progress. Both are timed by events around replays of a graph.

use std::sync::Arc;

use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
use fast_allreduce::{Algorithm, DType, ReduceOp};

use super::budget::Budget;
use super::calls::grid;
use super::probe::{context, median_ns, new_stream, wait_limit};
use super::ranks::{as_threads, gpu_options, TIMEOUT};
use super::record::{check, figure, out_of_time};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda::{capture, Gpu, GRAPH_CALLS, MEGABYTE};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;

const SEED: u64 = 0x5eed;

/// Returns the powers of 4 from 1 KiB.
fn sizes(options: &GpuCheck) -> impl Iterator<Item = usize> {
    let largest: usize = if options.small { 64 << 10 } else { 64 << 20 };
    std::iter::successors(Some(1 << 10), |size| Some(size * 4)).take_while(move |&size| size <= largest)
}

fn launch_bytes(options: &GpuCheck) -> usize {
    MEGABYTE * if options.small { 1 } else { 64 }
}

fn worlds(options: &GpuCheck) -> &'static [usize] {
    &[2, 4, 8][..if options.small { 1 } else { 3 }]
}

fn measure(session: &Session, registered: bool) -> Measure<'_> {
    let effort = Effort { iterations: None, warmup: GRAPH_CALLS, checks: 1, registered };
    Measure { session, effort, seed: SEED, round: 0 }
}

pub fn latency(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let gpu_options = gpu_options(options, None, launch_bytes(options))?;
    let worlds = worlds(options);
    let _context = context(options.gpu)?;
    // This half first, as it needs nothing except the GPU. It may take half of the time.
    for &world_size in worlds {
        let part = Budget::share(options, 2 * worlds.len() as u32);
        if let Err(failure) = world_latency(options, world_size, part) {
            check(format!("latency of a world of {world_size}"), 0, Err(failure))?;
        }
    }
    as_threads(worlds, "latency", |session| {
        let table = format!(
            "f32 sum, {} ranks as threads, registered inputs: microseconds of a call in a graph of {GRAPH_CALLS}",
            session.world_size()
        );
        let is_first = session.rank() == 0;
        let mut gpus = Vec::new();
        for (programmatic, suffix) in [("0", ""), ("1", ", programmatic launch")] {
            let mut gpu_options = gpu_options.clone();
            gpu_options.settings.set("programmatic_launch", programmatic)?;
            for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None]) {
                let name = algorithm.map_or("auto", Algorithm::name);
                gpus.push((format!("{name}{suffix}"), Gpu::new(session, &gpu_options, algorithm)?));
            }
        }
        let mut measure = measure(session, true);
        let mut wrong = 0;
        'sizes: for bytes in sizes(options) {
            for (column, gpu) in &gpus {
                // The first rank decides for all.
                if session.of_first(u64::from(budget.is_spent()))? != 0 {
                    if is_first {
                        out_of_time(format!("{table}: from {bytes} B, {column} on"))?;
                    }
                    break 'sizes;
                }
                let work = measure.all_reduce(DType::F32, bytes / size_of::<f32>(), ReduceOp::Sum);
                let row = measure.row(gpu, &work)?;
                wrong += row.wrong();
                if is_first {
                    figure(&table, bytes, column, row.out_of_place.time_us)?;
                }
            }
        }
        match is_first && wrong > 0 {
            true => check(&table, 1, Err(Failure::Ranks(format!("{wrong} wrong elements")))),
            false => Ok(()),
        }
    })
}

/// Measures calls that are one cooperative launch of all ranks.
fn world_latency(options: &GpuCheck, world_size: usize, budget: Budget) -> Result<(), Failure> {
    const ROUNDS: usize = 5;
    let timeout = wait_limit(options.gpu, TIMEOUT)?;
    let mut world = CooperativeRanks::new(options.gpu, world_size, launch_bytes(options), 0, timeout)?;
    // SAFETY: all work on memory of this context is on the world's stream, in whose order it is also freed.
    unsafe { world.stream().context().disable_event_tracking() };
    let stream = Arc::clone(world.stream());
    let of = format!("f32 sum, {world_size} ranks in one cooperative launch, registered inputs");
    for bytes in sizes(options) {
        let count = bytes / size_of::<f32>();
        let zeros = || {
            let slice = |_| stream.alloc_zeros::<f32>(count).map_err(driver("cuMemAlloc"));
            (0..world_size).map(slice).collect::<Result<Vec<_>, _>>()
        };
        let (inputs, mut outputs) = (zeros()?, zeros()?);
        for algorithm in Algorithm::DIRECT {
            if budget.is_spent() {
                return out_of_time(format!("{of}: from {bytes} B, {algorithm} on"));
            }
            let (blocks, threads) = grid(&world, bytes);
            let plan = CooperativePlan { algorithm, blocks, threads, registered: true };
            let mut call = world.prepare(&inputs, &mut outputs, 0, count, ReduceOp::Sum, plan)?;
            let mut calls = || Ok((0..GRAPH_CALLS).try_for_each(|_| call.enqueue())?);
            // A driver may not support the capture of cooperative launches: then plain launches are timed.
            let (timed, ns) = match capture(&stream, &mut calls) {
                Ok(graph) => {
                    let replay = || graph.launch().map_err(driver("cuGraphLaunch"));
                    ("a graph of 20", median_ns(&stream, ROUNDS, replay)?)
                }
                Err(_) => ("20 plain launches", median_ns(&stream, ROUNDS, calls)?),
            };
            call.finish()?;
            let table = format!("{of}: microseconds of a call in {timed}");
            figure(&table, bytes, algorithm.name(), ns * 1e-3 / GRAPH_CALLS as f64)?;
        }
    }
    Ok(())
}

pub fn fixed(options: &GpuCheck) -> Result<(), Failure> {
    let _context = context(options.gpu)?;
    as_threads(&[2, 4, 8], "the smallest pull", |session| {
        for (what, registered) in [("staged: one barrier", false), ("registered: two barriers", true)] {
            let gpu_options = gpu_options(options, None, 64 << 10)?;
            let gpu = Gpu::new(session, &gpu_options, Some(Algorithm::OneShotPull))?;
            let mut measure = measure(session, registered);
            let work = measure.all_reduce(DType::F32, 1, ReduceOp::Sum);
            let row = measure.row(&gpu, &work)?;
            if session.rank() == 0 {
                let (name, ranks) = (
                    format!("one-shot-pull of 1 element, {what}"),
                    format!("{} ranks", session.world_size()),
                );
                let time = row.out_of_place.time_us;
                figure("Microseconds of a call in a graph of 20", name, ranks, time)?;
            }
        }
        Ok(())
    })
}

pub fn bandwidth(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let (_context, bytes) = (context(options.gpu)?, launch_bytes(options));
    let table = format!("GB/s read and written, by a two-shot of {bytes} B and by a copy of as much traffic");
    for &world_size in worlds(options) {
        if budget.is_spent() {
            return out_of_time(format!("{table}: from {world_size} ranks on"));
        }
        let row = format!("{world_size} ranks");
        figure(&table, &row, "copy", copy_rate(options, 3 * world_size * bytes / 2)?)?;
        as_threads(&[world_size], "bandwidth", |session| {
            // With registered inputs a rank reads its slice of every input, writes it twice, and reads and writes
            // the other slices: three times its message.
            let traffic = 3 * world_size * bytes;
            let gpu_options = gpu_options(options, None, bytes)?;
            let gpu = Gpu::new(session, &gpu_options, Some(Algorithm::TwoShotPull))?;
            let mut measure = measure(session, true);
            let work = measure.all_reduce(DType::F32, bytes / size_of::<f32>(), ReduceOp::Sum);
            let timed = measure.row(&gpu, &work)?;
            match session.rank() {
                0 => {
                    figure(&table, &row, "two-shot-pull", traffic as f64 / timed.out_of_place.time_us * 1e-3)
                }
                _ => Ok(()),
            }
        })?;
    }
    Ok(())
}

/// Returns the GB/s that a device-to-device copy reads and writes.
fn copy_rate(options: &GpuCheck, bytes: usize) -> Result<f64, Failure> {
    let stream = new_stream(&context(options.gpu)?)?;
    let zeros = || stream.alloc_zeros::<u8>(bytes).map_err(driver("cuMemAlloc"));
    let (from, mut to) = (zeros()?, zeros()?);
    let ns =
        median_ns(&stream, 20, || stream.memcpy_dtod(&from, &mut to).map_err(driver("cuMemcpyDtoDAsync")))?;
    Ok(2.0 * bytes as f64 / ns)
}
