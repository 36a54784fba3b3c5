//! Tests ranks that do not call, and the errors that name them.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Algorithm, Collective, DType, Error, ReduceOp};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{gpu, stand_in};
use crate::fixtures::injection::symbol;
use crate::fixtures::threads::threads;
use crate::random::Random;

tests! {
    gpu => a_rank_that_never_calls_is_named, an_abort_ends_a_call_that_waits;
    stand_in => a_stream_of_another_context_is_refused;
}

/// Creates a world of one rank.
pub fn alone() -> Threads {
    Threads::world(1).unwrap().remove(0)
}

fn a_rank_that_never_calls_is_named() {
    let random = Random::new("faults::errors::a_rank_that_never_calls_is_named");
    let timeout = Duration::from_secs(1);
    for algorithm in Algorithm::DIRECT {
        threads(3, 1, |rank, context| {
            let fixture = Fixture::new(
                Setup { timeout, ..Setup::with(algorithm) }.try_build(context, rank).unwrap(),
                4096,
            );
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 500, 3);
            let placement = Placement::of(MemoryKind::Pool);
            fixture.check(&message, placement);
            fixture.communicator.barrier().unwrap();
            if fixture.rank() == 1 {
                // The rank stays alive all the time.
                std::thread::sleep(3 * timeout);
            } else {
                fixture.prepare(&message, placement);
                fixture.start(&fixture.stream, &message, placement).unwrap();
                let error = fixture.communicator.synchronize(&fixture.stream).unwrap_err();
                let Error::Timeout { ref missing, waited, epoch, .. } = error else {
                    panic!("{algorithm}: {error}")
                };
                // The other survivor may have timed out first; then it is missing too.
                assert!(missing.contains(&1), "{algorithm}: {error}");
                assert_eq!((waited, epoch), (timeout, 2), "{algorithm}");
                assert!(!missing.contains(&fixture.rank()), "{algorithm}: {error}");
                // A poisoned communicator returns its first error at once.
                let started = Instant::now();
                assert_eq!(fixture.communicator.check(), Err(error.clone()));
                assert_eq!(fixture.start(&fixture.stream, &message, placement), Err(error.clone()));
                assert_eq!(fixture.communicator.alloc::<f32>(3).err(), Some(error));
                assert!(started.elapsed() < timeout, "a poisoned communicator waits");
            }
        });
    }
}

fn an_abort_ends_a_call_that_waits() {
    let random = Random::new("faults::errors::an_abort_ends_a_call_that_waits");
    for algorithm in Algorithm::DIRECT {
        let done = std::sync::Barrier::new(2);
        threads(2, 1, |rank, context| {
            let fixture = Fixture::new(Setup::with(algorithm).try_build(context, rank).unwrap(), 4096);
            let message = Message::new(&mut random.fork(0), (DType::F16, ReduceOp::Sum), 500, 2);
            let placement = Placement::of(MemoryKind::Pool);
            if fixture.rank() == 1 {
                done.wait();
                return;
            }
            fixture.prepare(&message, placement);
            fixture.start(&fixture.stream, &message, placement).unwrap();
            assert_eq!(fixture.communicator.check(), Ok(()));
            let started = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    fixture.communicator.abort();
                });
                assert_eq!(fixture.communicator.synchronize(&fixture.stream), Err(Error::Aborted));
            });
            assert!(started.elapsed() < Duration::from_secs(10), "{algorithm}");
            assert_eq!(fixture.start(&fixture.stream, &message, placement), Err(Error::Aborted));
            done.wait();
        });
    }
}

/// Tests that a stream of another context of the same GPU is refused. Programs that mix driver contexts with the
/// runtime's primary context have such streams.
fn a_stream_of_another_context_is_refused() {
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> u32;
    let random = Random::new("faults::errors::a_stream_of_another_context_is_refused");
    threads(2, 1, |rank, context| {
        let fixture = Fixture::new(Setup::default().try_build(context.clone(), rank).unwrap(), 4096);
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 100, 2);
        let placement = Placement::of(MemoryKind::Plain);
        fixture.check(&message, placement);
        fixture.communicator.barrier().unwrap();
        if fixture.rank() == 1 {
            let error = fixture
                .start(&fixture.stream, &message, placement)
                .and_then(|()| fixture.communicator.synchronize(&fixture.stream));
            let Err(Error::PeerFailed { rank: 0, reason }) = &error else { panic!("{error:?}") };
            assert!(reason.contains("another context of device 0"), "{reason}");
            return;
        }
        let (mut other, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the declaration matches lab/stand_in_driver/functions.h. The context that is created becomes current,
        // and is destroyed below.
        unsafe {
            let create = std::mem::transmute::<*mut std::ffi::c_void, Create>(symbol(c"cuCtxCreate_v2"));
            assert_eq!(create(&mut other, 0, context.cu_device()), 0);
            sys::cuStreamCreate(&mut stream, 1).result().unwrap();
        }
        let refused = Err(Error::InvalidStream { stream: 0, device: 0 });
        let communicator = &fixture.communicator;
        // SAFETY: the stream is live.
        assert_eq!(unsafe { communicator.check_raw_stream(stream) }, refused);
        // The refusal has not poisoned the communicator.
        assert_eq!(communicator.check(), Ok(()));
        let [input, output] = [0, 1].map(|which| fixture.address((MemoryKind::Plain, 0), which, 4));
        // SAFETY: the memory is the fixture's, and nothing is launched.
        let call = unsafe {
            communicator.collective_raw(
                stream,
                Collective::AllReduce(ReduceOp::Sum),
                input,
                output,
                100,
                DType::F32,
            )
        };
        assert_eq!(call, refused);
        let text = call.unwrap_err().to_string();
        assert!(text.contains("another context of device 0") && text.contains("Cuda::new"), "{text}");
        // SAFETY: the stream is idle, and the communicator's last call was refused.
        unsafe { sys::cuCtxDestroy_v2(other) }.result().unwrap();
    });
}
