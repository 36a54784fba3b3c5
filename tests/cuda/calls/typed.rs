//! Tests the typed calls: on cudarc's slices, on views at odd offsets, in place, with cudarc's event tracking and
//! without.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::{Algorithm, Communicator, Cuda, DType, Error, ReduceOp};

use crate::fixtures::fixture::{compare, upload, Message, Setup};
use crate::fixtures::gpu::{context, gpu, two_gpus, Gpus};
use crate::fixtures::threads::threads;
use crate::random::Random;

tests! {
    gpu =>
        slices_views_and_buffers,
        tracked_slices_are_waited_for,
        captured_with_event_tracking,
        lengths_that_differ_are_refused;
    two_gpus => what_is_of_another_gpu_is_refused;
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn check(stream: &std::sync::Arc<CudaStream>, output: &impl DevicePtr<f32>, message: &Message) {
    let result: Vec<u8> = stream.clone_dtoh(output).unwrap().into_iter().flat_map(f32::to_le_bytes).collect();
    compare(&result, &message.expected, 4).unwrap();
}

fn slices_views_and_buffers(gpus: Gpus) {
    let random = Random::new("calls::typed::slices_views_and_buffers");
    for (tracking, devices, algorithm) in [
        (true, 1, Algorithm::OneShotPush),
        (false, 1, Algorithm::TwoShotPull),
        (true, gpus.count.min(2), Algorithm::OneShotPull),
    ] {
        threads(2, devices, |rank, context| {
            if !tracking {
                // SAFETY: each slice is used on one stream, or after that stream has been synchronised.
                unsafe { context.disable_event_tracking() };
            }
            let communicator = Setup::with(algorithm).try_build(context.clone(), rank).unwrap();
            let stream = context.new_stream().unwrap();
            let mut buffer = communicator.alloc::<f32>(1000).unwrap();
            let own = communicator.rank();
            for (round, count) in [1, 63, 500, 999].into_iter().enumerate() {
                let message = Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), count, 2);
                let (input, poison) = (floats(&message.inputs[own]), floats(&message.poison()));
                let call = |result: fast_allreduce::Result<()>| {
                    result.unwrap();
                    communicator.synchronize(&stream).unwrap();
                };

                let slice = stream.clone_htod(&input).unwrap();
                let mut output = stream.clone_htod(&poison).unwrap();
                call(communicator.all_reduce(&stream, &slice, &mut output, ReduceOp::Sum));
                check(&stream, &output, &message);

                // The input view starts at byte 4 of its slice, the output view at byte 12.
                let mut around = stream.clone_htod(&[&[7.0], &input[..], &[7.0]].concat()).unwrap();
                let mut output = stream.clone_htod(&[&[7.0; 3], &poison[..], &[7.0]].concat()).unwrap();
                let view = around.slice(1..=count);
                call(communicator.all_reduce(
                    &stream,
                    &view,
                    &mut output.slice_mut(3..count + 3),
                    ReduceOp::Sum,
                ));
                check(&stream, &output.slice(3..count + 3), &message);
                let mut view = around.slice_mut(1..=count);
                call(communicator.all_reduce_in_place(&stream, &mut view, ReduceOp::Sum));
                check(&stream, &around.slice(1..=count), &message);
                let all = stream.clone_dtoh(&around).unwrap();
                assert_eq!((all[0], all[count + 1]), (7.0, 7.0), "outside of the view");

                let whole: Vec<f32> =
                    input.iter().copied().chain(std::iter::repeat(0.0)).take(1000).collect();
                stream.memcpy_htod(&whole, &mut buffer).unwrap();
                let mut output =
                    stream.clone_htod(&[&poison[..], &vec![0.0; 1000 - count]].concat()).unwrap();
                call(communicator.all_reduce(&stream, &buffer, &mut output, ReduceOp::Sum));
                check(&stream, &output.slice(..count), &message);
                call(communicator.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum));
                let result = stream.clone_dtoh(&buffer).unwrap();
                let result: Vec<u8> = result.into_iter().take(count).flat_map(f32::to_le_bytes).collect();
                compare(&result, &message.expected, 4).unwrap();
            }
            communicator.barrier().unwrap();
        });
    }
}

/// Tests that with event tracking a call waits for a slice that another stream still writes.
fn tracked_slices_are_waited_for() {
    let random = Random::new("calls::typed::tracked_slices_are_waited_for");
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let (writes, calls) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let mut slice = writes.alloc_zeros::<f32>(5000).unwrap();
        let mut output = writes.alloc_zeros::<f32>(5000).unwrap();
        communicator.barrier().unwrap();
        for round in 0..20 {
            let message = Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), 5000, 2);
            writes.memcpy_htod(&floats(&message.inputs[communicator.rank()]), &mut slice).unwrap();
            writes.memcpy_htod(&floats(&message.poison()), &mut output).unwrap();
            communicator.all_reduce(&calls, &slice, &mut output, ReduceOp::Sum).unwrap();
            // While a copy to pageable memory waits for the kernel, the other rank's thread could not launch its own.
            communicator.synchronize(&calls).unwrap();
            check(&writes, &output, &message);
        }
        communicator.barrier().unwrap();
    });
}

/// Tests captures with event tracking: the slices were last written either before the capture or within it.
fn captured_with_event_tracking() {
    const COUNT: usize = 3000;
    let random = Random::new("calls::typed::captured_with_event_tracking");
    for algorithm in [Algorithm::OneShotPush, Algorithm::TwoShotPull] {
        threads(2, 1, |rank, context| {
            let communicator = Setup::with(algorithm).try_build(context.clone(), rank).unwrap();
            let own = communicator.rank();
            let (writes, calls) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            assert!(context.is_managing_stream_synchronization());
            let zeros = || writes.alloc_zeros::<f32>(COUNT).unwrap();
            let (mut input, mut output, mut data, mut last) = (zeros(), zeros(), zeros(), zeros());
            writes.synchronize().unwrap();
            communicator.barrier().unwrap();
            for round in 0..3 {
                // Slices that no operation tracked by cudarc has used yet.
                // SAFETY: the slices are written below before they are read.
                let [from, mut to] = [(); 2].map(|()| unsafe { calls.alloc::<f32>(COUNT) }.unwrap());
                let mut reduced = zeros();
                writes.synchronize().unwrap();
                calls.synchronize().unwrap();
                calls.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                communicator.all_reduce(&calls, &input, &mut output, ReduceOp::Sum).unwrap();
                communicator.all_reduce_in_place(&calls, &mut data, ReduceOp::Sum).unwrap();
                // A tracked operation that the next call must follow.
                calls.memcpy_dtod(&from, &mut to).unwrap();
                communicator.all_reduce(&calls, &to, &mut reduced, ReduceOp::Sum).unwrap();
                communicator
                    .all_reduce(&calls, &output.slice(..COUNT), &mut last.slice_mut(..), ReduceOp::Max)
                    .unwrap();
                let graph = calls.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
                context.check_err().unwrap();
                for replay in 0..3 {
                    let message = |which: usize| {
                        let seed = 10 * (3 * round + replay) + which;
                        Message::new(&mut random.fork(seed), (DType::F32, ReduceOp::Sum), COUNT, 2)
                    };
                    let messages = [message(0), message(1), message(2)];
                    let own_part = |which: usize| floats(&messages[which].inputs[own]);
                    // Tracked operations between the replays.
                    writes.memcpy_htod(&own_part(0), &mut input).unwrap();
                    writes.memcpy_htod(&own_part(1), &mut data).unwrap();
                    writes.memcpy_htod(&floats(&messages[0].poison()), &mut output).unwrap();
                    upload(&writes, address(&from), &messages[2].inputs[own]);
                    writes.synchronize().unwrap();
                    graph.launch().unwrap();
                    communicator.synchronize(&calls).unwrap();
                    check(&writes, &output, &messages[0]);
                    check(&writes, &data, &messages[1]);
                    check(&writes, &reduced, &messages[2]);
                    // The maximum of outputs that are equal on both ranks is that output.
                    check(&writes, &last, &messages[0]);
                    // An eager call on the same slices.
                    communicator.all_reduce(&calls, &input, &mut output, ReduceOp::Sum).unwrap();
                    communicator.synchronize(&calls).unwrap();
                    check(&writes, &output, &messages[0]);
                }
                communicator.barrier().unwrap();
                // cudarc recorded the events of these slices in the capture, and cannot wait for such events.
                std::mem::forget((from, to));
            }
            communicator.barrier().unwrap();
        });
    }
}

/// Returns the address of a slice, without letting cudarc track the access.
fn address(slice: &CudaSlice<f32>) -> u64 {
    let own = slice.stream().context().new_stream().unwrap();
    let (address, used) = slice.device_ptr(&own);
    std::mem::forget(used);
    address
}

fn lengths_that_differ_are_refused() {
    let communicator: Communicator<Cuda> =
        Setup::default().try_build(context(0), crate::faults::errors::alone()).unwrap();
    let stream = communicator.device().context().new_stream().unwrap();
    let input = stream.alloc_zeros::<f32>(8).unwrap();
    let mut output = stream.alloc_zeros::<f32>(9).unwrap();
    assert_eq!(
        communicator.all_reduce(&stream, &input, &mut output, ReduceOp::Sum),
        Err(Error::LengthMismatch { input: 8, output: 9 })
    );
}

fn what_is_of_another_gpu_is_refused() {
    let communicator: Communicator<Cuda> =
        Setup::default().try_build(context(0), crate::faults::errors::alone()).unwrap();
    let stream = communicator.device().context().new_stream().unwrap();
    let input = stream.alloc_zeros::<f32>(8).unwrap();
    let mut output = stream.alloc_zeros::<f32>(9).unwrap();
    let other = context(1).new_stream().unwrap();
    let refused = Err(Error::InvalidStream { stream: 1, device: 0 });
    assert_eq!(communicator.all_reduce_in_place(&other, &mut output, ReduceOp::Sum), refused);
    let mut same = stream.alloc_zeros::<f32>(8).unwrap();
    assert_eq!(communicator.all_reduce(&other, &input, &mut same, ReduceOp::Sum), refused);
    // Memory of another GPU, passed with a stream of this one.
    let mut elsewhere = other.alloc_zeros::<f32>(8).unwrap();
    other.synchronize().unwrap();
    let refused = communicator.all_reduce_in_place(&stream, &mut elsewhere, ReduceOp::Sum);
    assert!(matches!(refused, Err(Error::InvalidPointer { .. })), "{refused:?}");
    // The communicator still works.
    assert_eq!(communicator.all_reduce_in_place(&stream, &mut same, ReduceOp::Sum), Ok(()));
    assert_eq!(communicator.synchronize(&stream), Ok(()));
}
