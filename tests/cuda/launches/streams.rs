//! Tests streams of all kinds, and communicators that are dropped while work is on them.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr};
use fast_allreduce::interruption::while_waiting;
use fast_allreduce::{Algorithm, Collective, Communicator, Cuda, DType, Error, ReduceOp};

use crate::fixtures::fixture::{
    compare, download, upload, Fixture, MemoryKind, Message, Placement, Plain, Setup,
};
use crate::fixtures::gpu::{stand_in, two_gpus};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::{fixtures, threads};
use crate::launches::graphs::capture;
use crate::random::Random;

tests! {
    stand_in =>
        threads_with_default_streams_of_their_own,
        a_communicator_dropped_during_a_capture_leaves_its_calls_what_they_use,
        a_buffer_dropped_last_during_a_capture_leaves_the_calls_what_they_use,
        a_communicator_is_dropped_after_the_calls_of_other_threads,
        an_idle_communicator_is_dropped_beside_a_capture,
        a_second_stream_of_a_capture_is_refused,
        a_capture_does_not_wait_for_other_work_on_the_last_stream,
        raw_streams_are_put_in_order;
    two_gpus => a_capture_follows_a_call_on_a_default_stream;
}

/// Elements of a message that takes one block. The stand-in driver runs the blocks of a launch one at a time, but here
/// ranks rely on data that all blocks have sent.
const COUNT: usize = 250;

fn message(random: &Random, round: usize) -> Message {
    Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2)
}

/// The per-thread default stream has the same handle in all threads, but is a different stream in each.
fn threads_with_default_streams_of_their_own() {
    const ROUNDS: usize = 40;
    let random = Random::new("launches::streams::threads_with_default_streams_of_their_own");
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull, Algorithm::OneShotPush] {
        fixtures(2, 1, Setup::with(algorithm), COUNT * 4, |fixture| {
            let context = fixture.communicator.device().context();
            let turn = Barrier::new(2);
            // Errors are collected: a thread that panicked would leave the other waiting for its turn.
            let problems = Mutex::new(Vec::new());
            let thread = |own: usize| {
                let (stream, turn, random) = (context.per_thread_stream(), &turn, &random);
                let problem = |round: usize, what: String| {
                    let rank = fixture.rank();
                    problems.lock().unwrap().push(format!("{algorithm}, rank {rank}, round {round}: {what}"));
                };
                let memory = [(); 2].map(|()| Plain::new(context, COUNT * 4));
                move || {
                    for round in 0..ROUNDS {
                        let message = message(random, round);
                        if round % 2 == own {
                            upload(&stream, memory[0].address, &message.inputs[fixture.rank()]);
                            upload(&stream, memory[1].address, &message.poison());
                            let (s, [input, output]) =
                                (stream.cu_stream(), [0, 1].map(|at: usize| memory[at].address));
                            let Message { dtype, op, count, .. } = message;
                            // SAFETY: the memory is this thread's, and lives until the thread has synchronised its
                            // stream.
                            let call = unsafe {
                                fixture.communicator.collective_raw(
                                    s,
                                    Collective::AllReduce(op),
                                    input,
                                    output,
                                    count,
                                    dtype,
                                )
                            };
                            call.unwrap_or_else(|error| problem(round, error.to_string()));
                        }
                        // Only the communicator orders the next call, by the other thread, after this one.
                        turn.wait();
                        if round % 2 == own {
                            let is = download(&stream, memory[1].address, COUNT * 4);
                            compare(&is, &message.expected, 4).unwrap_or_else(|what| problem(round, what));
                        }
                    }
                    stream.synchronize().unwrap();
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(thread(0));
                scope.spawn(thread(1));
            });
            assert_eq!(problems.into_inner().unwrap(), [""; 0]);
            fixture.communicator.check().unwrap();
        });
    }
}

/// Tests a warm-up on the default stream, which is synchronised, followed by a capture on another stream. Each rank has
/// its own GPU, and therefore its own legacy default stream.
fn a_capture_follows_a_call_on_a_default_stream() {
    let random = Random::new("launches::streams::a_capture_follows_a_call_on_a_default_stream");
    fixtures(2, 2, Setup::default(), COUNT * 4, |fixture| {
        let context = fixture.communicator.device().context();
        for (round, warm) in [context.default_stream(), context.per_thread_stream()].into_iter().enumerate() {
            let (message, placement) = (message(&random, round), Placement::of(MemoryKind::Plain));
            fixture.prepare(&message, placement);
            fixture.stream.synchronize().unwrap();
            fixture.start(&warm, &message, placement).unwrap();
            warm.synchronize().unwrap();
            fixture.report(&message, placement, fixture.compare(&message, placement));
            let captured = context.new_stream().unwrap();
            let graph = capture(&captured, || fixture.start(&captured, &message, placement).unwrap());
            fixture.prepare(&message, placement);
            fixture.stream.synchronize().unwrap();
            graph.launch().unwrap();
            captured.synchronize().unwrap();
            fixture.report(&message, placement, fixture.compare(&message, placement));
            // Graphs are dropped before the communicator and the stream of its last call.
            drop(graph);
            fixture.check(&message, placement);
        }
    });
}

/// Runs a test in a separate process, which may crash.
fn alone(test: &str, body: impl FnOnce()) {
    match part() {
        Some(_) => body(),
        None => drop(Process::start(&mut this_test(test, "alone")).finish().unwrap()),
    }
}

/// Rank 0 starts a call that waits for rank 1, and `leave` drops its communicator; then rank 1 calls. Both results must
/// be correct: rank 0 is not reported as gone before its call has ended.
fn dropped_during_a_call(
    setup: Setup,
    stream: impl Fn(&Communicator<Cuda>) -> Arc<CudaStream> + Sync,
    leave: impl Fn(Communicator<Cuda>, &Arc<CudaStream>, &dyn Fn()) -> Result<(), String> + Sync,
) {
    let random = Random::new("streams dropped_during_a_call");
    let message = message(&random, 0);
    let left = Barrier::new(2);
    threads(2, 1, |rank, context| {
        let memory = [(); 2].map(|()| Plain::new(&context, COUNT * 4));
        let communicator = setup.try_build(context, rank).unwrap();
        let (rank, stream) = (communicator.rank(), stream(&communicator));
        let [input, output] = [0, 1].map(|at: usize| memory[at].address);
        let start = |communicator: &Communicator<Cuda>| {
            let (s, Message { dtype, op, count, .. }) = (stream.cu_stream(), &message);
            // SAFETY: the memory is the test's, and lives until the stream is synchronised.
            unsafe {
                communicator.collective_raw(s, Collective::AllReduce(*op), input, output, *count, *dtype)
            }
            .unwrap();
        };
        upload(&stream, input, &message.inputs[rank]);
        upload(&stream, output, &message.poison());
        stream.synchronize().unwrap();
        communicator.barrier().unwrap();
        let go_on = || {
            left.wait();
        };
        let (ended, _communicator) = match rank {
            0 => {
                start(&communicator);
                (leave(communicator, &stream, &go_on), None)
            }
            _ => {
                left.wait();
                // The other rank is dropping its communicator after this time.
                std::thread::sleep(Duration::from_millis(100));
                start(&communicator);
                stream.synchronize().unwrap();
                (communicator.check().map_err(|error| error.to_string()), Some(communicator))
            }
        };
        let is = download(&stream, output, COUNT * 4);
        // No rank frees memory before the other has its result.
        left.wait();
        let result = ended.and_then(|()| compare(&is, &message.expected, 4));
        assert_eq!(result, Ok(()), "rank {rank}");
    });
}

const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

fn a_communicator_dropped_during_a_capture_leaves_its_calls_what_they_use() {
    alone(
        "launches::streams::a_communicator_dropped_during_a_capture_leaves_its_calls_what_they_use",
        || {
            for algorithm in Algorithm::DIRECT {
                let stream = |ranks: &Communicator<Cuda>| ranks.device().context().new_stream().unwrap();
                dropped_during_a_call(Setup::with(algorithm), stream, |communicator, stream, go_on| {
                    stream.begin_capture(MODE).unwrap();
                    drop(communicator);
                    go_on();
                    stream
                        .end_capture(CUgraphInstantiate_flags(0))
                        .map(drop)
                        .map_err(|error| error.to_string())
                });
            }
        },
    );
}

/// Tests a registered buffer that is dropped after the communicator.
fn a_buffer_dropped_last_during_a_capture_leaves_the_calls_what_they_use() {
    alone("launches::streams::a_buffer_dropped_last_during_a_capture_leaves_the_calls_what_they_use", || {
        let random = Random::new("launches::streams::a_buffer_dropped_last");
        let message = message(&random, 0);
        let left = Barrier::new(2);
        threads(2, 1, |rank, context| {
            let output = Plain::new(&context, COUNT * 4);
            let stream = context.new_stream().unwrap();
            let communicator = Setup::with(Algorithm::OneShotPush).try_build(context.clone(), rank).unwrap();
            let buffer = communicator.alloc::<f32>(COUNT).unwrap();
            let (rank, input) = (communicator.rank(), buffer.device_ptr(&stream).0);
            upload(&stream, input, &message.inputs[rank]);
            stream.synchronize().unwrap();
            communicator.barrier().unwrap();
            let start = || {
                let s = stream.cu_stream();
                // SAFETY: the memory is the test's. The input must live until the call has ended, which is the subject
                // of the test.
                unsafe {
                    communicator.collective_raw(
                        s,
                        Collective::AllReduce(ReduceOp::Sum),
                        input,
                        output.address,
                        COUNT,
                        DType::F32,
                    )
                }
                .unwrap();
            };
            let ended = if rank == 0 {
                start();
                stream.begin_capture(MODE).unwrap();
                drop(communicator);
                drop(buffer);
                left.wait();
                stream.end_capture(CUgraphInstantiate_flags(0)).map(drop).map_err(|error| error.to_string())
            } else {
                left.wait();
                start();
                stream.synchronize().unwrap();
                communicator.check().map_err(|error| error.to_string())
            };
            let is = download(&stream, output.address, COUNT * 4);
            left.wait();
            assert_eq!(ended.and_then(|()| compare(&is, &message.expected, 4)), Ok(()), "rank {rank}");
        });
    });
}

/// Tests a call on the default stream of one thread, and a communicator that another thread drops.
fn a_communicator_is_dropped_after_the_calls_of_other_threads() {
    alone("launches::streams::a_communicator_is_dropped_after_the_calls_of_other_threads", || {
        for algorithm in Algorithm::DIRECT {
            let stream = |ranks: &Communicator<Cuda>| ranks.device().context().per_thread_stream();
            dropped_during_a_call(Setup::with(algorithm), stream, |communicator, _, go_on| {
                std::thread::scope(|scope| {
                    scope.spawn(|| drop(communicator));
                    go_on();
                });
                Ok(())
            });
        }
    });
}

/// Tests that dropping an idle communicator does not disturb a capture of another thread in the strictest mode.
fn an_idle_communicator_is_dropped_beside_a_capture() {
    let random = Random::new("launches::streams::an_idle_communicator_is_dropped_beside_a_capture");
    for sharing in
        [fast_allreduce::device::cuda::Sharing::Pointers, fast_allreduce::device::cuda::Sharing::Descriptor]
    {
        let setup = Setup { sharing: Some(sharing), ..Setup::default() };
        fixtures(2, 1, setup, COUNT * 4, |fixture| {
            let placement = Placement::of(MemoryKind::Plain);
            fixture.check(&message(&random, 0), placement);
            let context = fixture.communicator.device().context();
            let idle = Setup::default().try_build(context.clone(), crate::faults::errors::alone()).unwrap();
            let buffer = idle.alloc::<f32>(100).unwrap();
            let own = context.new_stream().unwrap();
            let mut data = own.alloc_zeros::<f32>(100).unwrap();
            idle.all_reduce_in_place(&own, &mut data, ReduceOp::Sum).unwrap();
            idle.synchronize(&own).unwrap();
            let stream = context.new_stream().unwrap();
            fixture.communicator.barrier().unwrap();
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| drop((buffer, idle)));
            });
            let call = Placement::of(MemoryKind::Plain);
            fixture.start(&stream, &message(&random, 1), call).unwrap();
            let graph = stream.end_capture(CUgraphInstantiate_flags(0));
            assert!(matches!(graph, Ok(Some(_))), "the capture is invalid");
            fixture.communicator.barrier().unwrap();
            // The stream of the last call has to outlive the communicator.
            fixture.check(&message(&random, 2), placement);
        });
    }
}

/// Tests that a call on a second stream of the same capture is refused, as it would be a fork, and that the capture
/// stays valid.
fn a_second_stream_of_a_capture_is_refused() {
    let random = Random::new("launches::streams::a_second_stream_of_a_capture_is_refused");
    fixtures(2, 1, Setup::default(), COUNT * 4, |fixture: &Fixture| {
        let context = fixture.communicator.device().context();
        let (message, placement) = (message(&random, 0), Placement::of(MemoryKind::Plain));
        let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let graph = capture(&one, || {
            fixture.start(&one, &message, placement).unwrap();
            other.join(&one).unwrap();
            assert!(fixture.start(&other, &message, placement).is_err());
            one.join(&other).unwrap();
        });
        fixture.prepare(&message, placement);
        fixture.stream.synchronize().unwrap();
        graph.launch().unwrap();
        fixture.communicator.synchronize(&one).unwrap();
        fixture.report(&message, placement, fixture.compare(&message, placement));
        // As above.
        drop(graph);
        fixture.check(&message, placement);
    });
}

/// Work of a stream that ends when a flag is set.
unsafe extern "C" fn until_released(released: *mut c_void) {
    // SAFETY: the pointer is to a flag that outlives the stream's work.
    let released = unsafe { &*released.cast::<AtomicBool>() };
    while !released.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tests a capture on another stream than the last call's, which has other work: that does not matter when a wait has
/// shown that the call has ended.
fn a_capture_does_not_wait_for_other_work_on_the_last_stream() {
    let random = Random::new("launches::streams::a_capture_does_not_wait_for_other_work_on_the_last_stream");
    fixtures(2, 1, Setup::default(), COUNT * 4, |fixture| {
        let context = fixture.communicator.device().context();
        let (warm, captured) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (message, placement) = (message(&random, 0), Placement::of(MemoryKind::Plain));
        fixture.prepare(&message, placement);
        fixture.stream.synchronize().unwrap();
        fixture.start(&warm, &message, placement).unwrap();
        fixture.communicator.synchronize(&warm).unwrap();
        let released = AtomicBool::new(false);
        let flag = std::ptr::from_ref(&released).cast_mut().cast();
        // SAFETY: the stream is live, and the flag lives until it has been synchronised.
        unsafe { sys::cuLaunchHostFunc(warm.cu_stream(), Some(until_released), flag) }.result().unwrap();
        let graph = capture(&captured, || fixture.start(&captured, &message, placement).unwrap());
        released.store(true, Ordering::SeqCst);
        warm.synchronize().unwrap();
        fixture.prepare(&message, placement);
        fixture.stream.synchronize().unwrap();
        graph.launch().unwrap();
        captured.synchronize().unwrap();
        fixture.report(&message, placement, fixture.compare(&message, placement));
        // As above.
        drop(graph);
        fixture.check(&message, placement);
    });
}

/// Tests that new work on one stream waits for earlier work on another, unless one of the two is being captured.
fn raw_streams_are_put_in_order() {
    fixtures(2, 1, Setup::default(), COUNT * 4, |fixture: &Fixture| {
        let communicator = &fixture.communicator;
        let context = communicator.device().context();
        let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let released = AtomicBool::new(false);
        let flag = std::ptr::from_ref(&released).cast_mut().cast();
        // SAFETY: the streams are live and of the communicator's context, and the flag lives until both have been
        // synchronised.
        unsafe {
            sys::cuLaunchHostFunc(one.cu_stream(), Some(until_released), flag).result().unwrap();
            communicator.order_raw_streams(one.cu_stream(), other.cu_stream()).unwrap();
            communicator.order_raw_streams(one.cu_stream(), one.cu_stream()).unwrap();
            let waits = sys::cuStreamQuery(other.cu_stream());
            assert_eq!(waits, sys::cudaError_enum::CUDA_ERROR_NOT_READY);
            released.store(true, Ordering::SeqCst);
            let asked = || true;
            while_waiting(&asked, || communicator.synchronize_raw(other.cu_stream())).unwrap();
            assert_eq!(sys::cuStreamQuery(one.cu_stream()), sys::cudaError_enum::CUDA_SUCCESS);
            communicator.synchronize_raw(one.cu_stream()).unwrap();
        }
        let graph = capture(&one, || {
            for (earlier, next) in [(&one, &other), (&other, &one)] {
                // SAFETY: the streams are live and of the communicator's context.
                let refused =
                    unsafe { communicator.order_raw_streams(earlier.cu_stream(), next.cu_stream()) };
                assert!(matches!(refused, Err(Error::Unavailable { .. })), "{refused:?}");
            }
            // SAFETY: the stream is live and of the communicator's context.
            let refused = unsafe { communicator.synchronize_raw(one.cu_stream()) };
            assert!(matches!(refused, Err(Error::Unavailable { .. })), "{refused:?}");
            communicator.barrier_on(&one).unwrap();
        });
        drop(graph);
        communicator.barrier().unwrap();
    });
}
