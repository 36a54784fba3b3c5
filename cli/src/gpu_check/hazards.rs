//! Probes of what a driver does to ranks that wait for each other, each a step and so a process with a limit of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUlimit;
use cudarc::driver::DevicePtr as _;
use fast_allreduce::device::cuda::api;
use fast_allreduce::device::cuda::probes::Probes;
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
use fast_allreduce::{Algorithm, DType, Direction, Transfer};

use super::probe::{Bench, Pinned, Work};
use super::record::Record;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

/// How long a kernel spins at most.
const PATIENCE: Duration = Duration::from_millis(400);
/// Until a kernel that was launched runs.
const BEGINNING: Duration = Duration::from_millis(20);

/// What is done while a kernel spins.
type Operation = fn(&Bench) -> Result<(), Failure>;

const OPERATIONS: [(&str, Operation); 7] = [
    ("cuStreamCreate", |bench| bench.context.new_stream().map(drop).map_err(driver("cuStreamCreate"))),
    ("cuMemAlloc of 64 MiB, and cuMemFree", |_| {
        let mut address = 0;
        // SAFETY: the driver writes one address, which is freed at once.
        unsafe {
            api::cuMemAlloc_v2(&mut address, 64 << 20).map_err(driver("cuMemAlloc"))?;
            api::cuMemFree_v2(address).map_err(driver("cuMemFree"))
        }
    }),
    ("cuMemHostAlloc, and cuMemFreeHost", |bench| Pinned::new(&bench.context, 1 << 20).map(drop)),
    ("loading a module, and unloading it", |bench| Ok(Probes::costs(&bench.context).map(drop)?)),
    ("the first use of a kernel (lazy loading)", |bench| {
        let stream = bench.context.new_stream().map_err(driver("cuStreamCreate"))?;
        bench.launch_on(
            &stream,
            bench.function("evict_code")?,
            (1, 32),
            Work { turns: 1, ..Work::default() },
            false,
        )
    }),
    ("cuCtxSetLimit of the stack's size, and a launch", |bench| {
        const STACK: CUlimit = CUlimit::CU_LIMIT_STACK_SIZE;
        let stream = bench.context.new_stream().map_err(driver("cuStreamCreate"))?;
        // SAFETY: sets a number of the current context.
        unsafe { api::cuCtxSetLimit(STACK as u32, 16 << 10) }.map_err(driver("cuCtxSetLimit"))?;
        bench.launch_on(&stream, bench.function("empty")?, (1, 32), Work::default(), false)
    }),
    ("a launch on another stream, and waiting for it", |bench| {
        let stream = bench.context.new_stream().map_err(driver("cuStreamCreate"))?;
        bench.launch_on(&stream, bench.function("empty")?, (1, 32), Work::default(), false)?;
        stream.synchronize().map_err(driver("cuStreamSynchronize"))
    }),
];

/// The step `beside-a-kernel`: which calls of the driver wait for a kernel that spins on another stream.
pub fn beside_a_kernel(options: &GpuCheck) -> Result<(), Failure> {
    let bench = Bench::new(options)?;
    let (spin, mut flag) = (bench.function("spin")?, Pinned::new(&bench.context, 128)?);
    let work = Work { memory: flag.address, count: PATIENCE.as_nanos() as u64, turns: 0 };
    let mut waiting = Vec::new();
    for (name, operation) in OPERATIONS {
        flag.lower();
        bench.launch_on(&bench.stream, spin, (1, 32), work, false)?;
        std::thread::sleep(BEGINNING);
        let start = Instant::now();
        let done = operation(&bench);
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        flag.raise();
        let came = bench.words(1)?[0] == 1;
        if let Err(failure) = done {
            Record::skipped(name, failure).write()?;
            continue;
        }
        // What takes long by itself waits for nothing.
        let start = Instant::now();
        operation(&bench)?;
        let again = start.elapsed().as_secs_f64() * 1e3;
        for (column, value) in [("beside a kernel that spins", milliseconds), ("again, alone", again)] {
            Record::figure("Milliseconds of a call", name, column, value).write()?;
        }
        if !came {
            waiting.push(name);
        }
    }
    let answer = match waiting.is_empty() {
        true => "none of those tried".to_owned(),
        false => waiting.join("; "),
    };
    Record::answer("Which calls wait for a kernel that spins on another stream?", answer).write()
}

/// The step `run-ahead`: whether a rank that launches on and on keeps another thread from the launch that it waits for.
pub fn run_ahead(options: &GpuCheck) -> Result<(), Failure> {
    const LAUNCHES: u32 = 5000;
    let bench = Bench::new(options)?;
    let (spin, empty) = (bench.function("spin")?, bench.function("empty")?);
    let (mut flag, memory) = bench.device_memory(128)?;
    // What is launched below is loaded by then.
    for name in ["raise", "empty", "spin"] {
        bench.run(name, (1, 32), Work { memory, ..Work::default() }, false)?;
    }
    bench.stream.memset_zeros(&mut flag).map_err(driver("cuMemsetD8Async"))?;
    bench.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
    let patience = Duration::from_secs(4);
    let other = bench.context.new_stream().map_err(driver("cuStreamCreate"))?;
    let launches = if bench.small { 50 } else { LAUNCHES };
    let limit = Work { memory, count: patience.as_nanos() as u64, turns: 0 };
    bench.launch_on(&bench.stream, spin, (1, 32), limit, false)?;
    let is_queued = AtomicBool::new(false);
    let (queued, raised) = std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            // After the other has come far.
            std::thread::sleep(Duration::from_millis(300));
            let start = Instant::now();
            let early = !is_queued.load(Ordering::Relaxed);
            let work = Work { memory, ..Work::default() };
            let raised = bench.launch_on(&other, bench.function("raise")?, (1, 32), work, false);
            raised.map(|()| (start.elapsed(), early))
        });
        let start = Instant::now();
        let all = (0..launches)
            .try_for_each(|_| bench.launch_on(&bench.stream, empty, (1, 32), Work::default(), false));
        let queued = all.map(|()| start.elapsed());
        is_queued.store(true, Ordering::Relaxed);
        (queued, peer.join())
    });
    let raised = raised.map_err(|_| Failure::Ranks("the peer's thread has panicked".into()))?;
    let (queued, (raised, early)) = (queued?, raised?);
    bench.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
    other.synchronize().map_err(driver("cuStreamSynchronize"))?;
    let came = bench.words(1)?[0] == 1;
    let table = format!("Milliseconds, {launches} launches behind a kernel that spins");
    Record::figure(&table, "to queue them", "ms", queued.as_secs_f64() * 1e3).write()?;
    Record::figure(&table, "the peer's launch", "ms", raised.as_secs_f64() * 1e3).write()?;
    let answer = match (came, early) {
        (true, true) => "no: it came while they were being queued",
        (true, false) => "no: all were queued before it came",
        (false, _) => "YES: it came only after the kernel had given up",
    };
    Record::answer(
        "Do 5,000 launches that are queued ahead keep a peer in the same process from its launch?",
        answer,
    )
    .write()
}

/// The step `local-memory`: what the first launch of messages takes of the GPU's memory.
pub fn local_memory(options: &GpuCheck) -> Result<(), Failure> {
    const BYTES: usize = 64 << 10;
    let mut world = CooperativeRanks::new(options.gpu, 2, BYTES, 0, Duration::from_secs(5))?;
    let context = std::sync::Arc::clone(world.stream().context());
    let stream = std::sync::Arc::clone(world.stream());
    let memory = stream.alloc_zeros::<u8>(2 * BYTES).map_err(driver("cuMemAlloc"))?;
    stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
    let address = memory.device_ptr(&stream).0;
    // The first half of a rank's memory goes to the second half of its peer's.
    let messages = |rank: usize| {
        let message = |direction, half: usize| Transfer {
            direction,
            peer: 1 - rank,
            address: address + (rank * BYTES + half * BYTES / 2) as u64,
            count: BYTES / 2,
            dtype: DType::U8,
            tag: 0,
        };
        vec![message(Direction::Send, 0), message(Direction::Recv, 1)]
    };
    let free = || context.mem_get_info().map(|(free, _)| free).map_err(driver("cuMemGetInfo"));
    let before = free()?;
    let plan =
        CooperativePlan { algorithm: Algorithm::OneShotPull, blocks: 4, threads: 512, registered: false };
    // SAFETY: the memory holds both messages of both ranks, and outlives the call.
    let mut call = unsafe { world.prepare_transfers_raw(&[messages(0), messages(1)], plan) }?;
    let prepared = free()?;
    call.enqueue()?;
    call.finish()?;
    let after = free()?;
    Record::answer(
        "Does the first launch of messages take memory of the GPU (a stack)?",
        match prepared.saturating_sub(after) {
            0 => "no".to_owned(),
            bytes => format!("YES, {bytes} bytes"),
        },
    )
    .write()?;
    Record::fact(
        "free bytes before the call, when it was prepared, and after it",
        format!("{before}, {prepared}, {after}"),
    )
    .write()
}
