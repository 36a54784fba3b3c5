//! Probes of what a driver does to ranks that wait for each other. Each is a step, and so a process with its own limit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUlimit;
use fast_allreduce::device::cuda::api;
use fast_allreduce::device::cuda::probes::Probes;

use super::probe::{new_stream, synchronize, Pinned, ProbeRunner, Workload};
use super::record::{answer, figure, skipped};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

/// Longest time that a kernel spins.
const SPIN_LIMIT: Duration = Duration::from_millis(400);
/// Time after which a launched kernel is running.
const LAUNCH_TIME: Duration = Duration::from_millis(20);

/// A call of the driver, made while a kernel spins.
type Operation = fn(&ProbeRunner) -> Result<(), Failure>;

const OPERATIONS: [(&str, Operation); 7] = [
    ("cuStreamCreate", |probes| new_stream(&probes.context).map(drop)),
    ("cuMemAlloc of 64 MiB, and cuMemFree", |_| {
        let mut address = 0;
        // SAFETY: the driver writes one address, which is freed at once.
        unsafe {
            api::cuMemAlloc_v2(&mut address, 64 << 20).map_err(driver("cuMemAlloc"))?;
            api::cuMemFree_v2(address).map_err(driver("cuMemFree"))
        }
    }),
    ("cuMemHostAlloc, and cuMemFreeHost", |probes| Pinned::new(&probes.context, 1 << 20).map(drop)),
    ("loading a module, and unloading it", |probes| Ok(Probes::costs(&probes.context).map(drop)?)),
    ("the first use of a kernel (lazy loading)", |probes| launch(probes, "evict_code").map(drop)),
    ("cuCtxSetLimit of the stack's size, and a launch", |probes| {
        const STACK: CUlimit = CUlimit::CU_LIMIT_STACK_SIZE;
        // SAFETY: sets a limit of the current context.
        unsafe { api::cuCtxSetLimit(STACK as u32, 16 << 10) }.map_err(driver("cuCtxSetLimit"))?;
        launch(probes, "empty").map(drop)
    }),
    ("a launch on another stream, and waiting for it", |probes| synchronize(&*launch(probes, "empty")?)),
];

/// Launches a kernel on a new stream.
fn launch(probes: &ProbeRunner, name: &str) -> Result<std::sync::Arc<cudarc::driver::CudaStream>, Failure> {
    let stream = new_stream(&probes.context)?;
    let workload = Workload { iterations: 1, ..Workload::default() };
    probes.launch_on(&stream, probes.function(name)?, (1, 32), workload, false)?;
    Ok(stream)
}

/// Runs the step `beside-a-kernel`, which finds calls of the driver that wait for a kernel spinning on another stream.
pub fn beside_a_kernel(options: &GpuCheck) -> Result<(), Failure> {
    let probes = ProbeRunner::new(options)?;
    let (spin, mut flag) = (probes.function("spin")?, Pinned::new(&probes.context, 128)?);
    let workload = Workload { memory: flag.address, count: SPIN_LIMIT.as_nanos() as u64, iterations: 0 };
    let mut waiting = Vec::new();
    for (name, operation) in OPERATIONS {
        flag.write(&[0]);
        probes.launch_on(&probes.stream, spin, (1, 32), workload, false)?;
        std::thread::sleep(LAUNCH_TIME);
        let start = Instant::now();
        let outcome = operation(&probes);
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        flag.raise();
        let saw_flag = probes.words(1)?[0] == 1;
        if let Err(failure) = outcome {
            skipped(name, failure)?;
            continue;
        }
        // Without the kernel, for calls that take long anyway.
        let start = Instant::now();
        operation(&probes)?;
        let alone = start.elapsed().as_secs_f64() * 1e3;
        for (column, value) in [("beside a kernel that spins", milliseconds), ("again, alone", alone)] {
            figure("Milliseconds of a call", name, column, value)?;
        }
        if !saw_flag {
            waiting.push(name);
        }
    }
    let waiting = if waiting.is_empty() { "none of those tried".to_owned() } else { waiting.join("; ") };
    answer("Which calls wait for a kernel that spins on another stream?", waiting)
}

/// Runs the step `run-ahead`: whether a rank that queues launch after launch blocks the launch of a peer's thread
/// that its first kernel waits for.
pub fn run_ahead(options: &GpuCheck) -> Result<(), Failure> {
    const LAUNCHES: u32 = 5000;
    const LIMIT: Duration = Duration::from_secs(4);
    let probes = ProbeRunner::new(options)?;
    let (spin, empty) = (probes.function("spin")?, probes.function("empty")?);
    let (mut flag, memory) = probes.device_memory(128)?;
    let workload = Workload { memory, ..Workload::default() };
    // Loads the kernels that are launched below.
    for name in ["raise", "empty", "spin"] {
        probes.run(name, (1, 32), workload, false)?;
    }
    probes.stream.memset_zeros(&mut flag).map_err(driver("cuMemsetD8Async"))?;
    synchronize(&probes.stream)?;
    let other = new_stream(&probes.context)?;
    let launches = if probes.small { 50 } else { LAUNCHES };
    let spinning = Workload { memory, count: LIMIT.as_nanos() as u64, iterations: 0 };
    probes.launch_on(&probes.stream, spin, (1, 32), spinning, false)?;
    let is_queued = AtomicBool::new(false);
    let (queued, raised) = std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            // Until the other thread has queued many launches.
            std::thread::sleep(Duration::from_millis(300));
            let start = Instant::now();
            let early = !is_queued.load(Ordering::Relaxed);
            probes.launch_on(&other, probes.function("raise")?, (1, 32), workload, false)?;
            Ok::<_, Failure>((start.elapsed(), early))
        });
        let start = Instant::now();
        let all = (0..launches)
            .try_for_each(|_| probes.launch_on(&probes.stream, empty, (1, 32), Workload::default(), false));
        let queued = all.map(|()| start.elapsed());
        is_queued.store(true, Ordering::Relaxed);
        (queued, peer.join())
    });
    let raised = raised.map_err(|_| Failure::Ranks("the peer's thread has panicked".into()))?;
    let (queued, (raised, early)) = (queued?, raised?);
    synchronize(&probes.stream)?;
    synchronize(&other)?;
    let saw_flag = probes.words(1)?[0] == 1;
    let table = format!("Milliseconds, {launches} launches behind a kernel that spins");
    figure(&table, "to queue them", "ms", queued.as_secs_f64() * 1e3)?;
    figure(&table, "the peer's launch", "ms", raised.as_secs_f64() * 1e3)?;
    let question = "Do 5,000 launches that are queued ahead keep a peer in the same process from its launch?";
    answer(
        question,
        match (saw_flag, early) {
            (true, true) => "no: it was launched while they were being queued",
            (true, false) => "no: all were queued before it was launched",
            (false, _) => "YES: it was launched only after the kernel had timed out",
        },
    )
}
