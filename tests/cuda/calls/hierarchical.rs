//! Tests hierarchical allreduce on simulated nodes: threads are the ranks, and a second communicator is the engine
//! between nodes. The three steps run in stream order.

use std::sync::Arc;

use cudarc::driver::sys::{CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr};
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{
    Collective, Communicator, Cuda, DType, Element, Error, Hierarchical, InterNode, ReduceOp, Result,
};

use crate::fixtures::gpu::{context, gpu, stand_in, LIMIT};
use crate::fixtures::injection::{fail, Of};

tests! {
    gpu =>
        reduces_over_nodes,
        averages_are_means_of_nodes_means,
        what_is_refused_poisons_nothing,
        nodes_whose_calls_differ,
        unequal_nodes_are_refused;
    stand_in => a_first_step_that_fails_on_one_rank_fails_on_all;
}

/// The engine between nodes: a communicator of the ranks with the same local rank, all on this machine.
struct AcrossNodes(Communicator<Cuda>);

impl InterNode<Cuda> for AcrossNodes {
    fn node(&self) -> usize {
        self.0.rank()
    }

    fn nodes(&self) -> usize {
        self.0.world_size()
    }

    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: CUstream,
    ) -> Result<()> {
        // SAFETY: the caller's obligations are the same; here the stream outlives the communicators.
        unsafe { self.0.collective_raw(stream, Collective::AllReduce(op), address, address, count, dtype) }
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }
}

type World = Hierarchical<Cuda, AcrossNodes>;

/// Runs `body` in a thread for each rank of nodes of these sizes, all on one GPU. The engine of local rank `i` spans
/// the nodes that have more than `i` ranks. No rank frees memory before all ranks have returned from `body`.
fn on_nodes(sizes: &[usize], body: impl Fn(Result<World>, &Arc<CudaStream>) -> Option<World> + Sync) {
    let nodes: Vec<_> = sizes.iter().map(|&size| Threads::world(size).unwrap()).collect();
    let most = *sizes.iter().max().unwrap();
    let of_local_rank = |local_rank: usize| sizes.iter().filter(|&&size| size > local_rank).count();
    let mut across_nodes: Vec<_> =
        (0..most).map(|local_rank| Threads::world(of_local_rank(local_rank)).unwrap().into_iter()).collect();
    std::thread::scope(|scope| {
        for (local_rank, local) in nodes.into_iter().flat_map(|node| node.into_iter().enumerate()) {
            let (across, body) = (across_nodes[local_rank].next().unwrap(), &body);
            scope.spawn(move || {
                let context = context(0);
                let stream = context.new_stream().unwrap();
                let build = |bootstrap| {
                    let device = Cuda::new(context.clone()).unwrap();
                    Communicator::builder()
                        .timeout(LIMIT)
                        .max_bytes(8 << 10)
                        .build(device, bootstrap)
                        .unwrap()
                };
                let (local, across) = (build(local), build(across));
                if let Some(world) = body(World::on_stream(local, AcrossNodes(across), &stream), &stream) {
                    world.synchronize(&stream).unwrap();
                    world.engine().0.barrier().unwrap();
                    world.local().barrier().unwrap();
                }
            });
        }
    });
}

/// Conversion of small integers, whose sums are exact in every type tested here.
trait Small: Element + DeviceRepr + PartialEq + std::fmt::Debug + Default {
    fn of(value: usize) -> Self;
}

macro_rules! small {
    ($($name:ty),*) => {$(
        impl Small for $name {
            fn of(value: usize) -> Self {
                value as $name
            }
        }
    )*};
}
small!(f32, f64, u8, i64);

fn value(rank: usize, at: usize) -> usize {
    1 + (rank * 5 + at) % 8
}

fn calls<T: Small>(world: &World, stream: &Arc<CudaStream>) {
    let ranks = world.world_size();
    let reduced = |at: usize, op: ReduceOp| {
        let values = (0..ranks).map(|rank| value(rank, at));
        match op {
            ReduceOp::Sum => values.sum(),
            ReduceOp::Min => values.min().unwrap(),
            _ => values.max().unwrap(),
        }
    };
    for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
        for count in [0, 1, 2, 3, 64, 1000, 4099] {
            let own: Vec<T> = (0..count).map(|at| T::of(value(world.rank(), at))).collect();
            let expected: Vec<T> = (0..count).map(|at| T::of(reduced(at, op))).collect();
            // cudarc cannot allocate an empty slice, so an empty view of a non-empty slice is passed.
            let input = stream.clone_htod(&[&own[..], &[T::of(7)]].concat()).unwrap();
            let mut output = stream.clone_htod(&vec![T::of(9); count + 1]).unwrap();
            world.all_reduce(stream, &input.slice(..count), &mut output.slice_mut(..count), op).unwrap();
            let mut data = input;
            world.all_reduce_in_place(stream, &mut data.slice_mut(..count), op).unwrap();
            world.synchronize(stream).unwrap();
            for (result, after) in [(&output, 9), (&data, 7)] {
                let result = stream.clone_dtoh(result).unwrap();
                assert_eq!(result[..count], expected, "{op} of {count}");
                assert_eq!(result[count], T::of(after), "beyond the output");
            }
        }
    }
}

fn reduces_over_nodes() {
    for sizes in [&[1, 1][..], &[2, 2], &[3, 3], &[2, 2, 2], &[3]] {
        on_nodes(sizes, |world, stream| {
            let world = world.unwrap();
            calls::<f32>(&world, stream);
            calls::<f64>(&world, stream);
            calls::<u8>(&world, stream);
            calls::<i64>(&world, stream);
            Some(world)
        });
    }
}

fn averages_are_means_of_nodes_means() {
    on_nodes(&[2, 2], |world, stream| {
        let world = world.unwrap();
        let mut data = stream.clone_htod(&[world.rank() as f32; 100]).unwrap();
        world.all_reduce_in_place(stream, &mut data, ReduceOp::Avg).unwrap();
        world.synchronize(stream).unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [1.5; 100]);
        let mut data = stream.clone_htod(&[1i32; 100]).unwrap();
        let error = world.all_reduce_in_place(stream, &mut data, ReduceOp::Avg).unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        Some(world)
    });
}

fn what_is_refused_poisons_nothing() {
    on_nodes(&[2, 2], |world, stream| {
        let world = world.unwrap();
        let input = stream.clone_htod(&[1.0f32; 10]).unwrap();
        let mut output = stream.clone_htod(&[0.0f32; 11]).unwrap();
        let error = world.all_reduce(stream, &input, &mut output, ReduceOp::Sum).unwrap_err();
        assert_eq!(error, Error::LengthMismatch { input: 10, output: 11 });
        let raw = |address, count| {
            // SAFETY: the call is refused before it accesses memory.
            unsafe { world.all_reduce_raw(stream, address, address, count, DType::F32, ReduceOp::Sum) }
        };
        assert!(matches!(raw(0, 1), Err(Error::InvalidPointer { .. })));
        assert!(matches!(raw(8, usize::MAX), Err(Error::InvalidSetting { .. })));
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let error = world.all_reduce_in_place(stream, &mut output, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("captured"), "{error}");
        // SAFETY: the stream is being captured; the empty graph is dropped.
        let _ = unsafe { cudarc::driver::result::stream::end_capture(stream.cu_stream()) }.unwrap();
        world.all_reduce_in_place(stream, &mut output, ReduceOp::Sum).unwrap();
        // Wait before the memory is freed.
        world.synchronize(stream).unwrap();
        Some(world)
    });
}

/// Tests nodes whose calls differ: at the latest when they synchronise, all ranks get an error that names both calls.
fn nodes_whose_calls_differ() {
    let sum = |count| (count, DType::F32, ReduceOp::Sum);
    let differences = [
        [sum(33), (33, DType::F32, ReduceOp::Prod)],
        [sum(33), (33, DType::I32, ReduceOp::Sum)],
        [sum(17), sum(18)],
        [sum(100), sum(1000)],
        [sum(0), sum(1)],
    ];
    for calls in differences {
        on_nodes(&[2, 2], |world, stream| {
            let world = world.unwrap();
            let is_last = world.engine().node() + 1 == 2;
            let (count, dtype, op) = calls[usize::from(is_last)];
            let data = stream.clone_htod(&[1.5f32; 1000]).unwrap();
            let address = data.device_ptr(stream).0;
            // SAFETY: `data` has at least `count` elements and lives until the stream has finished; the call is in
            // place.
            let called = unsafe { world.all_reduce_raw(stream, address, address, count, dtype, op) };
            let error = called.and_then(|()| world.synchronize(stream)).unwrap_err();
            let Error::Disagreement { rank, theirs, own_rank, ours, .. } = &error else { panic!("{error}") };
            let text = |(count, dtype, op): (usize, DType, ReduceOp)| {
                format!("all_reduce of {count} {dtype} ({op})")
            };
            let (own, other) = (calls[usize::from(is_last)], calls[usize::from(!is_last)]);
            assert_eq!((ours, theirs, *own_rank), (&text(own), &text(other), world.rank()), "{error}");
            assert!((rank / 2 + 1 == 2) != is_last, "{error}");
            assert_eq!(world.check(), Err(error), "the error stays");
            None
        });
    }
}

fn unequal_nodes_are_refused() {
    on_nodes(&[2, 1], |world, _stream| {
        assert!(matches!(world.map(|_| ()), Err(Error::Unavailable { .. })));
        None
    });
}

/// Tests a driver call that fails on one rank before or in the first step of a call. No rank of its node may get a
/// result of this call, and no rank at all may get a result of later calls.
fn a_first_step_that_fails_on_one_rank_fails_on_all() {
    for function in ["cuLaunchKernel", "cuStreamIsCapturing", "cuPointerGetAttribute", "cuStreamWaitEvent"] {
        on_nodes(&[2, 2], |world, stream| {
            let world = world.unwrap();
            let mut data = stream.clone_htod(&[1f32; 100]).unwrap();
            world.all_reduce_in_place(stream, &mut data, ReduceOp::Sum).unwrap();
            world.synchronize(stream).unwrap();
            world.local().barrier().unwrap();
            world.engine().0.barrier().unwrap();
            if world.rank() == 0 {
                fail(function, 1, 999, Of::ThisThread);
            }
            let mut call = || {
                world.all_reduce_in_place(stream, &mut data, ReduceOp::Sum)?;
                world.synchronize(stream)
            };
            let mut result = call();
            if world.rank() >= 2 {
                // Ranks of other nodes may learn of it only in the next call, through a rank of their node.
                result = result.and_then(|()| call());
            }
            let error = result.expect_err(function);
            assert!(
                world.rank() > 0 || matches!(error, Error::Driver { code: 999, .. }),
                "{function}: {error}"
            );
            // Freeing waits for all kernels of the process, including those of other nodes, so these are aborted first.
            world.engine().0.abort();
            for _ in 0..3 {
                let again = world.all_reduce_in_place(stream, &mut data, ReduceOp::Sum);
                assert_eq!(again, Err(error.clone()), "{function}: rank {}", world.rank());
            }
            assert_eq!(world.check(), Err(error), "{function}");
            stream.synchronize().unwrap();
            None
        });
    }
}
