//! Tests registered buffers of the caller.

use std::sync::Arc;

use cudarc::driver::{result, CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Collective, DType, Error, ReduceOp, Registered};

use crate::fixtures::fixture::{compare, download, upload, Fixture, Message, Setup};
use crate::fixtures::gpu::{context, gpu, two_gpus, Gpus};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::threads;
use crate::random::Random;

tests! {
    gpu =>
        callers_buffers_between_threads,
        callers_buffers_between_processes,
        registered_twice,
        pool_memory_is_refused_between_processes,
        ranks_must_agree_on_what_they_register,
        no_more_than_the_allocation_is_registered;
    two_gpus => callers_buffers_between_gpus, pool_memory_is_refused_between_gpus;
}

/// Returns a slice of `cuMemAlloc` memory; `CudaStream::alloc` returns pool memory where there are pools.
pub fn plain_slice(stream: &Arc<CudaStream>, count: usize) -> CudaSlice<u8> {
    stream.context().bind_to_thread().unwrap();
    // SAFETY: a context is current, the slice owns the allocation, and any bits are a valid u8.
    unsafe { stream.upgrade_device_ptr(result::malloc_sync(count).unwrap(), count) }
}

/// Reduces from `input` into the fixture's pool memory, and checks the result.
fn reduce_from(fixture: &Fixture, input: u64, message: &Message) {
    let output = fixture.address((crate::fixtures::fixture::MemoryKind::Pool, 0), 1, message.dtype.size());
    upload(&fixture.stream, input, &message.inputs[fixture.rank()]);
    upload(&fixture.stream, output, &message.poison());
    let &Message { dtype, op, count, .. } = message;
    // SAFETY: the memory is the test's, is aligned and large enough, and is synchronised below.
    unsafe {
        fixture.communicator.collective_raw(
            fixture.stream.cu_stream(),
            Collective::AllReduce(op),
            input,
            output,
            count,
            dtype,
        )
    }
    .unwrap();
    fixture.communicator.synchronize(&fixture.stream).unwrap();
    compare(&download(&fixture.stream, output, message.expected.len()), &message.expected, dtype.size())
        .unwrap();
}

pub const BYTES: usize = 40 << 10;

/// Registers buffers, drops some and registers again. Reduces from whole buffers, from views, and from unregistered
/// memory of the same allocation.
pub fn register_and_reduce(fixture: &Fixture, random: &Random) {
    let communicator = &fixture.communicator;
    let mut round = 0;
    let mut message = |count: usize| {
        round += 1;
        Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), count, communicator.world_size())
    };
    let address = |slice: &CudaSlice<u8>| slice.device_ptr(&fixture.stream).0;
    let slices = [(); 3].map(|()| plain_slice(&fixture.stream, BYTES));
    let unregistered = plain_slice(&fixture.stream, BYTES);
    communicator.barrier().unwrap();
    let [first, second, third] = slices.map(|slice| communicator.register(slice).unwrap());
    for slice in [&*first, &*second, &unregistered, &*third] {
        reduce_from(fixture, address(slice), &message(BYTES / 4));
        reduce_from(fixture, address(slice) + 4 * 33, &message(1000));
        // Ranks use different offsets of the same buffer.
        reduce_from(fixture, address(slice) + 4 * (fixture.rank() as u64 * 3 + 1), &message(1000));
    }
    // One rank uses a registered buffer, the others do not.
    let mixed = if fixture.rank() == 0 { &*first } else { &unregistered };
    reduce_from(fixture, address(mixed), &message(2000));
    // Drops a row in the middle of the table, which is used again. All ranks close their mappings, and then free.
    communicator.barrier().unwrap();
    let second = second.into_inner();
    communicator.barrier().unwrap();
    drop(second);
    reduce_from(fixture, address(&first), &message(500));
    let fourth = communicator.register(plain_slice(&fixture.stream, BYTES)).unwrap();
    reduce_from(fixture, address(&fourth) + 4, &message(500));
    reduce_from(fixture, address(&third), &message(500));
    communicator.barrier().unwrap();
    let slices = [first, third, fourth].map(Registered::into_inner);
    communicator.barrier().unwrap();
    drop(slices);
}

fn callers_buffers_between_threads() {
    between_threads(1);
}

fn callers_buffers_between_gpus() {
    between_threads(2);
}

fn between_threads(devices: usize) {
    let random = Random::new(&format!("registration between threads on {devices}"));
    for algorithm in Algorithm::DIRECT {
        threads(2, devices, |rank, context| {
            let fixture = Fixture::new(Setup::with(algorithm).try_build(context, rank).unwrap(), BYTES);
            register_and_reduce(&fixture, &random);
        });
    }
}

fn callers_buffers_between_processes(gpus: Gpus) {
    use fast_allreduce::bootstrap::Bootstrap as _;
    for (name, sharing, algorithm) in [
        ("one-shot", None, Algorithm::OneShotPull),
        ("two-shot", None, Algorithm::TwoShotPull),
        ("ipc", Some(Sharing::Ipc), Algorithm::OneShotPull),
    ] {
        ranks("memory::registration::callers_buffers_between_processes", name, 2, &[], |local| {
            let setup = Setup { sharing, ..Setup::with(algorithm) };
            let context = context(local.rank() % gpus.count.min(2));
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            register_and_reduce(&fixture, &Random::new(name));
        });
    }
}

/// Tests memory that is registered twice, and whose registrations end one at a time.
fn registered_twice() {
    let random = Random::new("memory::registration::registered_twice");
    threads(2, 1, |rank, context| {
        let fixture =
            Fixture::new(Setup::with(Algorithm::OneShotPull).try_build(context, rank).unwrap(), BYTES);
        let slice = plain_slice(&fixture.stream, BYTES);
        let address = slice.device_ptr(&fixture.stream).0;
        // SAFETY: the second slice is leaked, so it never frees memory of the first.
        let again = unsafe { fixture.stream.upgrade_device_ptr::<u8>(address + 1024, BYTES - 1024) };
        let first = fixture.communicator.register(slice).unwrap();
        let second = std::mem::ManuallyDrop::new(fixture.communicator.register(again).unwrap());
        let message = |round| Message::new(&mut random.fork(round), (DType::I32, ReduceOp::Sum), 700, 2);
        reduce_from(&fixture, address, &message(0));
        reduce_from(&fixture, address + 1024, &message(1));
        reduce_from(&fixture, address + BYTES as u64 - 2800, &message(2));
        assert_eq!(second.len(), BYTES - 1024);
        fixture.communicator.barrier().unwrap();
        drop(first);
    });
}

/// Tests that memory which cannot be exported is refused on all ranks, and that the communicator stays usable.
fn pool_memory_of_ranks_is_refused(fixture: &Fixture, who: &[usize]) {
    let slice = match who.contains(&fixture.rank()) {
        true => fixture.stream.alloc_zeros::<u8>(BYTES).unwrap(),
        false => plain_slice(&fixture.stream, BYTES),
    };
    fixture.stream.synchronize().unwrap();
    fixture.communicator.barrier().unwrap();
    let error = fixture.communicator.register(slice).err().expect("pool memory is refused");
    match who.contains(&fixture.rank()) {
        true => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
        false => assert!(matches!(error, Error::PeerFailed { rank, .. } if rank == who[0]), "{error}"),
    }
    for way_out in ["Communicator::alloc", "stream-ordered", "backend:native"] {
        assert!(error.to_string().contains(way_out), "{way_out} is not in {error}");
    }
    fixture.communicator.barrier().unwrap();
}

fn pool_memory_is_refused_between_processes(gpus: Gpus) {
    use fast_allreduce::bootstrap::Bootstrap as _;
    ranks("memory::registration::pool_memory_is_refused_between_processes", "pool", 2, &[], |local| {
        let context = context(local.rank() % gpus.count.min(2));
        let fixture = Fixture::new(Setup::default().try_build(context, local).unwrap(), BYTES);
        pool_memory_of_ranks_is_refused(&fixture, &[0, 1]);
        pool_memory_of_ranks_is_refused(&fixture, &[1]);
        register_and_reduce(&fixture, &Random::new("pool"));
    });
}

fn pool_memory_is_refused_between_gpus() {
    let random = Random::new("memory::registration::pool_memory_is_refused_between_gpus");
    threads(2, 2, |rank, context| {
        let fixture =
            Fixture::new(Setup::with(Algorithm::TwoShotPull).try_build(context, rank).unwrap(), BYTES);
        pool_memory_of_ranks_is_refused(&fixture, &[0, 1]);
        pool_memory_of_ranks_is_refused(&fixture, &[0]);
        register_and_reduce(&fixture, &random);
    });
}

fn ranks_must_agree_on_what_they_register() {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = plain_slice(&stream, 1024 * (communicator.rank() + 1));
        communicator.barrier().unwrap();
        let error = communicator.register(slice).err().expect("the lengths differ");
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
        communicator.barrier().unwrap();
    });
}

fn no_more_than_the_allocation_is_registered() {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = plain_slice(&stream, BYTES);
        let address = slice.device_ptr(&stream).0;
        // SAFETY: refused bytes are not used, and the slice outlives its registration.
        let register =
            |offset: usize, bytes| unsafe { communicator.register_raw(address + offset as u64, bytes) };
        // Drivers may round allocations up.
        for (offset, bytes) in [(0, 64 << 20), (BYTES - 4, 64 << 20), (0, usize::MAX)] {
            let error = register(offset, bytes).err().expect("it is longer than the allocation");
            let is_named =
                matches!(&error, Error::InvalidPointer { problem, .. } if problem.contains("longer"));
            assert!(is_named || matches!(error, Error::PeerFailed { .. }), "{error}");
        }
        drop(register(BYTES - 4, 4).unwrap());
        communicator.barrier().unwrap();
    });
}
