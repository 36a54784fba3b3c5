//! Tests symmetric memory of GPUs: access to a peer's part by address, registration and its end, and freeing together.

use std::sync::Barrier;

use cudarc::driver::DevicePtr;
use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Error, ReduceOp};

use crate::fixtures::fixture::{download, upload, Setup};
use crate::fixtures::gpu::{context, gpu, two_gpus, Gpus};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::threads;

tests! {
    gpu => between_threads, between_processes, ranks_must_agree_on_what_they_free;
    two_gpus => the_last_to_drop_waits_for_no_other_gpu;
}

const COUNT: usize = 3000;

fn bytes(value: u32) -> Vec<u8> {
    value.to_le_bytes().repeat(COUNT)
}

/// Each rank writes to the next rank's part, and all ranks reduce from their own parts.
fn exchange(setup: Setup, ordinal: usize, bootstrap: impl Bootstrap + 'static) {
    let communicator = setup.try_build(context(ordinal), bootstrap).unwrap();
    let (own, world) = (communicator.rank(), communicator.world_size());
    let stream = communicator.device().context().new_stream().unwrap();
    let mut output = communicator.alloc::<u32>(COUNT).unwrap();
    let mut memory = communicator.symmetric_memory::<u32>(COUNT).unwrap();
    let next = (own + 1) % world;
    for round in 1..3 {
        assert_eq!(memory.peer_address(own), Some(memory.address()));
        upload(&stream, memory.peer_address(next).unwrap(), &bytes(round * (next as u32 + 1)));
        stream.synchronize().unwrap();
        communicator.barrier().unwrap();
        assert_eq!(download(&stream, memory.address(), 4 * COUNT), bytes(round * (own as u32 + 1)));
        let sum = round * (world * (world + 1) / 2) as u32;
        communicator.all_reduce(&stream, &memory, &mut output, ReduceOp::Sum).unwrap();
        communicator.synchronize(&stream).unwrap();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), [sum; COUNT]);
        let mut buffer = memory.register().unwrap();
        communicator.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer.device_ptr(&stream).0, buffer.peer_address(own).unwrap());
        memory = buffer.deregister().unwrap();
        // Every rank's call ended before the registration did.
        assert_eq!(download(&stream, memory.peer_address(next).unwrap(), 4 * COUNT), bytes(sum));
        communicator.barrier().unwrap();
    }
    // Freeing waits for a running call that uses the memory.
    communicator.all_reduce(&stream, &memory, &mut output, ReduceOp::Max).unwrap();
    memory.free().unwrap();
    communicator.synchronize(&stream).unwrap();
    // Memory can also be dropped instead of freed.
    let dropped = communicator.symmetric_memory::<u32>(COUNT).unwrap();
    communicator.all_reduce(&stream, &dropped, &mut output, ReduceOp::Max).unwrap();
    communicator.synchronize(&stream).unwrap();
    communicator.barrier().unwrap();
    drop(dropped);
    communicator.barrier().unwrap();
}

fn between_threads(gpus: Gpus) {
    for sharing in [Sharing::Pointers, Sharing::Descriptor, Sharing::Ipc] {
        let devices = gpus.count.min(2);
        let setup = Setup { sharing: Some(sharing), ..Setup::with(Algorithm::TwoShotPull) };
        threads(2, devices, |rank, _| {
            let ordinal = rank.rank() % devices;
            exchange(setup, ordinal, rank);
        });
    }
}

/// Tests processes; the stand-in driver ends a process that frees memory which another has open by IPC.
fn between_processes(gpus: Gpus) {
    let devices = gpus.count.min(2);
    for (name, sharing) in [("descriptor", Sharing::Descriptor), ("ipc", Sharing::Ipc)] {
        let setup = Setup { sharing: Some(sharing), ..Setup::with(Algorithm::OneShotPull) };
        ranks("memory::symmetric::between_processes", name, 3, &[], |local| {
            let ordinal = local.rank() % devices;
            exchange(setup, ordinal, local);
        });
    }
}

/// Tests that the last rank to drop memory frees it, while the other rank's kernel waits for that rank. Memory returned
/// to its owner is freed by the owner's next allocation, or with the owner's device.
fn the_last_to_drop_waits_for_no_other_gpu() {
    let launched = Barrier::new(2);
    threads(2, 2, |rank, context| {
        let own = rank.rank();
        let communicator = Setup::default().try_build(context, rank).unwrap();
        let stream = communicator.device().context().new_stream().unwrap();
        for round in 1..4 {
            let mut sum = stream.clone_htod(&[round; COUNT]).unwrap();
            stream.synchronize().unwrap();
            let mut memory = Some(communicator.symmetric_memory::<u32>(COUNT).unwrap());
            if own == 0 {
                memory.take();
                communicator.all_reduce_in_place(&stream, &mut sum, ReduceOp::Sum).unwrap();
            }
            launched.wait();
            if own == 1 {
                memory.take();
                communicator.all_reduce_in_place(&stream, &mut sum, ReduceOp::Sum).unwrap();
            }
            communicator.synchronize(&stream).unwrap();
            assert_eq!(stream.clone_dtoh(&sum).unwrap(), [2 * round; COUNT]);
        }
    });
}

fn ranks_must_agree_on_what_they_free() {
    threads(2, 1, |rank, context| {
        let communicator = Setup::default().try_build(context, rank).unwrap();
        let [first, second] = [(); 2].map(|()| communicator.symmetric_memory::<u8>(64).unwrap());
        communicator.barrier().unwrap();
        let (mine, other) = if communicator.rank() == 0 { (first, second) } else { (second, first) };
        let error = mine.free().unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
        drop(other);
        communicator.barrier().unwrap();
    });
}
