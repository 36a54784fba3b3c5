//! Tests driver calls that fail: the call that made them returns an error on all ranks, and no rank continues as if
//! nothing had failed.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaContext;
use fast_allreduce::device::cuda::{api, Sharing};
use fast_allreduce::{Algorithm, Collective, DType, Error, ReduceOp, Result};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Plain, Setup};
use crate::fixtures::gpu::{context, stand_in, stand_in_pair, LIMIT};
use crate::fixtures::injection::{fail, live, take_back, Of};
use crate::fixtures::processes::{part, ranks, this_test, Process};
use crate::fixtures::threads::threads;
use crate::random::Random;

tests! {
    stand_in =>
        a_call_that_the_driver_refuses_fails_on_all,
        a_stream_that_cannot_be_ordered_fails_on_all,
        a_failed_synchronisation_fails_on_all,
        a_slice_that_cannot_be_waited_for_fails_on_all,
        an_error_that_was_recorded_before_is_left_to_cudarc,
        a_communicator_is_made_on_all_ranks_or_on_none,
        a_registration_is_made_on_all_ranks_or_on_none,
        everything_is_freed_after_a_recorded_error,
        what_a_peer_could_not_open_is_freed_when_nobody_has_it,
        a_code_that_is_newer_than_the_bindings_fails_like_any_other,
        a_fork_is_told_that_it_is_one;
    stand_in_pair => a_slice_of_another_device_is_not_registered;
}

/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;
/// A result code that no driver defines.
const NEWER: u32 = 99_999;

const COUNT: usize = 500;
const BYTES: usize = 64 << 10;

/// Lets rank 0 of two fail in `broken` between calls that succeed, and checks that neither rank gets a result after it.
fn both_fail(
    name: &str,
    code: u32,
    setup: Setup,
    broken: impl Fn(&Fixture, &Message, Placement) -> Result<()> + Sync,
) {
    let random = Random::new(&format!("driver_errors {name}"));
    threads(2, 1, |rank, context| {
        let fixture = Fixture::new(setup.try_build(context, rank).unwrap(), BYTES);
        let message = |round: usize, count| {
            Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), count, 2)
        };
        let placement = Placement::of(MemoryKind::Plain);
        fixture.check(&message(0, COUNT), placement);
        fixture.communicator.barrier().unwrap();
        let started = Instant::now();
        // Larger than the limit of a launch, so it is divided into pieces.
        let large = message(1, BYTES / 4);
        fixture.prepare(&large, placement);
        fixture.stream.synchronize().unwrap();
        let error = match fixture.rank() {
            0 => broken(&fixture, &large, placement).expect_err(name),
            _ => {
                let call = fixture.start(&fixture.stream, &large, placement);
                call.and_then(|()| fixture.communicator.synchronize(&fixture.stream)).expect_err(name)
            }
        };
        assert_eq!(take_back(), 0, "{name}: the failure did not happen");
        match (fixture.rank(), &error) {
            (0, Error::Driver { code: own, .. }) if *own == code => {}
            (1, Error::PeerFailed { rank: 0, .. }) => {}
            (rank, error) => panic!("{name}: rank {rank}: {error}"),
        }
        let named = if code == NEWER { "99999" } else { "CUDA_ERROR_UNKNOWN" };
        assert!(error.to_string().contains(named), "{name}: {error}");
        for round in 2..5 {
            let again = message(round, COUNT);
            assert_eq!(fixture.start(&fixture.stream, &again, placement), Err(error.clone()), "{name}");
        }
        assert_eq!(fixture.communicator.check(), Err(error), "{name}");
        assert!(started.elapsed() < LIMIT / 2, "{name}: a rank waited for its timeout");
        // Neither rank may free memory while the other's kernel waits.
        fixture.stream.synchronize().unwrap();
        drop(fixture);
    });
}

fn a_call_that_the_driver_refuses_fails_on_all() {
    for (function, nth) in [
        ("cuLaunchKernel", 1),
        // The failure comes after a piece has been launched.
        ("cuLaunchKernel", 2),
        ("cuPointerGetAttribute", 1),
        ("cuStreamIsCapturing", 1),
        ("cuCtxGetCurrent", 1),
    ] {
        for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPush] {
            let name = format!("{function} {nth} {algorithm}");
            both_fail(
                &name,
                UNKNOWN,
                Setup { max_bytes: 8 << 10, ..Setup::with(algorithm) },
                |fixture, message, place| {
                    fail(function, nth, UNKNOWN, Of::ThisThread);
                    fixture.start(&fixture.stream, message, place)
                },
            );
        }
    }
}

fn a_stream_that_cannot_be_ordered_fails_on_all() {
    for function in ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"] {
        both_fail(function, UNKNOWN, Setup::default(), |fixture, message, place| {
            let other = fixture.communicator.device().context().new_stream().unwrap();
            fail(function, 1, UNKNOWN, Of::ThisThread);
            fixture.start(&other, message, place)
        });
    }
}

fn a_failed_synchronisation_fails_on_all() {
    both_fail("synchronize", UNKNOWN, Setup::default(), |fixture, _, _| {
        fail("cuStreamSynchronize", 1, UNKNOWN, Of::ThisThread);
        fixture.communicator.synchronize(&fixture.stream)
    });
}

/// Tests only functions that cudarc does not call here. It would convert the unknown code to an enum value, which is
/// undefined behaviour.
fn a_code_that_is_newer_than_the_bindings_fails_like_any_other() {
    assert_eq!(api::Code(2).to_string(), "CUDA_ERROR_OUT_OF_MEMORY: out of memory");
    assert_eq!(api::Code(NEWER).to_string(), "result code 99999, for which the driver has no name");
    for function in ["cuLaunchKernel", "cuPointerGetAttribute", "cuStreamIsCapturing", "cuCtxGetCurrent"] {
        both_fail(function, NEWER, Setup::with(Algorithm::TwoShotPush), |fixture, message, place| {
            fail(function, 1, NEWER, Of::ThisThread);
            fixture.start(&fixture.stream, message, place)
        });
    }
    for function in ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"] {
        both_fail(function, NEWER, Setup::default(), |fixture, message, place| {
            let other = fixture.communicator.device().context().new_stream().unwrap();
            fail(function, 1, NEWER, Of::ThisThread);
            fixture.start(&other, message, place)
        });
    }
    both_fail("cuStreamSynchronize", NEWER, Setup::default(), |fixture, _, _| {
        fail("cuStreamSynchronize", 1, NEWER, Of::ThisThread);
        fixture.communicator.synchronize(&fixture.stream)
    });
    for function in ["cuMemCreate", "cuMemsetD8Async", "cuMemHostAlloc", "cuCtxGetId", "cuDeviceGetUuid"] {
        let (context, alone) = (context(0), crate::faults::errors::alone());
        fail(function, 1, NEWER, Of::ThisThread);
        let error = Setup::default().try_build(context, alone).map(drop).unwrap_err();
        assert!(error.to_string().contains("99999"), "{function}: {error}");
        assert_eq!(take_back(), 0, "{function}");
    }
}

/// cudarc records an error where it has no result to return it in.
fn a_slice_that_cannot_be_waited_for_fails_on_all() {
    both_fail("a slice's event", UNKNOWN, Setup::default(), |fixture, _, _| {
        let context = fixture.communicator.device().context();
        let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let input = one.alloc_zeros::<f32>(BYTES / 4).unwrap();
        let mut output = one.alloc_zeros::<f32>(BYTES / 4).unwrap();
        one.synchronize().unwrap();
        // The call is on the stream of the last call, so it needs no event to be in order.
        assert!(context.is_managing_stream_synchronization());
        fail("cuStreamWaitEvent", 1, UNKNOWN, Of::ThisThread);
        let call = fixture.communicator.all_reduce(&fixture.stream, &input, &mut output, ReduceOp::Sum);
        drop(other);
        call
    });
}

/// Tests that an error which cudarc recorded before the call is not returned by the call.
fn an_error_that_was_recorded_before_is_left_to_cudarc() {
    let random = Random::new("faults::driver_errors::an_error_that_was_recorded_before");
    threads(2, 1, |rank, context| {
        let fixture = Fixture::new(Setup::default().try_build(context.clone(), rank).unwrap(), BYTES);
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let placement = Placement::of(MemoryKind::Plain);
        fixture.prepare(&message, placement);
        let (input, mut output) = (fixture.stream.clone_htod(&[1f32; 100]).unwrap(), [7f32; 100]);
        let mut reduced = fixture.stream.clone_htod(&output).unwrap();
        fixture.stream.synchronize().unwrap();
        let code = cudarc::driver::DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_FOUND);
        context.record_err::<()>(Err(code));
        fixture.start(&fixture.stream, &message, placement).unwrap();
        fixture.communicator.all_reduce(&fixture.stream, &input, &mut reduced, ReduceOp::Sum).unwrap();
        fixture.communicator.synchronize(&fixture.stream).unwrap();
        assert_eq!(context.check_err().map_err(|error| error.0), Err(code.0), "the recorded error is lost");
        fixture.report(&message, placement, fixture.compare(&message, placement));
        fixture.stream.memcpy_dtoh(&reduced, &mut output).unwrap();
        fixture.stream.synchronize().unwrap();
        assert_eq!(output, [2.0; 100]);
        fixture.communicator.barrier().unwrap();
    });
}

/// Tests that if one of two ranks cannot create its communicator, neither gets one, and neither frees memory that the
/// other has open.
fn a_communicator_is_made_on_all_ranks_or_on_none() {
    use fast_allreduce::bootstrap::Bootstrap as _;
    let test = "faults::driver_errors::a_communicator_is_made_on_all_ranks_or_on_none";
    for (function, nth) in [
        // The first copy writes the epochs.
        ("cuMemcpyHtoDAsync", 1),
        ("cuMemHostAlloc", 1),
        ("cuMemHostGetDevicePointer", 1),
        ("cuIpcOpenMemHandle", 1),
        ("cuDeviceGetUuid", 1),
    ] {
        ranks(test, &format!("{function} {nth}"), 2, &[], |local| {
            let rank = local.rank();
            let context = context(0);
            let setup = Setup { sharing: Some(Sharing::Ipc), ..Setup::default() };
            if rank == 0 {
                fail(function, nth, UNKNOWN, Of::Process);
            }
            let started = Instant::now();
            let error = setup.try_build(context, local).map(drop).unwrap_err();
            match (rank, &error) {
                (0, error) if error.to_string().contains("CUDA_ERROR_UNKNOWN") => {}
                (1, Error::PeerFailed { rank: 0, .. }) => {}
                _ => panic!("rank {rank}: {error}"),
            }
            assert!(started.elapsed() < LIMIT / 2);
        });
    }
}

/// Tests a rank that cannot write its row of the table: no rank gets the registration, and the next attempt succeeds.
fn a_registration_is_made_on_all_ranks_or_on_none() {
    let random = Random::new("faults::driver_errors::a_registration_is_made_on_all_ranks_or_on_none");
    for function in ["cuMemcpyHtoDAsync", "cuStreamSynchronize"] {
        threads(2, 1, |rank, context| {
            let setup = Setup::with(Algorithm::OneShotPull);
            let fixture =
                Fixture::new(setup.try_build(context, rank).unwrap(), crate::memory::registration::BYTES);
            let slice = crate::memory::registration::plain_slice(&fixture.stream, 4096);
            fixture.communicator.barrier().unwrap();
            if fixture.rank() == 0 {
                fail(function, 1, UNKNOWN, Of::ThisThread);
            }
            let error = fixture.communicator.register(slice).err().expect("a row cannot be written");
            match (fixture.rank(), &error) {
                (0, Error::Driver { code: UNKNOWN, .. }) | (1, Error::PeerFailed { rank: 0, .. }) => {}
                (rank, error) => panic!("{function}: rank {rank}: {error}"),
            }
            assert_eq!(take_back(), 0);
            crate::memory::registration::register_and_reduce(&fixture, &random);
        });
    }
}

/// Tests that an error recorded by cudarc in the meantime does not prevent memory from being freed.
fn everything_is_freed_after_a_recorded_error() {
    let test = "faults::driver_errors::everything_is_freed_after_a_recorded_error";
    if part().is_none() {
        Process::start(&mut this_test(test, "alone")).finish().unwrap();
        return;
    }
    let context: Arc<CudaContext> = context(0);
    let before = live();
    for sharing in [Sharing::Pointers, Sharing::Descriptor, Sharing::Ipc] {
        let setup = Setup { sharing: Some(sharing), ..Setup::default() };
        let communicator = setup.try_build(context.clone(), crate::faults::errors::alone()).unwrap();
        let buffer = communicator.alloc::<f32>(1000).unwrap();
        let memory = communicator.symmetric_memory::<f32>(1000).unwrap();
        let record = || {
            let code = cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_FOUND;
            context.record_err::<()>(Err(cudarc::driver::DriverError(code)));
        };
        record();
        // No call is running that dropping would have to wait for.
        drop(memory);
        record();
        drop(buffer);
        record();
        drop(communicator);
        let _ = context.check_err();
        assert_eq!(live(), before, "{sharing:?}");
    }
}

/// Tests that a rank's own `cuMemAlloc` memory is not left registered on any rank if a peer could not open it.
fn what_a_peer_could_not_open_is_freed_when_nobody_has_it() {
    use fast_allreduce::bootstrap::Bootstrap as _;
    let test = "faults::driver_errors::what_a_peer_could_not_open_is_freed_when_nobody_has_it";
    for (function, nth) in [("cuIpcOpenMemHandle", 1), ("cuMemcpyHtoDAsync", 1)] {
        ranks(test, function, 3, &[], |local| {
            let setup = Setup { sharing: Some(Sharing::Ipc), ..Setup::with(Algorithm::OneShotPull) };
            let rank = local.rank();
            let fixture =
                Fixture::new(setup.try_build(context(0), local).unwrap(), crate::memory::registration::BYTES);
            let slice = crate::memory::registration::plain_slice(&fixture.stream, 4096);
            fixture.communicator.barrier().unwrap();
            if rank == 2 {
                fail(function, nth, UNKNOWN, Of::ThisThread);
            }
            // The slice is dropped with the error.
            let error = fixture.communicator.register(slice).err().expect("one rank cannot");
            assert!(rank == 2 || matches!(error, Error::PeerFailed { rank: 2, .. }), "{error}");
            crate::memory::registration::register_and_reduce(&fixture, &Random::new(function));
        });
    }
}

/// Tests that a slice of another device is refused on all ranks before it is used.
fn a_slice_of_another_device_is_not_registered() {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let elsewhere = if communicator.rank() == 0 { crate::fixtures::gpu::context(1) } else { context };
        let slice = crate::memory::registration::plain_slice(&elsewhere.new_stream().unwrap(), 4096);
        let error = communicator.register(slice).err().expect("a slice of another device");
        match (communicator.rank(), &error) {
            (0, Error::InvalidPointer { problem: "memory of another device", .. }) => {}
            (1, Error::PeerFailed { rank: 0, .. }) => {}
            (rank, error) => panic!("rank {rank}: {error}"),
        }
        communicator.barrier().unwrap();
    });
}

/// Tests a forked process: it has inherited handles, but the driver does not work in it.
fn a_fork_is_told_that_it_is_one() {
    let test = "faults::driver_errors::a_fork_is_told_that_it_is_one";
    if part().is_none() {
        Process::start(&mut this_test(test, "alone")).finish().unwrap();
        return;
    }
    let context = context(0);
    let communicator = Setup::default().try_build(context.clone(), crate::faults::errors::alone()).unwrap();
    let stream = context.new_stream().unwrap();
    let mut data = stream.alloc_zeros::<f32>(8).unwrap();
    let input = Plain::new(&context, 64);
    let buffer = communicator.alloc::<f32>(8).unwrap();
    communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum).unwrap();
    communicator.synchronize(&stream).unwrap();
    // SAFETY: the child only makes the calls under test, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let raw = |address| {
            // SAFETY: the calls are refused before they access memory.
            unsafe {
                let s = stream.cu_stream();
                communicator.collective_raw(
                    s,
                    Collective::AllReduce(ReduceOp::Sum),
                    address,
                    address,
                    8,
                    DType::F32,
                )
            }
        };
        let results = [
            communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum),
            raw(input.address),
            communicator.barrier_on(&stream),
            communicator.synchronize(&stream),
            communicator.check(),
            communicator.register_graph_buffers(),
        ];
        // SAFETY: the child exits by `_exit`, so the original is never dropped in it.
        drop(unsafe { std::ptr::read(&buffer) });
        let wrong = results.iter().position(|result| *result != Err(Error::Forked));
        // SAFETY: exits the child without running the parent's cleanup.
        unsafe { libc::_exit(wrong.map_or(0, |at| 1 + at as i32)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "call {} did not report the fork", status >> 8);
    communicator.all_reduce(&stream, &buffer, &mut data, ReduceOp::Sum).unwrap();
    communicator.synchronize(&stream).unwrap();
}
