//! Tests calls that are captured in graphs and replayed.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Collective, DType, Error, ReduceOp};

use crate::fixtures::fixture::{
    compare, download, upload, Fixture, MemoryKind, Message, Placement, Plain, Setup,
};
use crate::fixtures::gpu::{context, gpu, stand_in, Gpus};
use crate::fixtures::injection::{fail, live, take_back, Of};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::{fixtures, threads};
use crate::random::Random;

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
    stand_in =>
        registering_that_failed_is_repeated,
        more_inputs_than_there_is_room_for_are_copied,
        inputs_are_closed_when_their_graphs_have_gone;
}

pub const COUNT: usize = 700;
pub const BYTES: usize = COUNT * 8;
pub const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Captures the work that `body` enqueues on the stream.
pub fn capture(stream: &Arc<CudaStream>, body: impl FnOnce()) -> CudaGraph {
    stream.begin_capture(MODE).unwrap();
    body();
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
}

/// Captures one call for each of `placements` in a graph.
pub fn graph_of(fixture: &Fixture, message: &Message, placements: &[Placement]) -> CudaGraph {
    capture(&fixture.stream, || {
        for &placement in placements {
            fixture.start(&fixture.stream, message, placement).unwrap();
        }
    })
}

/// The inputs and outputs of the calls of a graph, with an input of each kind.
pub const PLACEMENTS: [Placement; 3] = [
    Placement { input: (MemoryKind::Plain, 0), output: Some((MemoryKind::Pool, 1)) },
    Placement { input: (MemoryKind::Pool, 3), output: Some((MemoryKind::Registered, 0)) },
    Placement { input: (MemoryKind::Registered, 5), output: Some((MemoryKind::Plain, 2)) },
];

/// Tests graphs of one to three calls, with new inputs for each replay, between eager calls of any type and operation.
pub fn capture_and_replay(fixture: &Fixture, random: &Random) {
    let world = fixture.communicator.world_size();
    let captured = |random: &mut Random| Message::new(random, (DType::Bf16, ReduceOp::Sum), COUNT, world);
    let eager = |random: &mut Random, count| Message::random(random, count, world);
    capture_and_replay_these(fixture, random, captured, eager);
}

/// Runs `capture_and_replay` with given messages. All captured calls have the same count and type.
pub fn capture_and_replay_these(
    fixture: &Fixture,
    random: &Random,
    captured: impl Fn(&mut Random) -> Message,
    eager: impl Fn(&mut Random, usize) -> Message,
) {
    let mut round = 0;
    let mut message = || {
        round += 1;
        captured(&mut random.fork(round))
    };
    let check = |message: &Message, placement: Placement| {
        fixture.report(message, placement, fixture.compare(message, placement));
    };
    let shape = message();
    let graphs = [1, 2, 3].map(|calls| graph_of(fixture, &shape, &PLACEMENTS[..calls]));
    fixture.communicator.register_graph_buffers().unwrap();
    for turn in [0, 1, 2, 0, 0, 1, 2, 2, 1, 0] {
        let message = message();
        for &placement in &PLACEMENTS[..=turn] {
            fixture.prepare(&message, placement);
        }
        graphs[turn].launch().unwrap();
        for &placement in &PLACEMENTS[..=turn] {
            check(&message, placement);
        }
        if turn != 1 {
            let eager = eager(&mut random.fork(1000 + turn), 33 + 200 * turn);
            fixture.check(&eager, Placement::of(MemoryKind::ALL[turn]));
        }
    }
    // Captures an input that another graph already uses, and a new one, in two further graphs.
    let in_place = Placement { input: (MemoryKind::Plain, 8), output: None };
    let again = [PLACEMENTS[0], in_place].map(|placement| graph_of(fixture, &shape, &[placement]));
    fixture.communicator.register_graph_buffers().unwrap();
    for _ in 0..3 {
        let message = message();
        for (graph, placement) in again.iter().zip([PLACEMENTS[0], in_place]) {
            fixture.prepare(&message, placement);
            graph.launch().unwrap();
            check(&message, placement);
        }
        for &placement in &PLACEMENTS {
            fixture.prepare(&message, placement);
        }
        graphs[2].launch().unwrap();
        PLACEMENTS.iter().for_each(|&placement| check(&message, placement));
    }
    drop(again);
    // Launches many replays without synchronising between them.
    let message = message();
    for &placement in &PLACEMENTS {
        fixture.prepare(&message, placement);
    }
    for turn in [2, 0, 1, 2, 2, 0, 2] {
        graphs[turn].launch().unwrap();
    }
    PLACEMENTS.iter().for_each(|&placement| check(&message, placement));
    fixture.communicator.barrier().unwrap();
}

fn setups() -> impl Iterator<Item = Setup> {
    let algorithms =
        Algorithm::DIRECT.into_iter().flat_map(|algorithm| [(algorithm, false), (algorithm, true)]);
    algorithms.map(|(algorithm, graph_registration)| Setup {
        graph_registration,
        // Pushed messages are divided into pieces, and the epoch wraps around.
        max_bytes: 4 << 10,
        first_epoch: u32::MAX - 30,
        ..Setup::with(algorithm)
    })
}

fn replays_between_threads(gpus: Gpus) {
    for setup in setups() {
        for (size, devices) in [(2, 1), (3, 1), (2, gpus.count.min(2))] {
            let random = Random::new(&format!("launches::graphs::replays_between_threads {setup:?}"));
            fixtures(size, devices, setup, BYTES, |fixture| capture_and_replay(fixture, &random));
        }
    }
}

fn replays_between_processes(gpus: Gpus) {
    use fast_allreduce::bootstrap::Bootstrap as _;
    for (number, setup) in setups().enumerate() {
        let name = format!("replays {number}");
        ranks("launches::graphs::replays_between_processes", &name, 2, &[], |local| {
            let context = context(local.rank() % gpus.count.min(2));
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            capture_and_replay(&fixture, &Random::new(&name));
        });
    }
}

fn a_replay_before_registration_is_an_error() {
    let random = Random::new("launches::graphs::a_replay_before_registration_is_an_error");
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
        let setup = Setup { graph_registration: true, ..Setup::with(algorithm) };
        threads(2, 1, |rank, context| {
            let fixture = Fixture::new(setup.try_build(context, rank).unwrap(), BYTES);
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let placement = Placement::of(MemoryKind::Plain);
            let graph = graph_of(&fixture, &message, &[placement]);
            fixture.prepare(&message, placement);
            graph.launch().unwrap();
            let error = fixture.communicator.synchronize(&fixture.stream).unwrap_err();
            assert!(error.to_string().contains("register_graph_buffers"), "{error}");
            assert_eq!(fixture.start(&fixture.stream, &message, placement), Err(error));
        });
    }
}

/// Tests a captured input that was freed and whose address is used again: the new allocation is registered too.
fn an_address_that_is_used_again_is_registered_again() {
    // The peer keeps its mapping of the old allocation until its communicator ends.
    let settings = [("STAND_IN_ABORT_ON_EARLY_FREE", "0")];
    ranks(
        "launches::graphs::an_address_that_is_used_again_is_registered_again",
        "again",
        2,
        &settings,
        |local| {
            let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
            let fixture = Fixture::new(setup.try_build(context(0), local).unwrap(), BYTES);
            let random = Random::new("again");
            let output = fixture.address((MemoryKind::Pool, 0), 1, 4);
            for round in 0..6 {
                let input = Plain::new(fixture.communicator.device().context(), BYTES);
                let message = Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
                let graph = capture(&fixture.stream, || {
                    let stream = fixture.stream.cu_stream();
                    let (dtype, op) = (message.dtype, message.op);
                    // SAFETY: the memory is the test's and outlives the graph.
                    unsafe {
                        fixture.communicator.collective_raw(
                            stream,
                            Collective::AllReduce(op),
                            input.address,
                            output,
                            COUNT,
                            dtype,
                        )
                    }
                    .unwrap();
                });
                fixture.communicator.register_graph_buffers().unwrap();
                upload(&fixture.stream, input.address, &message.inputs[fixture.rank()]);
                upload(&fixture.stream, output, &message.poison());
                graph.launch().unwrap();
                fixture.communicator.synchronize(&fixture.stream).unwrap();
                compare(&download(&fixture.stream, output, message.expected.len()), &message.expected, 4)
                    .unwrap();
                fixture.communicator.barrier().unwrap();
            }
        },
    );
}

fn streams_crossed_while_capturing() {
    let random = Random::new("launches::graphs::streams_crossed_while_capturing");
    fixtures(2, 1, Setup::with(Algorithm::TwoShotPull), BYTES, |fixture| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let (placement, other) = (Placement::of(MemoryKind::Plain), Placement::of(MemoryKind::Pool));
        let crossed = |result: fast_allreduce::Result<()>| {
            assert!(
                matches!(&result, Err(Error::Unavailable { what, .. }) if what.contains("stream")),
                "{result:?}"
            );
        };
        let captured = fixture.communicator.device().context().new_stream().unwrap();
        // The warm-up is on one stream and the capture on another, as in inference servers.
        fixture.check(&message, placement);
        let graph = capture(&captured, || {
            fixture.start(&captured, &message, placement).unwrap();
            // A call outside of the capture cannot be ordered after the captured one.
            crossed(fixture.start(&fixture.stream, &message, other));
        });
        fixture.prepare(&message, placement);
        fixture.stream.synchronize().unwrap();
        graph.launch().unwrap();
        captured.synchronize().unwrap();
        fixture.report(&message, placement, fixture.compare(&message, placement));
        fixture.check(&message, other);
    });
}

/// Tests that while a call still waits for a peer, a call on another stream cannot be captured.
fn a_capture_does_not_pass_a_call_that_runs() {
    let random = Random::new("launches::graphs::a_capture_does_not_pass_a_call_that_runs");
    fixtures(2, 1, Setup::with(Algorithm::OneShotPush), BYTES, |fixture| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let placement = Placement::of(MemoryKind::Plain);
        let captured = fixture.communicator.device().context().new_stream().unwrap();
        fixture.prepare(&message, placement);
        if fixture.rank() == 0 {
            fixture.start(&fixture.stream, &message, placement).unwrap();
            captured.begin_capture(MODE).unwrap();
            assert!(fixture.start(&captured, &message, placement).is_err());
            // Nothing was captured, and the capture is still valid.
            captured.end_capture(CUgraphInstantiate_flags(0)).unwrap();
        }
        fixture.communicator.barrier().unwrap();
        if fixture.rank() == 1 {
            fixture.start(&fixture.stream, &message, placement).unwrap();
        }
        fixture.report(&message, placement, fixture.compare(&message, placement));
    });
}

/// Tests a buffer that is dropped while its stream is being captured: it is freed only after the calls that were
/// started before have ended.
fn a_buffer_dropped_during_a_capture_stays_for_its_calls() {
    let random = Random::new("launches::graphs::a_buffer_dropped_during_a_capture_stays_for_its_calls");
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
        fixtures(2, 1, Setup::with(algorithm), BYTES, |fixture| {
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let buffer = fixture.communicator.alloc::<f32>(COUNT).unwrap();
            let input = buffer.device_ptr(&fixture.stream).0;
            let output = fixture.address((MemoryKind::Pool, 0), 1, 4);
            upload(&fixture.stream, input, &message.inputs[fixture.rank()]);
            upload(&fixture.stream, output, &message.poison());
            fixture.stream.synchronize().unwrap();
            fixture.communicator.barrier().unwrap();
            let call = || {
                let (stream, dtype, op) = (fixture.stream.cu_stream(), message.dtype, message.op);
                // SAFETY: the memory is the test's. It must live until the call has ended, which is the subject of the
                // test.
                unsafe {
                    fixture.communicator.collective_raw(
                        stream,
                        Collective::AllReduce(op),
                        input,
                        output,
                        COUNT,
                        dtype,
                    )
                }
                .unwrap();
            };
            if fixture.rank() == 0 {
                call();
                fixture.stream.begin_capture(MODE).unwrap();
                fixture.start(&fixture.stream, &message, Placement::of(MemoryKind::Plain)).unwrap();
                // The call still waits for the other rank.
                drop(buffer);
                assert!(fixture.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().is_some());
                fixture.communicator.barrier().unwrap();
            } else {
                fixture.communicator.barrier().unwrap();
                call();
                fixture.communicator.synchronize(&fixture.stream).unwrap();
                drop(buffer);
            }
            fixture.communicator.synchronize(&fixture.stream).unwrap();
            compare(&download(&fixture.stream, output, message.expected.len()), &message.expected, 4)
                .unwrap();
            // The next call works normally.
            fixture.communicator.barrier().unwrap();
            let again = fixture.communicator.alloc::<f32>(COUNT).unwrap();
            fixture.check(&message, Placement::of(MemoryKind::Registered));
            fixture.communicator.barrier().unwrap();
            drop(again);
        });
    }
}

/// Tests that an operation that would have to synchronise a capturing stream is refused on all ranks, and that the
/// capture and the communicator stay usable.
fn nothing_is_registered_during_a_capture() {
    let random = Random::new("launches::graphs::nothing_is_registered_during_a_capture");
    fixtures(2, 1, Setup::with(Algorithm::TwoShotPull), BYTES, |fixture| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let placement = Placement::of(MemoryKind::Plain);
        let refused = |error: Option<Error>| match (fixture.rank(), error) {
            (0, Some(Error::Unavailable { reason, .. })) => assert!(reason.contains("captured"), "{reason}"),
            (1, Some(Error::PeerFailed { rank: 0, .. })) => {}
            (_, error) => panic!("{error:?}"),
        };
        let attempts = || {
            refused(fixture.communicator.alloc::<f32>(COUNT).err());
            refused(fixture.communicator.register_graph_buffers().err());
        };
        let graph = (fixture.rank() == 0).then(|| {
            capture(&fixture.stream, || {
                fixture.start(&fixture.stream, &message, placement).unwrap();
                attempts();
            })
        });
        if fixture.rank() == 1 {
            attempts();
        }
        fixture.communicator.barrier().unwrap();
        fixture.prepare(&message, placement);
        match graph {
            Some(graph) => graph.launch().unwrap(),
            None => fixture.start(&fixture.stream, &message, placement).unwrap(),
        }
        fixture.report(&message, placement, fixture.compare(&message, placement));
        fixture.communicator.barrier().unwrap();
        drop(fixture.communicator.alloc::<f32>(COUNT).unwrap());
        fixture.communicator.register_graph_buffers().unwrap();
    });
}

/// Captures one call from the given memory in a graph.
fn graph_from(fixture: &Fixture, message: &Message, input: u64, output: u64) -> CudaGraph {
    capture(&fixture.stream, || {
        let (stream, dtype, op) = (fixture.stream.cu_stream(), message.dtype, message.op);
        // SAFETY: the memory is the test's, and outlives the graph if that is replayed.
        unsafe {
            fixture.communicator.collective_raw(
                stream,
                Collective::AllReduce(op),
                input,
                output,
                COUNT,
                dtype,
            )
        }
        .unwrap();
    })
}

/// Replays a graph with new inputs, and compares the result.
fn replay(fixture: &Fixture, graph: &CudaGraph, message: &Message, input: u64, output: u64) {
    upload(&fixture.stream, input, &message.inputs[fixture.rank()]);
    upload(&fixture.stream, output, &message.poison());
    graph.launch().unwrap();
    fixture.communicator.synchronize(&fixture.stream).unwrap();
    compare(&download(&fixture.stream, output, message.expected.len()), &message.expected, 4).unwrap();
}

/// Tests that inputs freed before they were registered, and failed captures, do not prevent later inputs from being
/// registered.
fn registering_goes_on_after_inputs_that_are_gone() {
    let settings = [("STAND_IN_ABORT_ON_EARLY_FREE", "0")];
    for (name, sharing) in [("gone", Sharing::Descriptor), ("gone, by IPC", Sharing::Ipc)] {
        ranks(
            "launches::graphs::registering_goes_on_after_inputs_that_are_gone",
            name,
            2,
            &settings,
            |local| {
                let setup = Setup {
                    graph_registration: true,
                    sharing: Some(sharing),
                    ..Setup::with(Algorithm::OneShotPull)
                };
                let fixture = Fixture::new(setup.try_build(context(0), local).unwrap(), BYTES);
                let context = fixture.communicator.device().context();
                let random = Random::new(name);
                let message =
                    |round| Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
                let output = fixture.address((MemoryKind::Pool, 0), 1, 4);
                if fixture.rank() == 0 {
                    let input = Plain::new(context, BYTES);
                    drop(graph_from(&fixture, &message(0), input.address, output));
                    // Freed without having been registered.
                    drop(input);
                    let aborted = Plain::new(context, BYTES);
                    fixture.stream.begin_capture(MODE).unwrap();
                    let (stream, op) = (fixture.stream.cu_stream(), ReduceOp::Sum);
                    // SAFETY: the call is only captured, and the capture fails, so it never runs.
                    unsafe {
                        let call = fixture.communicator.collective_raw(
                            stream,
                            Collective::AllReduce(op),
                            aborted.address,
                            output,
                            COUNT,
                            DType::F32,
                        );
                        call.unwrap();
                    }
                    assert!(
                        fixture.stream.synchronize().is_err(),
                        "synchronising ends the capture with an error"
                    );
                    assert!(fixture.stream.end_capture(CUgraphInstantiate_flags(0)).is_err());
                    let _ = context.check_err();
                }
                fixture.communicator.register_graph_buffers().unwrap();
                for round in 1..4 {
                    let (input, message) = (Plain::new(context, BYTES), message(round));
                    let graph = graph_from(&fixture, &message, input.address, output);
                    fixture.communicator.register_graph_buffers().unwrap();
                    replay(&fixture, &graph, &message, input.address, output);
                    fixture.communicator.barrier().unwrap();
                }
            },
        );
    }
}

/// Tests a rank that cannot export an input, open one, or write a row: all ranks get an error, and the next attempt
/// succeeds.
fn registering_that_failed_is_repeated() {
    use fast_allreduce::bootstrap::Bootstrap as _;
    for (function, nth) in [
        ("cuMemGetAddressRange", 1),
        ("cuIpcGetMemHandle", 1),
        ("cuIpcOpenMemHandle", 1),
        ("cuMemcpyHtoDAsync", 1),
        ("cuPointerGetAttribute", 1),
    ] {
        ranks("launches::graphs::registering_that_failed_is_repeated", function, 2, &[], |local| {
            let rank = local.rank();
            let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
            let context = context(0);
            // Declared before the fixture, so that it is dropped after the peers' mappings of it have ended.
            let input = Plain::new(&context, BYTES);
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            let random = Random::new(function);
            let message =
                |round| Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
            let output = fixture.address((MemoryKind::Pool, 0), 1, 4);
            let graph = graph_from(&fixture, &message(0), input.address, output);
            fixture.communicator.barrier().unwrap();
            if rank == 0 {
                fail(function, nth, 999, Of::ThisThread);
            }
            let error = fixture.communicator.register_graph_buffers().unwrap_err();
            assert_eq!(take_back(), 0, "{error}");
            match (rank, &error) {
                (0, Error::Driver { code: 999, .. }) | (1, Error::PeerFailed { rank: 0, .. }) => {}
                _ => panic!("{function}: rank {rank}: {error}"),
            }
            fixture.communicator.register_graph_buffers().unwrap();
            for round in 1..4 {
                replay(&fixture, &graph, &message(round), input.address, output);
            }
            fixture.communicator.barrier().unwrap();
        });
    }
}

/// Tests a rank that captures more inputs than the table has rows, in graphs that stay alive: all replays are correct,
/// and so are later calls.
fn more_inputs_than_there_is_room_for_are_copied() {
    const ROOM: usize = 2048;
    const CALLS: usize = 103;
    const GRAPHS: usize = ROOM / CALLS + 3;
    const ELEMENTS: usize = 16;
    let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
    fixtures(2, 1, setup, BYTES, |fixture| {
        let context = fixture.communicator.device().context();
        let memory = Plain::new(context, GRAPHS * CALLS * ELEMENTS * 4);
        let output = Plain::new(context, CALLS * ELEMENTS * 4);
        // Rank 1 uses the same input in all calls.
        let input =
            |call: usize| memory.address + if fixture.rank() == 0 { (call * ELEMENTS * 4) as u64 } else { 0 };
        let values: Vec<u8> =
            (0..GRAPHS * CALLS * ELEMENTS).flat_map(|at| ((at / ELEMENTS) as f32).to_ne_bytes()).collect();
        upload(&fixture.stream, memory.address, &values);
        let graphs: Vec<_> = (0..GRAPHS)
            .map(|graph| {
                let graph = capture(&fixture.stream, || {
                    for call in 0..CALLS {
                        let stream = fixture.stream.cu_stream();
                        let to = output.address + (call * ELEMENTS * 4) as u64;
                        let from = input(graph * CALLS + call);
                        // SAFETY: the memory is the test's and outlives the graph.
                        unsafe {
                            let (dtype, op) = (DType::F32, ReduceOp::Sum);
                            fixture.communicator.collective_raw(
                                stream,
                                Collective::AllReduce(op),
                                from,
                                to,
                                ELEMENTS,
                                dtype,
                            )
                        }
                        .unwrap();
                    }
                });
                fixture.communicator.register_graph_buffers().unwrap();
                graph
            })
            .collect();
        for (number, graph) in graphs.iter().enumerate() {
            upload(&fixture.stream, output.address, &[0xA5; CALLS * ELEMENTS * 4]);
            graph.launch().unwrap();
            fixture.communicator.synchronize(&fixture.stream).unwrap();
            let sums: Vec<u8> = (0..CALLS * ELEMENTS)
                .flat_map(|at| ((number * CALLS + at / ELEMENTS) as f32).to_ne_bytes())
                .collect();
            compare(&download(&fixture.stream, output.address, sums.len()), &sums, 4).unwrap();
        }
        let message =
            Message::new(&mut Random::new("more_inputs").fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        fixture.check(&message, Placement::of(MemoryKind::Plain));
        drop(graphs);
    });
}

/// Tests that peers close inputs of destroyed graphs: the inputs may be freed, and other inputs may use their rows.
fn inputs_are_closed_when_their_graphs_have_gone(gpus: Gpus) {
    const ROUNDS: usize = 6;
    for (name, sharing) in [("descriptor", Sharing::Descriptor), ("ipc", Sharing::Ipc)] {
        ranks("launches::graphs::inputs_are_closed_when_their_graphs_have_gone", name, 2, &[], |local| {
            use fast_allreduce::bootstrap::Bootstrap as _;
            let setup = Setup {
                graph_registration: true,
                sharing: Some(sharing),
                ..Setup::with(Algorithm::OneShotPull)
            };
            let context = context(local.rank() % gpus.count.min(2));
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            let communicator = &fixture.communicator;
            let context = communicator.device().context();
            let random = Random::new(name);
            let output = fixture.address((MemoryKind::Pool, 0), 1, 4);
            let mut before = None;
            for round in 0..ROUNDS {
                let inputs = [(); 3].map(|()| Plain::new(context, BYTES));
                let message = Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), COUNT, 2);
                let mut graphs: Vec<_> = inputs
                    .iter()
                    .map(|input| graph_from(&fixture, &message, input.address, output))
                    .collect();
                // This graph is destroyed before its input is registered.
                drop(graphs.pop());
                communicator.register_graph_buffers().unwrap();
                for (graph, input) in graphs.iter().zip(&inputs) {
                    replay(&fixture, graph, &message, input.address, output);
                }
                // Destroys one graph at a time: the others must still work.
                let mut graphs = graphs.into_iter();
                let first = graphs.next();
                drop(first);
                communicator.register_graph_buffers().unwrap();
                for (graph, input) in graphs.as_slice().iter().zip(&inputs[1..]) {
                    replay(&fixture, graph, &message, input.address, output);
                }
                drop(graphs);
                communicator.register_graph_buffers().unwrap();
                // The driver would end the process if an input were freed while a peer has it open.
                communicator.barrier().unwrap();
                drop(inputs);
                let held = live();
                assert_eq!(held, *before.get_or_insert(held.clone()), "round {round}");
            }
            communicator.barrier().unwrap();
        });
    }
}
