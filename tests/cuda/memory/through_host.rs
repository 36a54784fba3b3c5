//! Tests GPUs that cannot access each other's memory: the ranks share pinned host memory.

use fast_allreduce::bootstrap::Bootstrap as _;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::device::Device as _;
use fast_allreduce::topology::LinkClass;
use fast_allreduce::{Algorithm, Communicator, Cuda, DType, Error, ReduceOp};

use crate::faults::settings::with;
use crate::fixtures::fixture::Setup;
use crate::fixtures::gpu::{context, stand_in_of_parent, Gpus};
use crate::fixtures::injection::live;
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::threads;

tests! {
    stand_in_of_parent =>
        calls_between_threads,
        calls_between_processes,
        broken_peer_access_is_avoided_on_request,
        nothing_is_registered;
}

const APART: (&str, &str) = ("STAND_IN_NO_PEER", "1");
const MAX_BYTES: usize = 32 << 10;

/// Reduces messages of one piece and of several, gathers, and exchanges messages.
fn calls(communicator: &Communicator<Cuda>) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let stream = communicator.device().context().new_stream().unwrap();
    // Ranks on one GPU: creating a stream may wait for another rank's kernel.
    communicator.barrier().unwrap();
    assert_eq!(communicator.device().chosen_sharing(), Some(Sharing::Host));
    for count in [1, 7, 1000, 1024 * world, 3 * MAX_BYTES / 4] {
        let own: Vec<f32> = (0..count).map(|at| ((at + 5 * rank) % 11) as f32).collect();
        let sums: Vec<f32> =
            (0..count).map(|at| (0..world).map(|rank| ((at + 5 * rank) % 11) as f32).sum()).collect();
        let mut data = stream.clone_htod(&own).unwrap();
        communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum).unwrap();
        communicator.synchronize(&stream).unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), sums, "{:?}", communicator.plan(count, DType::F32));
        let (input, mut all) =
            (stream.clone_htod(&own).unwrap(), stream.alloc_zeros::<f32>(count * world).unwrap());
        communicator.all_gather(&stream, &input, &mut all).unwrap();
        communicator.synchronize(&stream).unwrap();
        let all = stream.clone_dtoh(&all).unwrap();
        assert_eq!(all[rank * count..][..count], own);
        assert_eq!(all[(world - 1 - rank) * count], ((5 * (world - 1 - rank)) % 11) as f32);
    }
    communicator.barrier().unwrap();
}

fn calls_between_threads(_: Option<Gpus>) {
    with("memory::through_host::calls_between_threads", "apart", &[APART], || {
        for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None]) {
            for world in [2, 3] {
                threads(world, 2, |rank, context| {
                    let setup =
                        Setup { max_bytes: MAX_BYTES, first_epoch: u32::MAX - 5, ..Setup::with(algorithm) };
                    calls(&setup.try_build(context, rank).unwrap());
                });
            }
        }
    });
}

fn calls_between_processes(_: Option<Gpus>) {
    let test = "memory::through_host::calls_between_processes";
    for algorithm in [None, Some(Algorithm::TwoShotPull)] {
        let setup = Setup { max_bytes: MAX_BYTES, ..Setup::with(algorithm) };
        ranks(test, &format!("{algorithm:?}"), 3, &[APART], |local| {
            let context = context(local.rank() % 2);
            let before = live();
            let communicator = setup.try_build(context.clone(), local).unwrap();
            assert_eq!(live()["cuMemHostRegister"], 3, "each rank's region");
            let allocated = "cuMemAlloc";
            assert_eq!(live().get(allocated), before.get(allocated), "the attempt by IPC has left memory");
            calls(&communicator);
            drop(communicator);
            assert_eq!(live(), before);
        });
    }
}

/// Peer access that exists only in the driver's answers: the setting goes around it.
fn broken_peer_access_is_avoided_on_request(_: Option<Gpus>) {
    let test = "memory::through_host::broken_peer_access_is_avoided_on_request";
    with(test, "broken", &[("STAND_IN_BROKEN_PEERS", "stores"), ("STAND_IN_PTX", "0")], || {
        threads(2, 2, |rank, context| {
            let setup = Setup { sharing: Some(Sharing::Host), max_bytes: MAX_BYTES, ..Setup::default() };
            let communicator = setup.try_build(context, rank).unwrap();
            // The driver claims NVLink; the plan is that for host memory.
            assert_eq!(communicator.device().link(), LinkClass::Unreachable);
            calls(&communicator);
        });
    });
}

fn nothing_is_registered(_: Option<Gpus>) {
    with("memory::through_host::nothing_is_registered", "apart", &[APART], || {
        threads(2, 2, |rank, context| {
            let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
            let refused = |error: Error| {
                assert!(
                    matches!(error, Error::Unavailable { .. }) && error.to_string().contains("sharing=host")
                );
            };
            refused(communicator.alloc::<f32>(100).err().unwrap());
            let stream = context.new_stream().unwrap();
            let slice = crate::memory::registration::plain_slice(&stream, 4096);
            refused(communicator.register(slice).err().unwrap());
            communicator.barrier().unwrap();
        });
    });
}
