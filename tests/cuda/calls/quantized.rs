//! Tests sums with quantised transport: on raw pointers of every length, on slices, and of all ranks in one launch.

use std::sync::Arc;

use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, Collective, DType, Error, QuantizedTransport, Transport};

use crate::calls::fused::{GpuCaller, WorldMemory};
use crate::fixtures::fixture::{Plain, Setup};
use crate::fixtures::gpu::{gpu, Gpus, LIMIT};
use crate::fixtures::threads::threads;
use crate::launches::graphs::capture;
use crate::random::Random;
use crate::suite::quantized::{Placement, QuantizedSum};

tests! {
    gpu =>
        every_length,
        a_world_in_one_launch,
        slices,
        replays_of_graphs,
        ranks_that_differ,
        a_rank_that_does_not_come;
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
const COUNTS: [usize; 7] = [1, 33, 128, 257, 1000, 4097, 9999];

fn every_length(gpus: Gpus) {
    for size in [1, 2, 3, 5] {
        let random = Random::new(&format!("calls::quantized::every_length {size}"));
        for check in [true, false] {
            threads(size, gpus.count.min(2), |rank, context| {
                let setup = Setup { check: Some(check), max_bytes: 16 << 10, ..Setup::default() };
                let communicator = setup.try_build(context.clone(), rank).unwrap();
                let stream = context.new_stream().unwrap();
                let plain = [(); 2].map(|()| Plain::new(&context, 256 << 10));
                let mut caller = GpuCaller { communicator, stream, plain };
                caller.communicator.barrier().unwrap();
                for (number, &count) in COUNTS.iter().enumerate() {
                    for dtype in TYPES {
                        for transport in Transport::ALL {
                            let mut random =
                                random.fork(16 * number + 4 * dtype as usize + transport as usize);
                            let message = QuantizedSum::new(&mut random, dtype, transport, count, size);
                            message.check(&mut caller, Placement::random(&mut random));
                        }
                    }
                }
                caller.communicator.barrier().unwrap();
            });
        }
    }
}

/// Tests all ranks in one launch, with grids that have fewer and more threads than the message needs.
fn a_world_in_one_launch(_: Gpus) {
    let random = Random::new("calls::quantized::a_world_in_one_launch");
    for size in [1, 2, 3, 5, 8] {
        let mut world = CooperativeRanks::new(0, size, 16 << 10, 0, LIMIT).unwrap();
        let kinds = TYPES.iter().flat_map(|&dtype| Transport::ALL.map(|transport| (dtype, transport)));
        let cases = COUNTS.iter().flat_map(|&count| kinds.clone().map(move |kind| (count, kind)));
        for (number, (count, (dtype, transport))) in cases.enumerate() {
            let mut random = random.fork(number);
            let message = QuantizedSum::new(&mut random, dtype, transport, count, size);
            let blocks = random.pick(&[1, 2, 3]).min(world.max_blocks());
            let threads = random.pick(&[32, 96, 128, 512]);
            let algorithm = random.pick(&Algorithm::ALL);
            let plan = CooperativePlan { algorithm, blocks, threads, registered: random.one_in(2) };
            check_world(&message, &mut world, plan, Placement::random(&mut random));
        }
    }
    let mut world = CooperativeRanks::new(0, 2, 16 << 10, 0, LIMIT).unwrap();
    let plan =
        CooperativePlan { algorithm: Algorithm::TwoShotPull, blocks: 1, threads: 33, registered: false };
    let collective =
        Collective::AllReduceQuantized(QuantizedTransport { transport: Transport::Int8, tolerance: 0.1 });
    let memory = Plain::new(world.stream().context(), 4096);
    let rank = CooperativeRank { collective, input: memory.address, output: memory.address };
    // SAFETY: the call is refused, so nothing is launched.
    let refused = unsafe { world.prepare_raw(&[rank; 2], 14, DType::F32, plan) };
    assert!(matches!(refused.map(drop), Err(Error::InvalidSetting { name: "grid", .. })));
}

fn check_world(
    message: &QuantizedSum,
    world: &mut CooperativeRanks,
    plan: CooperativePlan,
    placement: Placement,
) {
    let (stream, size) = (Arc::clone(world.stream()), world.world_size());
    let memory = |rank| {
        let plain = Plain::new(stream.context(), 128 << 10);
        WorldMemory { rank, stream: Arc::clone(&stream), plain }
    };
    let mut memories: Vec<_> = (0..size).map(memory).collect();
    let places: Vec<_> = memories.iter_mut().map(|memory| message.prepare(memory, placement)).collect();
    let collective = Collective::AllReduceQuantized(message.quantized);
    let ranks = places.iter().map(|&(input, output)| CooperativeRank { collective, input, output });
    let ranks: Vec<_> = ranks.collect();
    // SAFETY: the memory is the test's, is aligned to the element, and outlives the call.
    let mut call = unsafe { world.prepare_raw(&ranks, message.count, message.dtype, plan) }.unwrap();
    call.enqueue().unwrap();
    call.finish().unwrap();
    for (memory, &places) in memories.iter_mut().zip(&places) {
        message.compare(memory, placement, places);
    }
}

/// Tests the typed calls, out of place and in place.
fn slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        // The scale of each rank's input is 1, so integers are exact. The scale of the sum is 2.
        let values: Vec<f32> = (0..1024).map(|i| [127.0, -3.0, 0.0, 12.0][i % 4]).collect();
        let input = stream.clone_htod(&values).unwrap();
        let mut output = stream.clone_htod(&vec![f32::NAN; 1024]).unwrap();
        communicator.barrier().unwrap();
        let (int8, tolerance) = (Transport::Int8, 0.01);
        communicator.all_reduce_quantized(&stream, &input, &mut output, int8, tolerance).unwrap();
        communicator.all_reduce_quantized_in_place(&stream, &mut output, int8, tolerance).unwrap();
        communicator.synchronize(&stream).unwrap();
        let sums: Vec<f32> = values.iter().map(|x| 4.0 * x).collect();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), sums);
        let refused = communicator.all_reduce_quantized(&stream, &input, &mut output, int8, 0.001);
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "tolerance", .. })));
        communicator.barrier().unwrap();
    });
}

/// Tests graphs of calls in one piece and in several, replayed with new inputs, with eager calls in between.
fn replays_of_graphs(gpus: Gpus) {
    const COUNTS: [usize; 2] = [333, 9999];
    for size in [2, 3] {
        let random = Random::new(&format!("calls::quantized::replays_of_graphs {size}"));
        threads(size, gpus.count.min(2), |rank, context| {
            // The epoch wraps around.
            let setup = Setup { max_bytes: 16 << 10, first_epoch: u32::MAX - 9, ..Setup::default() };
            let communicator = setup.try_build(context.clone(), rank).unwrap();
            let stream = context.new_stream().unwrap();
            let plain = [(); 2].map(|()| Plain::new(&context, 256 << 10));
            let mut caller = GpuCaller { communicator, stream, plain };
            caller.communicator.barrier().unwrap();
            let message = |round: usize, (number, transport): (usize, Transport)| {
                let mut random = random.fork(8 * round + 2 * number + transport as usize);
                QuantizedSum::new(&mut random, TYPES[number], transport, COUNTS[number], size)
            };
            let kinds =
                (0..COUNTS.len()).flat_map(|number| Transport::ALL.map(|transport| (number, transport)));
            for (turn, kind) in kinds.enumerate() {
                let placement = Placement { offsets: [turn, 8], registered: false, in_place: turn % 2 == 1 };
                let first = message(0, kind);
                let places = first.prepare(&mut caller, placement);
                let graph = capture(&caller.stream, || {
                    let (stream, (input, output)) = (caller.stream.cu_stream(), places);
                    let (count, dtype) = (first.count, first.dtype);
                    // The launch does not depend on the tolerance.
                    let collective = Collective::AllReduceQuantized(first.quantized);
                    // SAFETY: the memory is the test's, is aligned to the element, and outlives the graph.
                    unsafe {
                        caller.communicator.collective_raw(stream, collective, input, output, count, dtype)
                    }
                    .unwrap();
                });
                for round in 1..5 {
                    let message = message(round, kind);
                    assert_eq!(message.prepare(&mut caller, placement), places);
                    graph.launch().unwrap();
                    caller.communicator.synchronize(&caller.stream).unwrap();
                    message.compare(&mut caller, placement, places);
                    if round % 2 == 0 {
                        message.check(&mut caller, placement);
                    }
                }
                caller.communicator.barrier().unwrap();
            }
        });
    }
}

/// Tests that in checked launches the error of each rank names both calls.
fn ranks_that_differ(_: Gpus) {
    threads(2, 1, |rank, context| {
        let setup = Setup { check: Some(true), ..Setup::default() };
        let communicator = setup.try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let mut data = stream.clone_htod(&[1.0_f32; 40]).unwrap();
        communicator.barrier().unwrap();
        let transport = Transport::ALL[communicator.rank()];
        communicator.all_reduce_quantized_in_place(&stream, &mut data, transport, 0.1).unwrap();
        let error = communicator.synchronize(&stream).unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("int8 in groups of 32") && text.contains("f8e4m3 in groups of 32"), "{text}");
    });
}

/// Tests that the kernel times out if the other rank does not call.
fn a_rank_that_does_not_come(_: Gpus) {
    threads(2, 1, |rank, context| {
        let timeout = std::time::Duration::from_millis(300);
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let mut data = stream.clone_htod(&[1.0_f32; 640]).unwrap();
        communicator.barrier().unwrap();
        communicator.set_timeout(timeout);
        if communicator.rank() == 1 {
            // This rank stays alive without calling until the other has timed out.
            std::thread::sleep(3 * timeout);
            return;
        }
        communicator.all_reduce_quantized_in_place(&stream, &mut data, Transport::Int8, 0.1).unwrap();
        let error = communicator.synchronize(&stream).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    });
}
