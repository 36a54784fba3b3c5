//! The end of communicators and buffers: memory that peers have open by CUDA IPC is freed after they have closed it, in
//! whatever order things are dropped. The stand-in driver ends a process that frees too early.

use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap as _, Local};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Buffer, Communicator, Cuda, ReduceOp};

use crate::fixture::Setup;
use crate::gpu::{context, stand_in};
use crate::processes::ranks;

tests! {
    stand_in => buffers_outlive_their_communicator, memory_stays_for_a_rank_that_is_late;
}

/// A communicator and two buffers that have been used.
fn open(local: Local) -> (Communicator<Cuda>, [Buffer<f32, Cuda>; 2]) {
    let setup = Setup { sharing: Some(Sharing::Ipc), ..Setup::with(Algorithm::TwoShotPull) };
    let communicator = setup.try_build(context(0), local).unwrap();
    let [mut first, mut second] = [(); 2].map(|()| communicator.alloc::<f32>(5000).unwrap());
    let stream = communicator.device().context().new_stream().unwrap();
    communicator.all_reduce(&stream, &first, &mut second, ReduceOp::Sum).unwrap();
    communicator.all_reduce_in_place(&stream, &mut first, ReduceOp::Sum).unwrap();
    communicator.synchronize(&stream).unwrap();
    communicator.barrier().unwrap();
    (communicator, [first, second])
}

fn buffers_outlive_their_communicator() {
    let test = "closing::buffers_outlive_their_communicator";
    const PAUSE: Duration = Duration::from_millis(300);
    // What each rank drops first, and when.
    ranks(test, "communicator first", 2, &[], |local| {
        let rank = local.rank();
        let (communicator, buffers) = open(local);
        drop(communicator);
        if rank == 0 {
            std::thread::sleep(PAUSE);
        }
        drop(buffers);
    });
    ranks(test, "one each way", 3, &[], |local| {
        let rank = local.rank();
        let (communicator, [first, second]) = open(local);
        if rank == 1 {
            drop((first, second));
            std::thread::sleep(PAUSE);
            return drop(communicator);
        }
        drop((first, communicator));
        std::thread::sleep(PAUSE * rank as u32);
        drop(second);
    });
}

/// A rank that does not come in time finds its peers' memory where it was.
fn memory_stays_for_a_rank_that_is_late() {
    ranks("closing::memory_stays_for_a_rank_that_is_late", "late", 2, &[], |local| {
        let rank = local.rank();
        let (communicator, buffers) = open(local);
        if rank == 0 {
            std::thread::sleep(Duration::from_secs(4));
        }
        let started = Instant::now();
        drop(communicator);
        assert!(started.elapsed() < Duration::from_secs(1), "the buffers are there still");
        drop(buffers);
        assert!(started.elapsed() < Duration::from_secs(20), "closing is bounded");
        if rank == 1 {
            // Its memory outlasts the other rank's mappings, and not the process.
            std::thread::sleep(Duration::from_secs(3));
        }
    });
}
