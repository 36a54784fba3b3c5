//! Tests what `CooperativeRanks` refuses, and its prepared calls. `conformance::one_launch` tests its results.

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
use fast_allreduce::{Algorithm, DType, Element, Error, ReduceOp};

use crate::fixtures::fixture::{compare, download, upload, Message};
use crate::fixtures::gpu::{gpu, LIMIT};
use crate::random::Random;

tests! {
    gpu => what_a_world_refuses, a_prepared_call_is_started_again;
}

/// Creates a slice that holds `bytes` at an element offset, and poison elsewhere.
fn slice<T: Element + cudarc::driver::DeviceRepr>(
    stream: &std::sync::Arc<CudaStream>,
    offset: usize,
    bytes: &[u8],
) -> CudaSlice<T> {
    const BEHIND: usize = 5;
    let offset_bytes = offset * size_of::<T>();
    let mut all = vec![0x5C; offset_bytes + bytes.len() + BEHIND * size_of::<T>()];
    all[offset_bytes..offset_bytes + bytes.len()].copy_from_slice(bytes);
    // SAFETY: the next line fills the slice.
    let slice = unsafe { stream.alloc::<T>(all.len() / size_of::<T>()) }.unwrap();
    upload(stream, slice.device_ptr(stream).0, &all);
    slice
}

fn what_a_world_refuses() {
    assert_eq!(CooperativeRanks::new(0, 17, 4096, 0, LIMIT).err(), Some(Error::WorldSize { world_size: 17 }));
    let mut world = CooperativeRanks::new(0, 2, 4096, 0, LIMIT).unwrap();
    let (stream, max_blocks) = (std::sync::Arc::clone(world.stream()), world.max_blocks());
    let slices = |count: usize, length: usize| -> Vec<CudaSlice<f32>> {
        (0..count).map(|_| stream.alloc_zeros(length).unwrap()).collect()
    };
    let mut call = |inputs: &[CudaSlice<f32>], outputs: &mut [CudaSlice<f32>], (offset, count), grid| {
        let (blocks, threads) = grid;
        let plan = CooperativePlan { algorithm: Algorithm::OneShotPush, blocks, threads, registered: false };
        world.all_reduce(inputs, outputs, offset, count, ReduceOp::Sum, plan)
    };
    let good = (1, 32);
    assert_eq!(call(&slices(2, 8), &mut slices(2, 8), (0, 8), good), Ok(()));
    let mismatch = |result| assert!(matches!(result, Err(Error::LengthMismatch { .. })), "{result:?}");
    mismatch(call(&slices(2, 8), &mut slices(1, 8), (0, 8), good));
    mismatch(call(&slices(1, 8), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&slices(2, 7), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (1, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (usize::MAX, 8), good));
    for grid in [(0, 32), (1, 0), (1, 31), (1, 513), (max_blocks + 1, 32)] {
        let result = call(&[], &mut slices(2, 8), (0, 8), grid);
        assert!(matches!(result, Err(Error::InvalidSetting { name: "grid", .. })), "{result:?}");
    }
}

/// Tests a prepared call that is started several times and captured in a graph.
fn a_prepared_call_is_started_again() {
    let mut random = Random::new("calls::world::a_prepared_call_is_started_again");
    const CALLS: usize = 5;
    for algorithm in Algorithm::DIRECT {
        for registered in [false, true] {
            let mut world = CooperativeRanks::new(0, 3, 8 << 10, u32::MAX - 9, LIMIT).unwrap();
            // SAFETY: only one stream uses the slices, and each is synchronised before it is read.
            unsafe { world.stream().context().disable_event_tracking() };
            let stream = std::sync::Arc::clone(world.stream());
            // A message of several pieces, with one launch each.
            let message = Message::new(&mut random, (DType::I32, ReduceOp::Sum), 5003, 3);
            let inputs: Vec<_> =
                message.inputs.iter().map(|bytes| slice::<i32>(&stream, 1, &vec![0; bytes.len()])).collect();
            let mut outputs: Vec<_> =
                inputs.iter().map(|_| slice::<i32>(&stream, 1, &message.poison())).collect();
            let of = |slices: &[CudaSlice<i32>]| -> Vec<u64> {
                slices.iter().map(|slice| slice.device_ptr(&stream).0 + 4).collect()
            };
            let (from, to) = (of(&inputs), of(&outputs));
            let plan = CooperativePlan { algorithm, blocks: 3, threads: 64, registered };
            let mut call = world.prepare(&inputs, &mut outputs, 1, 5003, ReduceOp::Sum, plan).unwrap();
            let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).unwrap();
            (0..CALLS).for_each(|_| call.enqueue().unwrap());
            let flags = cudarc::driver::sys::CUgraphInstantiate_flags(0);
            let graph = stream.end_capture(flags).unwrap().expect("a graph with nodes");
            for replayed in [false, true, false] {
                from.iter()
                    .zip(&message.inputs)
                    .for_each(|(&address, bytes)| upload(&stream, address, bytes));
                to.iter().for_each(|&address| upload(&stream, address, &message.poison()));
                match replayed {
                    true => graph.launch().unwrap(),
                    false => (0..CALLS).for_each(|_| call.enqueue().unwrap()),
                }
                call.finish().unwrap();
                for &address in &to {
                    compare(&download(&stream, address, message.expected.len()), &message.expected, 4)
                        .unwrap();
                }
            }
        }
    }
}
