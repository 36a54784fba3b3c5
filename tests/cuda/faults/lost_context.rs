//! Tests a rank whose CUDA context is lost through an illegal access by any kernel of its program, and a rank that
//! leaves during a capture: the other ranks are notified at once, with the reason, and continue without it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{result, CudaContext, CudaGraph, CudaStream};
use fast_allreduce::{Algorithm, Collective, Communicator, Cuda, DType, Error, ReduceOp, Result};

use crate::fixtures::fixture::{compare, download, upload, Plain, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent, LIMIT};
use crate::fixtures::injection::{fail, live, take_back, Of};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::threads;

tests! {
    stand_in_of_parent =>
        a_lost_context_is_told_at_any_step,
        a_context_that_is_lost_while_a_communicator_is_made_is_told,
        a_rank_with_a_lost_context_does_not_hold_up_a_shrink,
        a_rank_whose_call_failed_is_told_in_steps,
        a_drop_during_a_capture_is_told_when_the_calls_have_ended,
        a_drop_during_a_capture_with_calls_running_is_told_after_them,
        replays_end_at_once_when_a_step_has_said_that_a_rank_is_gone;
}

/// `CUDA_ERROR_ILLEGAL_ADDRESS`, and its name.
const ILLEGAL_ADDRESS: u32 = 700;
const NAME: &str = "CUDA_ERROR_ILLEGAL_ADDRESS";

const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

const COUNT: usize = 500;
const BYTES: usize = COUNT * 4;

/// If a rank announces too early that it has left, its peers see it within this time.
const EARLY: Duration = Duration::from_millis(50);

/// Upper bound for "at once". A busy machine takes seconds to wake the threads that notify the peers.
const AT_ONCE: Duration = Duration::from_secs(LIMIT.as_secs() / 3);

/// Runs `body` in a separate process, with a GPU for each of three ranks.
fn alone(test: &str, body: impl FnOnce()) {
    match part() {
        Some(_) => body(),
        None => {
            let mut command = this_test(&format!("faults::lost_context::{test}"), "alone");
            command.env("STAND_IN_DEVICES", "3");
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{test}: {report}"));
        }
    }
}

/// A reusable barrier of `size` threads. If one panics, the others do not wait forever.
struct Meeting {
    size: usize,
    came: AtomicUsize,
}

impl Meeting {
    fn of(size: usize) -> Self {
        Self { size, came: AtomicUsize::new(0) }
    }

    fn wait(&self) {
        let all = (self.came.fetch_add(1, Ordering::SeqCst) + 1).next_multiple_of(self.size);
        until("a meeting", || self.came.load(Ordering::SeqCst) >= all);
    }
}

/// A rank with its own stream and memory.
struct Rank {
    communicator: Communicator<Cuda>,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    memory: [Plain; 2],
    rank: usize,
}

impl Rank {
    fn new(communicator: Communicator<Cuda>, context: Arc<CudaContext>) -> Self {
        let (stream, memory) = (context.new_stream().unwrap(), [(); 2].map(|()| Plain::new(&context, BYTES)));
        let rank = communicator.rank();
        Self { communicator, context, stream, memory, rank }
    }

    /// Starts a sum.
    fn start(&self) -> Result<()> {
        let [input, output] = [0, 1].map(|which: usize| self.memory[which].address);
        let stream = self.stream.cu_stream();
        // SAFETY: the memory is this rank's, and lives until the stream is synchronised.
        unsafe {
            self.communicator.collective_raw(
                stream,
                Collective::AllReduce(ReduceOp::Sum),
                input,
                output,
                COUNT,
                DType::F32,
            )
        }
    }

    fn call(&self) -> Result<()> {
        self.start()?;
        self.communicator.synchronize(&self.stream)
    }

    /// Makes a sum and checks it.
    fn check(&self) {
        let ones = 1f32.to_ne_bytes().repeat(COUNT);
        upload(&self.stream, self.memory[0].address, &ones);
        upload(&self.stream, self.memory[1].address, &[0xA5; BYTES]);
        self.call().unwrap();
        let sum = (self.communicator.world_size() as f32).to_ne_bytes().repeat(COUNT);
        compare(&download(&self.stream, self.memory[1].address, BYTES), &sum, 4).unwrap();
    }

    fn capture(&self) -> CudaGraph {
        self.stream.begin_capture(MODE).unwrap();
        self.start().unwrap();
        self.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap()
    }

    /// Loses the context, as if some kernel of the program had made an illegal access.
    fn lose_context(&self) {
        self.context.bind_to_thread().unwrap();
        fail("cuMemAlloc", 1, ILLEGAL_ADDRESS, Of::ThisThread);
        // SAFETY: the call allocates nothing.
        let refused = unsafe { result::malloc_sync(8) }.unwrap_err();
        assert_eq!((refused.0 as u32, take_back()), (ILLEGAL_ADDRESS, 0));
    }
}

/// Resets a GPU after its context was lost; nothing remains on it.
fn reset(context: &CudaContext) {
    // SAFETY: nothing runs, and no object of the context is used again.
    unsafe { sys::cuDevicePrimaryCtxReset_v2(context.cu_device()) }.result().unwrap();
}

/// Waits until `holds` returns true, which another thread causes.
fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The step of a rank after its context is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Call,
    Message,
    Barrier,
    Synchronize,
    CallInACapture,
    DropInACapture,
    Alloc,
    Register,
    SymmetricMemory,
    RegisterGraphBuffers,
    Replay,
    Split,
    Drop,
}

const STEPS: [Step; 13] = [
    Step::Call,
    Step::Message,
    Step::Barrier,
    Step::Synchronize,
    Step::CallInACapture,
    Step::DropInACapture,
    Step::Alloc,
    Step::Register,
    Step::SymmetricMemory,
    Step::RegisterGraphBuffers,
    Step::Replay,
    Step::Split,
    Step::Drop,
];

/// Rank 1 loses its context before a step. Ranks 0 and 2 take part in the step if it is collective, and then call.
fn loses_its_context(step: Step, keeps: bool) {
    let announced = Meeting::of(3);
    threads(3, 3, |bootstrap, context| {
        let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
        let rank = Rank::new(setup.try_build(context.clone(), bootstrap).unwrap(), context.clone());
        rank.check();
        let graph = rank.capture();
        rank.communicator.register_graph_buffers().unwrap();
        let slice = crate::memory::registration::plain_slice(&rank.stream, BYTES);
        rank.communicator.barrier().unwrap();
        let communicator = &rank.communicator;
        let started = Instant::now();
        if rank.rank == 1 {
            if matches!(step, Step::CallInACapture | Step::DropInACapture) {
                rank.stream.begin_capture(MODE).unwrap();
                rank.start().unwrap();
            }
            rank.lose_context();
            let failed = match step {
                Step::Call | Step::CallInACapture => rank.start().err(),
                Step::Message => communicator.send(&rank.stream, &slice, 0, 7).err(),
                Step::Barrier => communicator.barrier_on(&rank.stream).err(),
                Step::Synchronize => communicator.synchronize(&rank.stream).err(),
                Step::Alloc => communicator.alloc::<f32>(COUNT).err(),
                Step::Register => communicator.register(slice).err(),
                Step::SymmetricMemory => communicator.symmetric_memory::<f32>(COUNT).err(),
                Step::RegisterGraphBuffers => communicator.register_graph_buffers().err(),
                Step::Replay => {
                    assert!(graph.launch().is_err());
                    communicator.synchronize(&rank.stream).err()
                }
                Step::Split => communicator.split(Some(0), 0).err(),
                Step::Drop | Step::DropInACapture => None,
            };
            if !matches!(step, Step::Drop | Step::DropInACapture) {
                let error = failed.unwrap_or_else(|| panic!("{step:?} succeeds without a context"));
                assert!(error.to_string().contains(NAME), "{step:?}: {error}");
            }
            // An error that poisons the communicator is announced while the communicator still exists.
            if keeps {
                assert!(communicator.synchronize(&rank.stream).is_err());
                announced.wait();
            }
            drop(rank.communicator);
            assert!(started.elapsed() < AT_ONCE, "{step:?}: rank 1 took {:?} to leave", started.elapsed());
            if !keeps {
                announced.wait();
            }
        } else {
            let other = match step {
                Step::Alloc => communicator.alloc::<f32>(COUNT).err(),
                Step::Register => communicator.register(slice).err(),
                Step::SymmetricMemory => communicator.symmetric_memory::<f32>(COUNT).err(),
                Step::RegisterGraphBuffers => communicator.register_graph_buffers().err(),
                Step::Split => communicator.split(Some(0), 0).err(),
                _ => None,
            };
            // A collective step reports the reason, or that the rank has left.
            if let Some(error) = other {
                let is_about_1 =
                    matches!(error, Error::PeerFailed { rank: 1, .. } | Error::PeerLost { rank: 1, .. });
                assert!(is_about_1, "{step:?}, rank {}: {error}", rank.rank);
            }
            let error = rank.call().unwrap_err();
            let is_reported =
                matches!(&error, Error::PeerFailed { rank: 1, reason } if reason.contains(NAME));
            assert!(is_reported, "{step:?}, rank {}: {error}", rank.rank);
            until("survivors", || communicator.survivors() == [0, 2]);
            let smaller = communicator.shrink(&[0, 2]).unwrap();
            assert!(started.elapsed() < AT_ONCE, "{step:?}, rank {}: {:?}", rank.rank, started.elapsed());
            let (stream, memory) = (rank.stream.clone(), [(); 2].map(|()| Plain::new(&context, BYTES)));
            let index = smaller.rank();
            let rank = Rank { communicator: smaller, context, stream, memory, rank: index };
            rank.check();
            rank.communicator.barrier().unwrap();
            announced.wait();
        }
    });
}

fn a_lost_context_is_told_at_any_step() {
    alone("a_lost_context_is_told_at_any_step", || {
        let contexts = [0, 1, 2].map(context);
        let before = live();
        for step in STEPS {
            for keeps in [false, true] {
                // In these steps rank 1 announces nothing before it drops its communicator.
                let says_nothing = matches!(step, Step::Drop | Step::DropInACapture);
                if keeps && says_nothing {
                    continue;
                }
                loses_its_context(step, keeps);
                reset(&contexts[1]);
                assert_eq!(live(), before, "{step:?}: objects are left");
            }
        }
    });
}

/// Tests steps of a rank whose peer has failed, but keeps its communicator: they report the failure.
fn a_rank_whose_call_failed_is_told_in_steps() {
    alone("a_rank_whose_call_failed_is_told_in_steps", || {
        for step in [Step::Alloc, Step::Register, Step::SymmetricMemory, Step::Split, Step::Barrier] {
            let announced = Meeting::of(2);
            threads(2, 2, |bootstrap, context| {
                let communicator = Setup::default().try_build(context.clone(), bootstrap).unwrap();
                let rank = Rank::new(communicator, context.clone());
                let slice = rank.stream.clone_htod(&[0u8; 64]).unwrap();
                let communicator = &rank.communicator;
                communicator.barrier().unwrap();
                if rank.rank == 1 {
                    fail("cuLaunchKernel", 1, sys::CUresult::CUDA_ERROR_UNKNOWN as u32, Of::ThisThread);
                    rank.call().unwrap_err();
                    assert_eq!(take_back(), 0);
                } else {
                    let started = Instant::now();
                    let error = match step {
                        Step::Alloc => communicator.alloc::<f32>(COUNT).err(),
                        Step::Register => communicator.register(slice).err(),
                        Step::SymmetricMemory => communicator.symmetric_memory::<f32>(COUNT).err(),
                        Step::Split => communicator.split(Some(0), 0).err(),
                        _ => communicator.barrier().err(),
                    };
                    let Some(Error::PeerFailed { rank: 1, reason }) = &error else {
                        panic!("{step:?}: {error:?}")
                    };
                    assert!(reason.contains("CUDA_ERROR_UNKNOWN"), "{step:?}: {reason}");
                    assert!(started.elapsed() < AT_ONCE, "{step:?}: {:?}", started.elapsed());
                }
                let smaller = communicator.shrink(&[0, 1]).unwrap();
                smaller.barrier().unwrap();
                announced.wait();
            });
        }
    });
}

/// Tests a context that is lost in each part of creating a communicator: no rank gets one, and each reports the reason.
fn a_context_that_is_lost_while_a_communicator_is_made_is_told() {
    alone("a_context_that_is_lost_while_a_communicator_is_made_is_told", || {
        let contexts = [0, 1, 2].map(context);
        let before = live();
        for (function, nth) in [
            ("cuMemCreate", 1),
            ("cuMemsetD8Async", 1),
            ("cuMemSetAccess", 2),
            // Of the check of the region: writing, reading, comparing, clearing.
            ("cuLaunchKernel", 2),
            ("cuLaunchKernel", 5),
            ("cuMemcpyDtoHAsync", 1),
            ("cuMemsetD8Async", 2),
            ("cuMemHostAlloc", 1),
            ("cuDeviceGetUuid", 1),
            // Queries what the kernels were compiled for.
            ("cuFuncGetAttribute", 1),
        ] {
            threads(3, 3, |bootstrap, context| {
                use fast_allreduce::bootstrap::Bootstrap as _;
                let (rank, started) = (bootstrap.rank(), Instant::now());
                // The modules are already loaded.
                let device = Cuda::new(context.clone()).unwrap().programmatic_launch(true);
                if rank == 1 {
                    fail(function, nth, ILLEGAL_ADDRESS, Of::ThisThread);
                }
                let made =
                    Communicator::builder().max_bytes(32 << 10).timeout(LIMIT).build(device, bootstrap);
                let error = made.map(drop).unwrap_err();
                let is_reported = match &error {
                    Error::PeerFailed { rank: 1, reason } => rank != 1 && reason.contains(NAME),
                    error => rank == 1 && error.to_string().contains(NAME),
                };
                assert!(is_reported, "{function} {nth}: rank {rank}: {error}");
                assert!(
                    started.elapsed() < AT_ONCE,
                    "{function} {nth}: rank {rank}: {:?}",
                    started.elapsed()
                );
            });
            assert_eq!(take_back(), 0, "{function} {nth}");
            reset(&contexts[1]);
            assert_eq!(live(), before, "{function} {nth}: objects are left");
        }
    });
}

/// Tests a rank that has lost its context without noticing, and therefore counts as a survivor.
fn a_rank_with_a_lost_context_does_not_hold_up_a_shrink() {
    alone("a_rank_with_a_lost_context_does_not_hold_up_a_shrink", || {
        threads(3, 3, |bootstrap, context| {
            let setup = Setup::with(Algorithm::TwoShotPush);
            let rank = Rank::new(setup.try_build(context.clone(), bootstrap).unwrap(), context.clone());
            rank.check();
            rank.communicator.barrier().unwrap();
            let started = Instant::now();
            match rank.rank {
                0 => {
                    let error = rank.communicator.shrink(&[0, 1]).unwrap_err();
                    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
                    until("survivors", || rank.communicator.survivors() == [0]);
                    rank.communicator.shrink(&[0]).unwrap();
                }
                1 => {
                    rank.lose_context();
                    let error = rank.communicator.shrink(&[0, 1]).unwrap_err();
                    assert!(error.to_string().contains(NAME), "{error}");
                }
                _ => {}
            }
            assert!(started.elapsed() < AT_ONCE, "rank {}: {:?}", rank.rank, started.elapsed());
        });
    });
}

/// How it is known, before a rank captures, that its calls have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The communicator has synchronised the calls.
    Synchronized,
    /// The program has synchronised the stream, without the communicator.
    WaitedFor,
    /// The rank captures another stream, which is ordered after the calls.
    OnAnotherStream,
}

fn a_drop_during_a_capture_is_told_when_the_calls_have_ended() {
    alone("a_drop_during_a_capture_is_told_when_the_calls_have_ended", || {
        for known in [Known::Synchronized, Known::WaitedFor, Known::OnAnotherStream] {
            let left = Meeting::of(2);
            threads(2, 2, |bootstrap, context| {
                let setup = Setup::with(Algorithm::OneShotPush);
                let mut rank =
                    Rank::new(setup.try_build(context.clone(), bootstrap).unwrap(), context.clone());
                for _ in 0..3 {
                    match known {
                        Known::Synchronized => rank.call().unwrap(),
                        _ => {
                            rank.start().unwrap();
                            rank.stream.synchronize().unwrap();
                        }
                    }
                }
                rank.communicator.barrier().unwrap();
                if rank.rank == 1 {
                    // The last call's stream lives until the communicator is dropped.
                    let last = Arc::clone(&rank.stream);
                    if known == Known::OnAnotherStream {
                        rank.stream = context.new_stream().unwrap();
                    }
                    let stream = Arc::clone(&rank.stream);
                    stream.begin_capture(MODE).unwrap();
                    rank.start().unwrap();
                    drop((rank.communicator, last));
                    left.wait();
                    assert!(
                        stream.end_capture(CUgraphInstantiate_flags(0)).is_ok(),
                        "{known:?}: the capture was invalidated"
                    );
                    left.wait();
                    return;
                }
                left.wait();
                assert_eq!(rank.communicator.survivors(), [0], "{known:?}");
                let started = Instant::now();
                let error = rank.call().unwrap_err();
                let Error::PeerLost { rank: 1, reason } = &error else { panic!("{known:?}: {error}") };
                assert!(reason.contains("captured call 4, all_reduce"), "{known:?}: {error}");
                assert!(started.elapsed() < AT_ONCE, "{known:?}: {:?}", started.elapsed());
                left.wait();
            });
        }
    });
}

/// The work that runs on the rank that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Running {
    /// A call on the caller's raw stream, of which the communicator keeps no handle.
    RawCall,
    /// A call after a replay, which the communicator does not observe.
    CallAfterReplay,
    /// A replay alone.
    Replay,
}

/// Tests that the running calls end with correct data, and that then no rank waits for the one that left.
fn a_drop_during_a_capture_with_calls_running_is_told_after_them() {
    alone("a_drop_during_a_capture_with_calls_running_is_told_after_them", || {
        for (running, algorithm) in [
            (Running::RawCall, Algorithm::TwoShotPull),
            // Advances most counts before it sends its results.
            (Running::RawCall, Algorithm::TwoShotPush),
            (Running::CallAfterReplay, Algorithm::TwoShotPull),
            (Running::Replay, Algorithm::TwoShotPull),
        ] {
            let left = Meeting::of(2);
            threads(2, 2, |bootstrap, context| {
                let setup = Setup::with(algorithm);
                let rank = Rank::new(setup.try_build(context.clone(), bootstrap).unwrap(), context.clone());
                let mut data = rank.stream.clone_htod(&[1f32; COUNT]).unwrap();
                let mut call =
                    || rank.communicator.all_reduce_in_place(&rank.stream, &mut data, ReduceOp::Sum).unwrap();
                let graph = (running != Running::RawCall).then(|| {
                    call();
                    rank.capture()
                });
                if let Some(graph) = &graph {
                    graph.launch().unwrap();
                    rank.communicator.synchronize(&rank.stream).unwrap();
                    rank.communicator.barrier().unwrap();
                }
                if rank.rank == 1 {
                    match running {
                        Running::RawCall => rank.start().unwrap(),
                        Running::CallAfterReplay => call(),
                        Running::Replay => graph.as_ref().unwrap().launch().unwrap(),
                    }
                    rank.stream.begin_capture(MODE).unwrap();
                    drop(rank.communicator);
                    left.wait();
                    // After a replay it is unknown until the end of the capture whether the work has ended.
                    rank.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
                    left.wait();
                    return;
                }
                left.wait();
                assert_eq!(rank.communicator.survivors(), [0], "{running:?}");
                // Long enough to see an announcement by rank 1 that comes too early.
                std::thread::sleep(EARLY);
                rank.call().unwrap_or_else(|error| panic!("{running:?}: {error}"));
                let started = Instant::now();
                let error = rank.call().unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{running:?}: {error}");
                assert!(started.elapsed() < AT_ONCE, "{running:?}: {:?}", started.elapsed());
                left.wait();
            });
        }
    });
}

/// Rank 1 leaves while it is unknown whether its calls have ended, because replays count as calls. Rank 0 is notified
/// in a collective step; from then on its replays fail at once.
fn replays_end_at_once_when_a_step_has_said_that_a_rank_is_gone() {
    alone("replays_end_at_once_when_a_step_has_said_that_a_rank_is_gone", || {
        let left = Meeting::of(2);
        threads(2, 2, |bootstrap, context| {
            let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
            let rank = Rank::new(setup.try_build(context.clone(), bootstrap).unwrap(), context.clone());
            let graph = rank.capture();
            rank.communicator.register_graph_buffers().unwrap();
            rank.start().unwrap();
            graph.launch().unwrap();
            rank.stream.synchronize().unwrap();
            rank.communicator.barrier().unwrap();
            if rank.rank == 1 {
                rank.stream.begin_capture(MODE).unwrap();
                drop(rank.communicator);
                left.wait();
                left.wait();
                rank.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
                return;
            }
            left.wait();
            let error = rank.communicator.register_graph_buffers().unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
            let started = Instant::now();
            graph.launch().unwrap();
            let error = rank.communicator.synchronize(&rank.stream).unwrap_err();
            let Error::PeerLost { rank: 1, reason } = &error else { panic!("{error}") };
            assert!(reason.contains("during a capture"), "{error}");
            assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
            left.wait();
        });
    });
}
