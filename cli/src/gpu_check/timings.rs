//! Measurements: what a call takes, what is fixed of that, and how near the memory's bandwidth it comes.
//!
//! Latency is measured twice: with ranks as threads, the launches that are in use, and with all ranks in one cooperative
//! launch, in which CUDA promises that they all make progress. Either way events around replays of a graph are the clock.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream};
use fast_allreduce::device::cuda::{api, CooperativeCall, CooperativePlan, CooperativeRanks};
use fast_allreduce::{Algorithm, DType, ReduceOp};

use super::collectives::grid;
use super::ranks::{as_threads, settings, TIMEOUT};
use super::record::Record;
use super::steps::Budget;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda::{Gpu, Settings, GRAPH_CALLS};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;

const SEED: u64 = 0x5eed;

/// Powers of 4 from 1 KiB.
fn sizes(options: &GpuCheck) -> impl Iterator<Item = usize> {
    let largest: usize = if options.small { 64 << 10 } else { 64 << 20 };
    std::iter::successors(Some(1 << 10), |size| Some(size * 4)).take_while(move |&size| size <= largest)
}

fn launch_bytes(options: &GpuCheck) -> usize {
    if options.small {
        1 << 20
    } else {
        64 << 20
    }
}

fn timing(session: &Session, iterations: Option<u64>, registered: bool) -> Measure<'_> {
    let effort = Effort { iterations, warmup: GRAPH_CALLS, checks: 1, registered };
    Measure { session, effort, seed: SEED, round: 0 }
}

/// The step `latency`.
pub fn latency(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let settings = Settings { eager: false, ..settings(options, None, launch_bytes(options))? };
    let worlds: &[usize] = if options.small { &[2] } else { &[2, 4, 8] };
    // First, because it needs nothing but the GPU; it may take half of the time.
    for &world_size in worlds {
        let part = Budget::share(options, 2 * worlds.len() as u32);
        if let Err(failure) = world_latency(options, world_size, part) {
            Record::check(format!("latency of a world of {world_size}"), 0, Err(failure)).write()?;
        }
    }
    as_threads(worlds, "latency", |session| {
        let table = format!(
            "f32 sum, {} ranks as threads, registered inputs: microseconds of a call in a graph of {GRAPH_CALLS}",
            session.world_size()
        );
        let choices = Algorithm::DIRECT.into_iter().map(Some).chain([None]);
        let mut gpus =
            choices.map(|choice| Gpu::new(session, &settings, choice)).collect::<Result<Vec<_>, _>>()?;
        let mut programmatic = settings.clone();
        programmatic.given.set("programmatic_launch", "1")?;
        gpus.push(Gpu::new(session, &programmatic, None)?);
        let mut measure = timing(session, None, true);
        let mut wrong = 0;
        'sizes: for bytes in sizes(options) {
            for (index, gpu) in gpus.iter().enumerate() {
                let column = match Algorithm::DIRECT.get(index) {
                    Some(algorithm) => algorithm.name(),
                    None if index == Algorithm::DIRECT.len() => "auto",
                    None => "auto, programmatic launch",
                };
                // One of them decides for all.
                if session.of_first(u64::from(budget.is_spent()))? != 0 {
                    if session.rank() == 0 {
                        let left = format!("{table}: from {bytes} B, {column} on");
                        Record::skipped(left, "the step's time was over").write()?;
                    }
                    break 'sizes;
                }
                let work = measure.all_reduce(DType::F32, bytes / size_of::<f32>(), ReduceOp::Sum);
                let row = measure.row(gpu, &work)?;
                wrong += row.wrong();
                if session.rank() == 0 {
                    Record::figure(&table, bytes, column, row.out_of_place.time_us).write()?;
                }
            }
        }
        if session.rank() == 0 && wrong > 0 {
            let failure = Failure::Ranks(format!("{wrong} wrong elements"));
            Record::check(&table, 1, Err(failure)).write()?;
        }
        Ok(())
    })?;
    Ok(())
}

/// One cooperative launch for all ranks of a call.
fn world_latency(options: &GpuCheck, world_size: usize, budget: Budget) -> Result<(), Failure> {
    let mut world = CooperativeRanks::new(options.gpu, world_size, launch_bytes(options), 0, TIMEOUT)?;
    // SAFETY: all work on memory of this context is on the world's stream, in whose order it is also freed.
    unsafe { world.stream().context().disable_event_tracking() };
    let stream = Arc::clone(world.stream());
    let title = |timed| {
        format!("f32 sum, {world_size} ranks in one cooperative launch, registered inputs: microseconds of a call in {timed}")
    };
    for bytes in sizes(options) {
        let count = bytes / size_of::<f32>();
        let zeros =
            || (0..world_size).map(|_| stream.alloc_zeros::<f32>(count)).collect::<Result<Vec<_>, _>>();
        let (inputs, mut outputs) =
            (zeros().map_err(driver("cuMemAlloc"))?, zeros().map_err(driver("cuMemAlloc"))?);
        for algorithm in Algorithm::DIRECT {
            if budget.is_spent() {
                let left = format!("{}: from {bytes} B, {algorithm} on", title("a graph"));
                return Record::skipped(left, "the step's time was over").write();
            }
            let (blocks, threads) = grid(&world, bytes);
            let plan = CooperativePlan { algorithm, blocks, threads, registered: true };
            let mut call = world.prepare(&inputs, &mut outputs, 0, count, ReduceOp::Sum, plan)?;
            let (timed, microseconds) = time_calls(&stream, &mut call)?;
            Record::figure(&title(timed), bytes, algorithm.name(), microseconds).write()?;
        }
    }
    Ok(())
}

/// How a call was timed, and what it took: the median of some rounds of [`GRAPH_CALLS`] calls.
fn time_calls(
    stream: &Arc<CudaStream>,
    call: &mut CooperativeCall<'_>,
) -> Result<(&'static str, f64), Failure> {
    const ROUNDS: usize = 5;
    let event = || {
        let event = stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(driver("cuEventCreate"))
    };
    let (start, end) = (event()?, event()?);
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).map_err(driver("cuStreamBeginCapture"))?;
    let captured = (0..GRAPH_CALLS).try_for_each(|_| call.enqueue());
    // A driver that does not capture cooperative launches is no reason to measure nothing.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).ok().flatten().filter(|_| captured.is_ok());
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        start.record(stream).map_err(driver("cuEventRecord"))?;
        match &graph {
            Some(graph) => graph.launch().map_err(driver("cuGraphLaunch"))?,
            None => (0..GRAPH_CALLS).try_for_each(|_| call.enqueue())?,
        }
        end.record(stream).map_err(driver("cuEventRecord"))?;
        call.finish()?;
        let milliseconds = start.elapsed_ms(&end).map_err(driver("cuEventElapsedTime"))?;
        // The first warms up.
        if round > 0 {
            times.push(f64::from(milliseconds) * 1e3 / GRAPH_CALLS as f64);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    let timed = if graph.is_some() { "a graph of 20" } else { "20 plain launches" };
    Ok((timed, times[ROUNDS / 2]))
}

/// The step `fixed`.
pub fn fixed(options: &GpuCheck) -> Result<(), Failure> {
    if let Err(failure) = empty_launch(options) {
        Record::skipped("an empty launch", failure).write()?;
    }
    as_threads(&[2, 4, 8], "the smallest pull", |session| {
        for (what, registered) in [("staged: one barrier", false), ("registered: two barriers", true)] {
            let settings = settings(options, None, 64 << 10)?;
            let gpu = Gpu::new(session, &settings, Some(Algorithm::OneShotPull))?;
            let mut measure = timing(session, None, registered);
            let work = measure.all_reduce(DType::F32, 1, ReduceOp::Sum);
            let row = measure.row(&gpu, &work)?;
            if session.rank() == 0 {
                let of = format!("one-shot-pull of 1 element, {what}");
                Record::figure(
                    FIXED,
                    of,
                    format!("{} ranks", session.world_size()),
                    row.out_of_place.time_us,
                )
                .write()?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

const FIXED: &str = "Microseconds of a call in a graph of 20";

/// A kernel that does nothing, compiled by the driver.
fn empty_launch(options: &GpuCheck) -> Result<(), Failure> {
    const PTX: &CStr = c".version 6.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n";
    const LAUNCHES: u32 = 1000;
    let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
    context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the image is text that ends with a zero. The module stays until this step's process ends. The driver writes a
    // handle each.
    unsafe {
        api::cuModuleLoadData(&mut module, PTX.as_ptr().cast()).map_err(driver("cuModuleLoadData"))?;
        api::cuModuleGetFunction(&mut function, module, c"empty".as_ptr())
            .map_err(driver("cuModuleGetFunction"))?;
    }
    let stream = context.new_stream().map_err(driver("cuStreamCreate"))?;
    let event = || {
        let event = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(driver("cuEventCreate"))
    };
    let (start, end) = (event()?, event()?);
    let launch = || {
        let (stream, none) = (stream.cu_stream(), std::ptr::null_mut());
        // SAFETY: the kernel takes no arguments and touches no memory.
        unsafe { api::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, none, none) }
            .map_err(driver("cuLaunchKernel"))
    };
    for _ in 0..2 {
        start.record(&stream).map_err(driver("cuEventRecord"))?;
        (0..LAUNCHES).try_for_each(|_| launch())?;
        end.record(&stream).map_err(driver("cuEventRecord"))?;
    }
    let milliseconds = start.elapsed_ms(&end).map_err(driver("cuEventElapsedTime"))?;
    let table = "Microseconds of an empty kernel, back to back";
    Record::figure(table, "plain launches", "1 block", f64::from(milliseconds) * 1e3 / f64::from(LAUNCHES))
        .write()
}

/// The step `bandwidth`.
pub fn bandwidth(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let bytes = if options.small { 1 << 20 } else { 64 << 20 };
    let worlds: &[usize] = if options.small { &[2] } else { &[2, 4, 8] };
    let table = format!("GB/s read and written, by a two-shot of {bytes} B and by a copy of as much traffic");
    for &world_size in worlds {
        if budget.is_spent() {
            return Record::skipped(
                format!("{table}: from {world_size} ranks on"),
                "the step's time was over",
            )
            .write();
        }
        let row = format!("{world_size} ranks");
        let rate = copy_rate(options, 3 * world_size * bytes / 2)?;
        Record::figure(&table, &row, "copy", rate).write()?;
        as_threads(&[world_size], "bandwidth", |session| {
            // With registered inputs a rank reads its slice of every input, writes it twice, and reads and writes the other
            // slices: three times its message.
            let traffic = 3 * world_size * bytes;
            let settings = settings(options, None, launch_bytes(options))?;
            let gpu = Gpu::new(session, &settings, Some(Algorithm::TwoShotPull))?;
            let mut measure = timing(session, None, true);
            let work = measure.all_reduce(DType::F32, bytes / size_of::<f32>(), ReduceOp::Sum);
            let timed = measure.row(&gpu, &work)?;
            if session.rank() == 0 {
                let rate = traffic as f64 / timed.out_of_place.time_us * 1e-3;
                Record::figure(&table, &row, "two-shot-pull", rate).write()?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// GB/s that a device-to-device copy reads and writes.
fn copy_rate(options: &GpuCheck, bytes: usize) -> Result<f64, Failure> {
    const COPIES: u32 = 20;
    let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
    let stream = context.new_stream().map_err(driver("cuStreamCreate"))?;
    let zeros = || stream.alloc_zeros::<u8>(bytes).map_err(driver("cuMemAlloc"));
    let (from, mut to) = (zeros()?, zeros()?);
    let event = || {
        let event = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(driver("cuEventCreate"))
    };
    let (start, end) = (event()?, event()?);
    for _ in 0..2 {
        start.record(&stream).map_err(driver("cuEventRecord"))?;
        for _ in 0..COPIES {
            stream.memcpy_dtod(&from, &mut to).map_err(driver("cuMemcpyDtoDAsync"))?;
        }
        end.record(&stream).map_err(driver("cuEventRecord"))?;
    }
    let milliseconds = start.elapsed_ms(&end).map_err(driver("cuEventElapsedTime"))?;
    Ok(2.0 * bytes as f64 * f64::from(COPIES) / f64::from(milliseconds) * 1e-6)
}
