//! Tests communicators with their own streams on GPUs: events order them with the caller's streams.

use cudarc::driver::sys::CUcontext;
use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::device::cuda::api;
use fast_allreduce::{
    AnyCommunicator, Collective, DType, DeviceId, Error, ReduceOp, Result, StreamCommunicator,
};

use crate::faults::errors::alone;
use crate::fixtures::fixture::{download, upload, Plain, Setup};
use crate::fixtures::gpu::{context, gpu, Gpus};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::threads;

tests! {
    gpu => between_threads, between_processes, a_callers_context_stays;
}

const COUNT: usize = 3000;

fn bytes(value: u32, count: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(count)
}

/// Runs a training step as numr does: the caller's stream and the communicator's wait for each other, and no thread
/// blocks.
fn overlap(ordinal: usize, bootstrap: impl Bootstrap + 'static) {
    let context = context(ordinal);
    let communicator = Setup::default().try_build(context.clone(), bootstrap).unwrap();
    let communicator = StreamCommunicator::new(communicator).unwrap();
    let any = communicator.communicator();
    let (rank, world) = (any.rank() as u32, any.world_size());
    let compute = context.new_stream().unwrap();
    let stream = compute.cu_stream() as u64;
    let [gradient, result, gathered] = [1, 1, world].map(|parts| Plain::new(&context, 4 * COUNT * parts));
    communicator.barrier().unwrap();

    let [ready, reduced] = [(); 2].map(|()| any.create_event().unwrap());
    for round in 1..4 {
        upload(&compute, gradient.address, &bytes(round * (rank + 1), COUNT));
        // SAFETY: the streams and the memory live until both streams are synchronised, and the events order all
        // accesses.
        unsafe {
            any.record_event(ready, stream).unwrap();
            communicator.wait(ready).unwrap();
            communicator
                .collective(Collective::AllReduce(ReduceOp::Sum), [gradient.address; 2], COUNT, DType::U32)
                .unwrap();
            communicator
                .collective(Collective::AllGather, [gradient.address, gathered.address], COUNT, DType::U32)
                .unwrap();
            let (next, before) = ((rank as usize + 1) % world, (rank as usize + world - 1) % world);
            communicator.send(gathered.address, COUNT, DType::U32, next, 5).unwrap();
            communicator.recv(result.address, COUNT, DType::U32, before, 5).unwrap();
            communicator.record(reduced).unwrap();
            any.wait_event(stream, reduced).unwrap();
        }
        let sum = round * (world * (world + 1) / 2) as u32;
        for (memory, parts) in [(&gradient, 1), (&gathered, world), (&result, 1)] {
            let is = download(&compute, memory.address, 4 * COUNT * parts);
            assert_eq!(is, bytes(sum, COUNT * parts));
        }
    }
    communicator.sync().unwrap();
    any.destroy_event(reduced).unwrap();
    let error = communicator.wait(reduced).unwrap_err();
    assert!(matches!(error, Error::InvalidSetting { name: "event", .. }), "{error}");

    let part = communicator.split(Some(rank / 2), -i64::from(rank)).unwrap().expect("it has a color");
    assert_eq!(part.communicator().world_size(), 2.min(world - rank as usize / 2 * 2));
    // SAFETY: as above.
    unsafe { part.collective(Collective::Broadcast { root: 0 }, [gradient.address; 2], COUNT, DType::U32) }
        .unwrap();
    part.barrier().unwrap();
    any.destroy_event(ready).unwrap();
    communicator.barrier().unwrap();
}

fn between_threads(gpus: Gpus) {
    let devices = gpus.count.min(2);
    threads(2, devices, |rank, _| overlap(rank.rank() % devices, rank));
}

fn between_processes(gpus: Gpus) {
    let devices = gpus.count.min(2);
    ranks("calls::raw::between_processes", "overlap", 3, &[], |local| overlap(local.rank() % devices, local));
}

fn current() -> CUcontext {
    let mut current = std::ptr::null_mut();
    // SAFETY: the function writes one handle.
    unsafe { api::cuCtxGetCurrent(&mut current) }.unwrap();
    current
}

/// Tests that a thread without a current CUDA context has none after any call, or after it drops the communicator.
fn a_callers_context_stays(_: Gpus) {
    let context = context(0);
    let any = AnyCommunicator::from(Setup::default().try_build(context.clone(), alone()).unwrap());
    let (memory, stream) = (Plain::new(&context, 4 * COUNT), context.new_stream().unwrap());
    let stream = stream.cu_stream() as u64;
    assert_eq!((any.device_id(), any.binding().is_none()), (DeviceId::Cuda(0), true));
    // SAFETY: a null handle leaves the thread without a current context.
    unsafe { api::cuCtxSetCurrent(std::ptr::null_mut()) }.unwrap();

    let kept = |name: &str, done: Result<()>| {
        done.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(current().is_null(), "{name}");
    };
    let sum = Collective::AllReduce(ReduceOp::Sum);
    let event = any.create_event();
    kept("create_event", event.clone().map(drop));
    let event = event.unwrap();
    // SAFETY: the memory and the stream live until the stream is synchronised.
    unsafe {
        kept("check_stream", any.check_stream(stream));
        kept("collective", any.collective(stream, sum, [memory.address; 2], COUNT, DType::F32));
        kept("transfer", any.transfer(stream, &[]));
        kept("record_event", any.record_event(event, stream));
        kept("wait_event", any.wait_event(stream, event));
        kept("order_streams", any.order_streams(stream, stream));
        kept("synchronize", any.synchronize(stream));
        kept("register", any.register(memory.address, 4 * COUNT).map(drop));
    }
    kept("destroy_event", any.destroy_event(event));
    kept("alloc", any.alloc(4096).map(drop));
    kept("split", any.split(Some(0), 0).map(drop));
    kept("shrink", any.shrink(&[0]).map(drop));
    kept("barrier", any.barrier());
    kept("check", any.check());
    let with_stream = StreamCommunicator::new(any);
    kept("a stream", with_stream.as_ref().map(drop).map_err(Error::clone));
    drop(with_stream);
    kept("the end", Ok(()));
    context.bind_to_thread().unwrap();
}
