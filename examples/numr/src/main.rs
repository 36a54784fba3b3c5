//! numr on fast-allreduce: an adapter of one page, and a program that calls all methods of numr's traits through it,
//! between ranks that are threads of the host, and asserts the results.
//!
//!     cargo run --manifest-path examples/numr/Cargo.toml

mod adapter;

use std::sync::Arc;

use adapter::FastAllreduce;
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Host, StreamCommunicator};
use numr::dtype::DType;
use numr::runtime::cpu::{CpuDevice, CpuRuntime};
use numr::runtime::{Communicator, CommunicatorGroup, ParallelDim, ReduceOp};
use numr::tensor::Tensor;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 4;

fn main() -> Result {
    let ranks = Threads::world(RANKS)?.into_iter().map(|bootstrap| {
        std::thread::spawn(move || -> Result {
            let communicator = fast_allreduce::Communicator::builder().build(Host::new(), bootstrap)?;
            let world: Arc<dyn Communicator> =
                Arc::new(FastAllreduce(StreamCommunicator::new(communicator)?));
            collectives(&*world)?;
            tensors(&*world)?;
            messages(&*world)?;
            overlap(&*world)?;
            groups(world)
        })
    });
    for (rank, handle) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
        handle
            .join()
            .map_err(|_| format!("rank {rank} panicked"))?
            .map_err(|error| format!("rank {rank}: {error}"))?;
    }
    println!("numr's Communicator on fast-allreduce, {RANKS} ranks: all results as expected");
    Ok(())
}

fn address<T>(memory: &mut [T]) -> u64 {
    memory.as_mut_ptr() as u64
}

// SAFETY of the unsafe blocks below: the pointers are of vectors that are neither dropped nor accessed until sync()
// returns.

fn collectives(world: &dyn Communicator) -> Result {
    let (rank, size) = (world.rank(), world.world_size());
    assert!(rank < RANKS && size == RANKS);
    let sum = (0..size).sum::<usize>();

    for (op, expected) in [(ReduceOp::Sum, 14), (ReduceOp::Prod, 120), (ReduceOp::Min, 2), (ReduceOp::Max, 5)]
    {
        let mut data = vec![rank as i64 + 2; 1000];
        // SAFETY: as above.
        unsafe { world.all_reduce(address(&mut data), data.len(), DType::I64, op)? };
        world.sync()?;
        assert_eq!(data, [expected; 1000], "{op:?}");
    }

    let mut data = vec![rank as f64; 77];
    // SAFETY: as above.
    unsafe { world.broadcast(address(&mut data), 77, DType::F64, 2)? };
    world.sync()?;
    assert_eq!(data, [2.0; 77]);

    // A type without reductions in fast-allreduce is moved as bytes.
    let (mut own, mut all) = ([rank as i16; 5], vec![-1i16; 5 * size]);
    // SAFETY: as above.
    unsafe { world.all_gather(address(&mut own), address(&mut all), 5, DType::I16)? };
    world.sync()?;
    assert_eq!(all, Vec::from_iter((0..size as i16).flat_map(|rank| [rank; 5])));
    // SAFETY: as above.
    let refused = unsafe { world.all_reduce(address(&mut own), 5, DType::I16, ReduceOp::Sum) };
    assert!(matches!(refused, Err(numr::error::Error::UnsupportedDType { dtype: DType::I16, .. })));

    let mut input = Vec::from_iter((0..3 * size).map(|index| (index + rank) as u32));
    let mut output = [0u32; 3];
    // SAFETY: as above.
    unsafe { world.reduce_scatter(address(&mut input), address(&mut output), 3, DType::U32, ReduceOp::Sum)? };
    world.sync()?;
    assert_eq!(output, [0, 1, 2].map(|index| (size * (3 * rank + index) + sum) as u32));
    Ok(world.barrier()?)
}

/// Reduces a gradient in a tensor of numr.
fn tensors(world: &dyn Communicator) -> Result {
    let gradient = vec![world.rank() as f32 + 0.5; 6];
    let tensor = Tensor::<CpuRuntime>::from_slice(&gradient, &[2, 3], &CpuDevice::new())?;
    // SAFETY: as above; the tensor is this rank's alone.
    unsafe { world.all_reduce(tensor.ptr(), 6, DType::F32, ReduceOp::Sum)? };
    world.sync()?;
    assert_eq!(tensor.try_to_vec::<f32>()?, [8.0; 6]);
    Ok(())
}

/// Sends on all ranks before receiving, and receives in another order: tags match the messages.
fn messages(world: &dyn Communicator) -> Result {
    let (rank, size) = (world.rank(), world.world_size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let (mut first, mut second) = ([rank as f32; 10], [100 + rank as u64; 2000]);
    let (mut from_first, mut from_second) = ([0f32; 10], [0u64; 2000]);
    // SAFETY: as above.
    unsafe {
        world.send(address(&mut first), 10, DType::F32, next, 7)?;
        world.send(address(&mut second), 2000, DType::U64, next, 3)?;
        world.recv(address(&mut from_second), 2000, DType::U64, before, 3)?;
        world.recv(address(&mut from_first), 10, DType::F32, before, 7)?;
    }
    world.sync()?;
    assert_eq!(from_first, [before as f32; 10]);
    assert_eq!(from_second, [100 + before as u64; 2000]);
    Ok(())
}

/// Uses events as numr documents it. On the host calls are ordered anyway; on a GPU the same calls overlap.
fn overlap(world: &dyn Communicator) -> Result {
    const COMPUTE_STREAM: u64 = 0;
    let streams = world.as_stream_sync().ok_or("a communicator without streams")?;
    let (ready, reduced) = (streams.create_event()?, streams.create_event()?);
    let mut gradient = [1f32; 100];
    streams.record_on_stream(ready, COMPUTE_STREAM)?;
    streams.comm_stream_wait_event(ready)?;
    // SAFETY: as above.
    unsafe { world.all_reduce(address(&mut gradient), 100, DType::F32, ReduceOp::Sum)? };
    streams.record_on_comm_stream(reduced)?;
    streams.stream_wait_event(COMPUTE_STREAM, reduced)?;
    streams.sync_comm_stream()?;
    assert_eq!(gradient, [world.world_size() as f32; 100]);
    streams.destroy_event(ready)?;
    streams.destroy_event(reduced)?;
    assert!(streams.destroy_event(reduced).is_err(), "destroyed already");
    Ok(())
}

/// Uses numr's groups for tensor and data parallelism, which it makes by splitting.
fn groups(world: Arc<dyn Communicator>) -> Result {
    let rank = world.rank();
    // A key that reverses the order.
    let halves = world.split(rank as u32 / 2, (RANKS - rank) as u32)?.ok_or("no part")?;
    assert_eq!((halves.rank(), halves.world_size()), (1 - rank % 2, 2));

    let group = CommunicatorGroup::new(world, 2, 1, 2)?;
    for (dimension, expected) in
        [(ParallelDim::Tensor, rank / 2 * 4 + 1), (ParallelDim::Data, rank % 2 * 2 + 2)]
    {
        let part = group.get(dimension).ok_or("no such dimension")?;
        let mut data = [rank as u32; 50];
        // SAFETY: as above.
        unsafe { part.all_reduce(address(&mut data), 50, DType::U32, ReduceOp::Sum)? };
        part.sync()?;
        assert_eq!(data, [expected as u32; 50], "{dimension:?}");
        part.barrier()?;
    }
    Ok(())
}
