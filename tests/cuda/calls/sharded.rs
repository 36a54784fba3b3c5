//! Tests RMSNorm of rows whose elements are divided among the ranks: on raw pointers of every shape, on slices, and of
//! all ranks in one launch.

use std::sync::Arc;

use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, Collective, DType, Error, RawShardedRows, ShardedColumns};

use super::fused::{GpuCaller, WorldMemory};
use crate::fixtures::fixture::{Plain, Setup};
use crate::fixtures::gpu::{gpu, Gpus, LIMIT};
use crate::fixtures::threads::threads;
use crate::launches::graphs::capture;
use crate::random::Random;
use crate::suite::sharded::{PreparedShards, ShardedRows};

tests! {
    gpu =>
        every_shape,
        captured_calls,
        a_world_in_one_launch,
        slices,
        a_rank_that_does_not_come,
        memory_of_the_host_is_refused;
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
/// Numbers of rows and of elements that a rank has of a row. The most rows are several launches.
const SHAPES: [(usize, usize); 8] =
    [(5, 1), (3, 7), (400, 16), (4, 33), (1, 513), (70, 128), (2, 768), (3, 2048)];

fn every_shape(gpus: Gpus) {
    for size in [2, 3] {
        let random = Random::new(&format!("calls::sharded::every_shape {size}"));
        threads(size, gpus.count.min(2), |rank, context| {
            let setup = Setup { check: Some(true), max_bytes: 16 << 10, ..Setup::default() };
            let communicator = setup.try_build(context.clone(), rank).unwrap();
            let own = communicator.rank();
            let stream = context.new_stream().unwrap();
            let plain = [(); 2].map(|()| Plain::new(&context, 256 << 10));
            let mut caller = GpuCaller { communicator, stream, plain };
            caller.communicator.barrier().unwrap();
            for (number, &shape) in SHAPES.iter().enumerate() {
                for dtype in TYPES {
                    let mut random = random.fork(4 * number + dtype as usize);
                    let rows = ShardedRows::new(&mut random, dtype, shape, size);
                    for turn in 0..2 {
                        rows.check(&mut caller, &mut random.fork(2 * own + turn));
                    }
                }
            }
            caller.communicator.barrier().unwrap();
        });
    }
}

/// Captures several calls in one graph and replays each on rewritten memory.
fn captured_calls(gpus: Gpus) {
    let random = Random::new("calls::sharded::captured_calls");
    threads(3, gpus.count.min(2), |rank, context| {
        // As for fused calls, the stream is dropped after the communicator.
        let stream = context.new_stream().unwrap();
        let communicator =
            Setup { max_bytes: 16 << 10, ..Setup::default() }.try_build(context.clone(), rank).unwrap();
        communicator.barrier().unwrap();
        let own = communicator.rank();
        let rows = TYPES.map(|dtype| ShardedRows::new(&mut random.fork(dtype as usize), dtype, (9, 40), 3));
        let mut callers = TYPES.map(|_| {
            let plain = Plain::new(&context, 256 << 10);
            WorldMemory { rank: own, stream: Arc::clone(&stream), plain }
        });
        let prepare = |callers: &mut [WorldMemory; 3]| -> Vec<_> {
            let calls = rows.iter().zip(callers);
            calls.map(|(rows, caller)| rows.prepare(caller, &mut random.fork(10 + own))).collect()
        };
        let calls = prepare(&mut callers);
        let graph = capture(&stream, || {
            for (rows, call) in rows.iter().zip(&calls) {
                let stream = stream.cu_stream();
                // SAFETY: the memory is the test's, is aligned to the element, and outlives the graph.
                unsafe { communicator.sharded_rms_norm_raw(stream, &call.parts, rows.rows, rows.dtype) }
                    .unwrap();
            }
        });
        communicator.register_graph_buffers().unwrap();
        for _ in 0..3 {
            let calls = prepare(&mut callers);
            graph.launch().unwrap();
            communicator.synchronize(&stream).unwrap();
            for ((rows, caller), call) in rows.iter().zip(&mut callers).zip(&calls) {
                rows.compare(caller, call);
            }
            communicator.barrier().unwrap();
        }
    });
}

/// Tests all ranks in one launch, with grids that have fewer and more blocks than there are rows.
fn a_world_in_one_launch(_: Gpus) {
    let random = Random::new("calls::sharded::a_world_in_one_launch");
    for size in [2, 3, 5] {
        let mut world = CooperativeRanks::new(0, size, 16 << 10, 0, LIMIT).unwrap();
        let cases = SHAPES.iter().flat_map(|&shape| TYPES.map(|dtype| (shape, dtype)));
        for (number, (shape, dtype)) in cases.enumerate() {
            let mut random = random.fork(number);
            let (blocks, threads) = (random.pick(&[1, 2, 3]), random.pick(&[32, 128, 512]));
            let (algorithm, registered) = (Algorithm::OneShotPush, random.one_in(2));
            let plan = CooperativePlan { algorithm, blocks, threads, registered };
            let rows = ShardedRows::new(&mut random, dtype, shape, size);
            check_world(&rows, &mut world, plan, &random);
        }
        let part = RawShardedRows { total: 1, ..RawShardedRows::in_place(0, 1) };
        let parts = [part];
        let rank = CooperativeRank { collective: Collective::ShardedRmsNorm(&parts), input: 0, output: 0 };
        let plan =
            CooperativePlan { algorithm: Algorithm::OneShotPush, blocks: 1, threads: 48, registered: false };
        // SAFETY: a refused call accesses no memory.
        let refused = unsafe { world.prepare_raw(&vec![rank; size], 1, DType::F32, plan) };
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "grid", .. })));
    }
}

fn check_world(rows: &ShardedRows, world: &mut CooperativeRanks, plan: CooperativePlan, random: &Random) {
    let (stream, size) = (Arc::clone(world.stream()), world.world_size());
    let memory = |rank| {
        let plain = Plain::new(stream.context(), 256 << 10);
        WorldMemory { rank, stream: Arc::clone(&stream), plain }
    };
    let mut memories: Vec<_> = (0..size).map(memory).collect();
    let prepare = |memory: &mut WorldMemory| {
        let mut random = random.fork(memory.rank);
        rows.prepare(memory, &mut random)
    };
    let calls: Vec<_> = memories.iter_mut().map(prepare).collect();
    let mut ranks = Vec::new();
    for PreparedShards { parts, .. } in &calls {
        ranks.push(CooperativeRank { collective: Collective::ShardedRmsNorm(parts), input: 0, output: 0 });
    }
    // SAFETY: the memory is the test's, is aligned to the element, and outlives the call.
    let mut call = unsafe { world.prepare_raw(&ranks, rows.rows, rows.dtype, plan) }.unwrap();
    call.enqueue().unwrap();
    call.finish().unwrap();
    for (memory, call) in memories.iter_mut().zip(&calls) {
        rows.compare(memory, call);
    }
}

fn slices(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = |values: &[f32]| stream.clone_htod(values).unwrap();
        let (input, weight) = (slice(&[2.0, 2.0, 3.0, -4.0, 4.0, 5.0]), slice(&[7.0, 1.0, 0.5]));
        let mut output = slice(&[9.0; 6]);
        communicator.barrier().unwrap();
        let weight = weight.slice(1..3);
        let pair = || ShardedColumns::on_cuda(0..2, 4).epsilon(0.0);
        let parts = [pair().weight(&weight), ShardedColumns::on_cuda(2..3, 2).epsilon(0.0)];
        communicator.sharded_rms_norm(&stream, &input, &mut output, 3, &parts).unwrap();
        communicator.synchronize(&stream).unwrap();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), [1.0, 0.5, 1.0, -1.0, 0.5, 1.0]);
        communicator.sharded_rms_norm_in_place(&stream, &mut output, 3, &[pair().unit_offset()]).unwrap();
        communicator.synchronize(&stream).unwrap();
        let scale = 1.0 / (0.625_f32).sqrt();
        let expected = [scale, 0.5 * scale, 1.0, -scale, 0.5 * scale, 1.0];
        assert_eq!(stream.clone_dtoh(&output).unwrap(), expected);
        let two = slice(&[1.0; 2]);
        let refused = communicator.sharded_rms_norm(&stream, &two, &mut output, 3, &[pair()]);
        assert!(matches!(refused, Err(Error::LengthMismatch { input: 2, output: 6 })));
        let refused = communicator.sharded_rms_norm_in_place(&stream, &mut output, 4, &[pair()]);
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "width", .. })));
        let refused = communicator.sharded_rms_norm_in_place(&stream, &mut output, 3, &[pair(), pair()]);
        assert!(matches!(refused, Err(Error::InvalidPointer { which: "second input", .. })), "{refused:?}");
        communicator.barrier().unwrap();
    });
}

/// Tests that every kernel times out if another rank does not call.
fn a_rank_that_does_not_come(_: Gpus) {
    for dtype in TYPES {
        threads(2, 1, |rank, context| {
            let timeout = std::time::Duration::from_millis(300);
            let stream = context.new_stream().unwrap();
            let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
            let memory = Plain::new(&context, 8192);
            communicator.barrier().unwrap();
            communicator.set_timeout(timeout);
            if communicator.rank() == 1 {
                // This rank stays alive without calling until the other has timed out.
                std::thread::sleep(3 * timeout);
                return;
            }
            let in_place = RawShardedRows::in_place(memory.address, 64);
            let part = RawShardedRows { columns: 64, total: 128, ..in_place };
            // SAFETY: the memory is the test's and outlives the launch.
            unsafe { communicator.sharded_rms_norm_raw(stream.cu_stream(), &[part], 4, dtype) }.unwrap();
            let error = communicator.synchronize(&stream).unwrap_err();
            assert!(error.to_string().contains("rank 1"), "{error}");
        });
    }
}

fn memory_of_the_host_is_refused(_: Gpus) {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let (stream, memory) = (context.new_stream().unwrap(), Plain::new(&context, 4096));
        let own = [1.0_f32; 4];
        let part = RawShardedRows { columns: 4, total: 8, ..RawShardedRows::in_place(memory.address, 4) };
        let weight = RawShardedRows { weight: own.as_ptr() as u64, ..part };
        // SAFETY: a refused call accesses no memory.
        let refused =
            unsafe { communicator.sharded_rms_norm_raw(stream.cu_stream(), &[weight], 1, DType::F32) };
        assert!(matches!(refused, Err(Error::InvalidPointer { which: "weight", .. })), "{refused:?}");
        communicator.barrier().unwrap();
    });
}
