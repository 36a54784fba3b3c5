//! The typed calls: on cudarc's slices, on views at odd offsets, in place, with its event tracking and without.

use cudarc::driver::{CudaStream, DevicePtr};
use fast_allreduce::{Algorithm, Communicator, Cuda, DType, Error, ReduceOp};

use crate::gpu::{context, gpus};
use crate::random::Random;
use crate::seat::{compare, Message, Setup};
use crate::threads::threads;

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn check(stream: &std::sync::Arc<CudaStream>, output: &impl DevicePtr<f32>, message: &Message) {
    let result: Vec<u8> = stream.clone_dtoh(output).unwrap().into_iter().flat_map(f32::to_le_bytes).collect();
    compare(&result, &message.expected, 4).unwrap();
}

#[test]
fn slices_views_and_buffers() {
    let Some(gpus) = gpus(1) else { return };
    let random = Random::new("typed::slices_views_and_buffers");
    for (tracking, devices, algorithm) in [
        (true, 1, Algorithm::OneShotPush),
        (false, 1, Algorithm::TwoShotPull),
        (true, gpus.count.min(2), Algorithm::OneShotPull),
    ] {
        threads(2, devices, |rank, context| {
            if !tracking {
                // SAFETY: each slice is used on one stream, or after that has been waited for.
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

                // A view that starts 4 bytes off, into another that starts 12 off.
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
                assert_eq!((all[0], all[count + 1]), (7.0, 7.0), "around the view");

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

/// With event tracking, a slice that another stream still writes is waited for.
#[test]
fn tracked_slices_are_waited_for() {
    let Some(_gpus) = gpus(1) else { return };
    let random = Random::new("typed::tracked_slices_are_waited_for");
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
            check(&writes, &output, &message);
        }
        communicator.synchronize(&calls).unwrap();
        communicator.barrier().unwrap();
    });
}

#[test]
fn what_typed_calls_refuse() {
    let Some(gpus) = gpus(1) else { return };
    let communicator: Communicator<Cuda> =
        Setup::default().try_build(context(0), crate::errors::alone()).unwrap();
    let stream = communicator.device().context().new_stream().unwrap();
    let input = stream.alloc_zeros::<f32>(8).unwrap();
    let mut output = stream.alloc_zeros::<f32>(9).unwrap();
    assert_eq!(
        communicator.all_reduce(&stream, &input, &mut output, ReduceOp::Sum),
        Err(Error::LengthMismatch { input: 8, output: 9 })
    );
    if gpus.count < 2 {
        return println!("skipped: a stream of another GPU, as there is one");
    }
    let other = context(1).new_stream().unwrap();
    let refused = Err(Error::InvalidStream { stream: 1, device: 0 });
    assert_eq!(communicator.all_reduce_in_place(&other, &mut output, ReduceOp::Sum), refused);
    let mut same = stream.alloc_zeros::<f32>(8).unwrap();
    assert_eq!(communicator.all_reduce(&other, &input, &mut same, ReduceOp::Sum), refused);
    // Memory of another GPU under a stream of this one.
    let mut elsewhere = other.alloc_zeros::<f32>(8).unwrap();
    other.synchronize().unwrap();
    let refused = communicator.all_reduce_in_place(&stream, &mut elsewhere, ReduceOp::Sum);
    assert!(matches!(refused, Err(Error::InvalidPointer { .. })), "{refused:?}");
    // And nothing is broken.
    assert_eq!(communicator.all_reduce_in_place(&stream, &mut same, ReduceOp::Sum), Ok(()));
    assert_eq!(communicator.synchronize(&stream), Ok(()));
}
