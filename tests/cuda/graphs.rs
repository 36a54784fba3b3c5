//! Calls that are captured into graphs and replayed.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, DType, Error, ReduceOp};

use crate::gpu::{context, gpu, stand_in, Gpus};
use crate::injection::{fail, take_back, Of};
use crate::processes::ranks;
use crate::random::Random;
use crate::seat::{compare, download, upload, Kind, Message, Placement, Plain, Seat, Setup};
use crate::threads::{seats, threads};

tests! {
    gpu =>
        replays_between_threads,
        replays_between_processes,
        a_replay_before_registration_is_an_error,
        an_address_that_is_used_again_is_registered_again,
        streams_crossed_while_capturing,
        a_capture_does_not_pass_a_call_that_runs,
        a_buffer_dropped_during_a_capture_stays_for_its_calls,
        nothing_is_registered_during_a_capture,
        registering_goes_on_after_inputs_that_are_gone;
    stand_in => registering_that_failed_is_repeated;
}

const COUNT: usize = 700;
pub const BYTES: usize = COUNT * 8;
const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Captures what `body` puts on the stream.
pub fn capture(stream: &Arc<CudaStream>, body: impl FnOnce()) -> CudaGraph {
    stream.begin_capture(MODE).unwrap();
    body();
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
}

/// A graph of one call for each of `placements`.
fn graph_of(seat: &Seat, message: &Message, placements: &[Placement]) -> CudaGraph {
    capture(&seat.stream, || {
        for &placement in placements {
            seat.start(&seat.stream, message, placement).unwrap();
        }
    })
}

/// The inputs and outputs of the calls of a graph: an input of each kind.
const PLACEMENTS: [Placement; 3] = [
    Placement { input: (Kind::Plain, 0), output: Some((Kind::Pool, 1)) },
    Placement { input: (Kind::Pool, 3), output: Some((Kind::Registered, 0)) },
    Placement { input: (Kind::Registered, 5), output: Some((Kind::Plain, 2)) },
];

/// Graphs of one to three calls with new inputs for each replay, between eager calls.
pub fn capture_and_replay(seat: &Seat, random: &Random) {
    let kind = (DType::Bf16, ReduceOp::Sum);
    let world = seat.communicator.world_size();
    let mut round = 0;
    let mut message = || {
        round += 1;
        Message::new(&mut random.fork(round), kind, COUNT, world)
    };
    let check = |message: &Message, placement: Placement| {
        seat.report(message, placement, seat.compare(message, placement));
    };
    let shape = message();
    let graphs = [1, 2, 3].map(|calls| graph_of(seat, &shape, &PLACEMENTS[..calls]));
    seat.communicator.register_graph_buffers().unwrap();
    for turn in [0, 1, 2, 0, 0, 1, 2, 2, 1, 0] {
        let message = message();
        for &placement in &PLACEMENTS[..=turn] {
            seat.prepare(&message, placement);
        }
        graphs[turn].launch().unwrap();
        for &placement in &PLACEMENTS[..=turn] {
            check(&message, placement);
        }
        if turn != 1 {
            let eager = Message::random(&mut random.fork(1000 + turn), 33 + 200 * turn, world);
            seat.check(&eager, Placement::of(Kind::ALL[turn]));
        }
    }
    // The same input again, and a new one, in graphs beside the others.
    let in_place = Placement { input: (Kind::Plain, 8), output: None };
    let again = [PLACEMENTS[0], in_place].map(|placement| graph_of(seat, &shape, &[placement]));
    seat.communicator.register_graph_buffers().unwrap();
    for _ in 0..3 {
        let message = message();
        for (graph, placement) in again.iter().zip([PLACEMENTS[0], in_place]) {
            seat.prepare(&message, placement);
            graph.launch().unwrap();
            check(&message, placement);
        }
        for &placement in &PLACEMENTS {
            seat.prepare(&message, placement);
        }
        graphs[2].launch().unwrap();
        PLACEMENTS.iter().for_each(|&placement| check(&message, placement));
    }
    drop(again);
    // Many launches with no wait between them.
    let message = message();
    for &placement in &PLACEMENTS {
        seat.prepare(&message, placement);
    }
    for turn in [2, 0, 1, 2, 2, 0, 2] {
        graphs[turn].launch().unwrap();
    }
    PLACEMENTS.iter().for_each(|&placement| check(&message, placement));
    seat.communicator.barrier().unwrap();
}

fn setups() -> impl Iterator<Item = Setup> {
    let algorithms =
        Algorithm::DIRECT.into_iter().flat_map(|algorithm| [(algorithm, false), (algorithm, true)]);
    algorithms.map(|(algorithm, graph_registration)| Setup {
        graph_registration,
        // Pushed messages pass in pieces; the epoch wraps around.
        max_bytes: 4 << 10,
        first_epoch: u32::MAX - 30,
        ..Setup::with(algorithm)
    })
}

fn replays_between_threads(gpus: Gpus) {
    for setup in setups() {
        for (size, devices) in [(2, 1), (3, 1), (2, gpus.count.min(2))] {
            let random = Random::new(&format!("graphs::replays_between_threads {setup:?}"));
            seats(size, devices, setup, BYTES, |seat| capture_and_replay(seat, &random));
        }
    }
}

fn replays_between_processes(gpus: Gpus) {
    use fast_allreduce::bootstrap::Bootstrap as _;
    for (number, setup) in setups().enumerate() {
        let name = format!("replays {number}");
        ranks("graphs::replays_between_processes", &name, 2, &[], |local| {
            let context = context(local.rank() % gpus.count.min(2));
            let seat = Seat::new(setup.try_build(context, local).unwrap(), BYTES);
            capture_and_replay(&seat, &Random::new(&name));
        });
    }
}

fn a_replay_before_registration_is_an_error() {
    let random = Random::new("graphs::a_replay_before_registration_is_an_error");
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
        let setup = Setup { graph_registration: true, ..Setup::with(algorithm) };
        threads(2, 1, |rank, context| {
            let seat = Seat::new(setup.try_build(context, rank).unwrap(), BYTES);
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let placement = Placement::of(Kind::Plain);
            let graph = graph_of(&seat, &message, &[placement]);
            seat.prepare(&message, placement);
            graph.launch().unwrap();
            let error = seat.communicator.synchronize(&seat.stream).unwrap_err();
            assert!(error.to_string().contains("register_graph_buffers"), "{error}");
            assert_eq!(seat.start(&seat.stream, &message, placement), Err(error));
        });
    }
}

/// A captured input that was freed, and its address used again: the new allocation is told to the peers too.
fn an_address_that_is_used_again_is_registered_again() {
    // The peer has the old allocation open until its communicator ends.
    let settings = [("STAND_IN_ABORT_ON_EARLY_FREE", "0")];
    ranks("graphs::an_address_that_is_used_again_is_registered_again", "again", 2, &settings, |local| {
        let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
        let seat = Seat::new(setup.try_build(context(0), local).unwrap(), BYTES);
        let random = Random::new("again");
        let output = seat.address((Kind::Pool, 0), 1, 4);
        for round in 0..6 {
            let input = Plain::new(seat.communicator.device().context(), BYTES);
            let message = Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let graph = capture(&seat.stream, || {
                let stream = seat.stream.cu_stream();
                let (dtype, op) = (message.dtype, message.op);
                // SAFETY: the test's memory, which outlives the graph.
                unsafe { seat.communicator.all_reduce_raw(stream, input.address, output, COUNT, dtype, op) }
                    .unwrap();
            });
            seat.communicator.register_graph_buffers().unwrap();
            upload(&seat.stream, input.address, &message.inputs[seat.rank()]);
            upload(&seat.stream, output, &message.poison());
            graph.launch().unwrap();
            seat.communicator.synchronize(&seat.stream).unwrap();
            compare(&download(&seat.stream, output, message.expected.len()), &message.expected, 4).unwrap();
            seat.communicator.barrier().unwrap();
        }
    });
}

fn streams_crossed_while_capturing() {
    let random = Random::new("graphs::streams_crossed_while_capturing");
    seats(2, 1, Setup::with(Algorithm::TwoShotPull), BYTES, |seat| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let (placement, other) = (Placement::of(Kind::Plain), Placement::of(Kind::Pool));
        let crossed = |result: fast_allreduce::Result<()>| {
            assert!(
                matches!(&result, Err(Error::Unavailable { what, .. }) if what.contains("stream")),
                "{result:?}"
            );
        };
        let captured = seat.communicator.device().context().new_stream().unwrap();
        // The warm-up on one stream, the capture on another, as servers do.
        seat.check(&message, placement);
        let graph = capture(&captured, || {
            seat.start(&captured, &message, placement).unwrap();
            // What is outside of the capture cannot be in its order.
            crossed(seat.start(&seat.stream, &message, other));
        });
        seat.prepare(&message, placement);
        seat.stream.synchronize().unwrap();
        graph.launch().unwrap();
        captured.synchronize().unwrap();
        seat.report(&message, placement, seat.compare(&message, placement));
        seat.check(&message, other);
    });
}

/// A call that still waits for a peer cannot be followed by a captured one of another stream.
fn a_capture_does_not_pass_a_call_that_runs() {
    let random = Random::new("graphs::a_capture_does_not_pass_a_call_that_runs");
    seats(2, 1, Setup::with(Algorithm::OneShotPush), BYTES, |seat| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let placement = Placement::of(Kind::Plain);
        let captured = seat.communicator.device().context().new_stream().unwrap();
        seat.prepare(&message, placement);
        if seat.rank() == 0 {
            seat.start(&seat.stream, &message, placement).unwrap();
            captured.begin_capture(MODE).unwrap();
            assert!(seat.start(&captured, &message, placement).is_err());
            // Nothing was captured, and the capture was not spoilt.
            captured.end_capture(CUgraphInstantiate_flags(0)).unwrap();
        }
        seat.communicator.barrier().unwrap();
        if seat.rank() == 1 {
            seat.start(&seat.stream, &message, placement).unwrap();
        }
        seat.report(&message, placement, seat.compare(&message, placement));
    });
}

/// A buffer that is dropped while its stream is captured stays until the calls that were started before have ended.
fn a_buffer_dropped_during_a_capture_stays_for_its_calls() {
    let random = Random::new("graphs::a_buffer_dropped_during_a_capture_stays_for_its_calls");
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
        seats(2, 1, Setup::with(algorithm), BYTES, |seat| {
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let buffer = seat.communicator.alloc::<f32>(COUNT).unwrap();
            let input = buffer.device_ptr(&seat.stream).0;
            let output = seat.address((Kind::Pool, 0), 1, 4);
            upload(&seat.stream, input, &message.inputs[seat.rank()]);
            upload(&seat.stream, output, &message.poison());
            seat.stream.synchronize().unwrap();
            seat.communicator.barrier().unwrap();
            let call = || {
                let (stream, dtype, op) = (seat.stream.cu_stream(), message.dtype, message.op);
                // SAFETY: the test's memory, which stays until the call has ended: that is what is tested.
                unsafe { seat.communicator.all_reduce_raw(stream, input, output, COUNT, dtype, op) }.unwrap();
            };
            if seat.rank() == 0 {
                call();
                seat.stream.begin_capture(MODE).unwrap();
                seat.start(&seat.stream, &message, Placement::of(Kind::Plain)).unwrap();
                // The call waits for the other rank still.
                drop(buffer);
                assert!(seat.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().is_some());
                seat.communicator.barrier().unwrap();
            } else {
                seat.communicator.barrier().unwrap();
                call();
                seat.communicator.synchronize(&seat.stream).unwrap();
                drop(buffer);
            }
            seat.communicator.synchronize(&seat.stream).unwrap();
            compare(&download(&seat.stream, output, message.expected.len()), &message.expected, 4).unwrap();
            // The next one finds everything in order.
            seat.communicator.barrier().unwrap();
            let again = seat.communicator.alloc::<f32>(COUNT).unwrap();
            seat.check(&message, Placement::of(Kind::Registered));
            seat.communicator.barrier().unwrap();
            drop(again);
        });
    }
}

/// What would have to wait for a captured stream is refused on all ranks, and neither the capture nor the communicator suffers.
fn nothing_is_registered_during_a_capture() {
    let random = Random::new("graphs::nothing_is_registered_during_a_capture");
    seats(2, 1, Setup::with(Algorithm::TwoShotPull), BYTES, |seat| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let placement = Placement::of(Kind::Plain);
        let refused = |error: Option<Error>| match (seat.rank(), error) {
            (0, Some(Error::Unavailable { reason, .. })) => assert!(reason.contains("captured"), "{reason}"),
            (1, Some(Error::PeerFailed { rank: 0, .. })) => {}
            (_, error) => panic!("{error:?}"),
        };
        let attempts = || {
            refused(seat.communicator.alloc::<f32>(COUNT).err());
            refused(seat.communicator.register_graph_buffers().err());
        };
        let graph = (seat.rank() == 0).then(|| {
            capture(&seat.stream, || {
                seat.start(&seat.stream, &message, placement).unwrap();
                attempts();
            })
        });
        if seat.rank() == 1 {
            attempts();
        }
        seat.communicator.barrier().unwrap();
        seat.prepare(&message, placement);
        match graph {
            Some(graph) => graph.launch().unwrap(),
            None => seat.start(&seat.stream, &message, placement).unwrap(),
        }
        seat.report(&message, placement, seat.compare(&message, placement));
        seat.communicator.barrier().unwrap();
        drop(seat.communicator.alloc::<f32>(COUNT).unwrap());
        seat.communicator.register_graph_buffers().unwrap();
    });
}

/// A graph of one call from memory of its own.
fn graph_from(seat: &Seat, message: &Message, input: u64, output: u64) -> CudaGraph {
    capture(&seat.stream, || {
        let (stream, dtype, op) = (seat.stream.cu_stream(), message.dtype, message.op);
        // SAFETY: the test's memory, which outlives the graph where that is replayed.
        unsafe { seat.communicator.all_reduce_raw(stream, input, output, COUNT, dtype, op) }.unwrap();
    })
}

/// Replays a graph with new inputs, and compares.
fn replay(seat: &Seat, graph: &CudaGraph, message: &Message, input: u64, output: u64) {
    upload(&seat.stream, input, &message.inputs[seat.rank()]);
    upload(&seat.stream, output, &message.poison());
    graph.launch().unwrap();
    seat.communicator.synchronize(&seat.stream).unwrap();
    compare(&download(&seat.stream, output, message.expected.len()), &message.expected, 4).unwrap();
}

/// Inputs that were freed before they could be registered, and captures that came to nothing, keep no later ones from it.
fn registering_goes_on_after_inputs_that_are_gone() {
    let settings = [("STAND_IN_ABORT_ON_EARLY_FREE", "0")];
    for (name, sharing) in [("gone", Sharing::Descriptor), ("gone, by IPC", Sharing::Ipc)] {
        ranks("graphs::registering_goes_on_after_inputs_that_are_gone", name, 2, &settings, |local| {
            let setup = Setup {
                graph_registration: true,
                sharing: Some(sharing),
                ..Setup::with(Algorithm::OneShotPull)
            };
            let seat = Seat::new(setup.try_build(context(0), local).unwrap(), BYTES);
            let context = seat.communicator.device().context();
            let random = Random::new(name);
            let message =
                |round| Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let output = seat.address((Kind::Pool, 0), 1, 4);
            if seat.rank() == 0 {
                let input = Plain::new(context, BYTES);
                drop(graph_from(&seat, &message(0), input.address, output));
                // Never registered.
                drop(input);
                let aborted = Plain::new(context, BYTES);
                seat.stream.begin_capture(MODE).unwrap();
                let (stream, op) = (seat.stream.cu_stream(), ReduceOp::Sum);
                // SAFETY: nothing runs.
                unsafe {
                    let call = seat.communicator.all_reduce_raw(
                        stream,
                        aborted.address,
                        output,
                        COUNT,
                        DType::F32,
                        op,
                    );
                    call.unwrap();
                }
                assert!(seat.stream.synchronize().is_err(), "that ends a capture");
                assert!(seat.stream.end_capture(CUgraphInstantiate_flags(0)).is_err());
                let _ = context.check_err();
            }
            seat.communicator.register_graph_buffers().unwrap();
            for round in 1..4 {
                let (input, message) = (Plain::new(context, BYTES), message(round));
                let graph = graph_from(&seat, &message, input.address, output);
                seat.communicator.register_graph_buffers().unwrap();
                replay(&seat, &graph, &message, input.address, output);
                seat.communicator.barrier().unwrap();
            }
        });
    }
}

/// A rank that cannot export, open or write one of the rows: an error on all, and the next attempt finds everything.
fn registering_that_failed_is_repeated() {
    use fast_allreduce::bootstrap::Bootstrap as _;
    for (function, nth) in [
        ("cuMemGetAddressRange", 1),
        ("cuIpcGetMemHandle", 1),
        ("cuIpcOpenMemHandle", 1),
        ("cuMemcpyHtoDAsync", 1),
        ("cuPointerGetAttribute", 1),
    ] {
        ranks("graphs::registering_that_failed_is_repeated", function, 2, &[], |local| {
            let rank = local.rank();
            let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
            let context = context(0);
            // Before the seat, to go after the mappings of it.
            let input = Plain::new(&context, BYTES);
            let seat = Seat::new(setup.try_build(context, local).unwrap(), BYTES);
            let random = Random::new(function);
            let message =
                |round| Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let output = seat.address((Kind::Pool, 0), 1, 4);
            let graph = graph_from(&seat, &message(0), input.address, output);
            seat.communicator.barrier().unwrap();
            if rank == 0 {
                fail(function, nth, 999, Of::ThisThread);
            }
            let error = seat.communicator.register_graph_buffers().unwrap_err();
            assert_eq!(take_back(), 0, "{error}");
            match (rank, &error) {
                (0, Error::Driver { code: 999, .. }) | (1, Error::PeerFailed { rank: 0, .. }) => {}
                _ => panic!("{function}: rank {rank}: {error}"),
            }
            seat.communicator.register_graph_buffers().unwrap();
            for round in 1..4 {
                replay(&seat, &graph, &message(round), input.address, output);
            }
            seat.communicator.barrier().unwrap();
        });
    }
}
