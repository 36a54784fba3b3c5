//! Ranks as threads of this process, each with a stream: on one GPU, and on two.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use fast_allreduce::bootstrap::{Bootstrap, Threads};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::Algorithm;

use crate::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::gpu::{context, gpu, two_gpus};
use crate::random::Random;

tests! {
    gpu => ranks_on_one_gpu, each_way_of_sharing_within_a_process, calls_move_between_streams;
    two_gpus => ranks_on_two_gpus, each_way_of_sharing_between_gpus;
}

/// Runs `body` on a thread for each rank, whose GPUs take turns, and returns what each returned.
pub fn threads<R: Send>(
    size: usize,
    devices: usize,
    body: impl Fn(Threads, Arc<CudaContext>) -> R + Sync,
) -> Vec<R> {
    let ranks = Threads::world(size).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let start = |rank: Threads| {
            scope.spawn(move || {
                let context = context(rank.rank() % devices);
                body(rank, context)
            })
        };
        let ranks: Vec<_> = ranks.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// A fixture for each rank; after `body`, no rank frees before all have come to their ends.
pub fn fixtures(size: usize, devices: usize, setup: Setup, bytes: usize, body: impl Fn(&Fixture) + Sync) {
    threads(size, devices, |rank, context| {
        let fixture = Fixture::new(setup.try_build(context, rank).unwrap(), bytes);
        body(&fixture);
        fixture.stream.synchronize().unwrap();
        fixture.communicator.barrier().unwrap();
    });
}

const BYTES: usize = 100 << 10;

/// Calls of all kinds, types and sizes, one after the other on the same communicators.
pub fn calls(name: &str, size: usize, devices: usize, setup: Setup, rounds: usize) {
    let random = Random::new(&format!("{name} {size} {:?}", setup.algorithm));
    fixtures(size, devices, setup, BYTES, |fixture| mixed_calls(fixture, &random, rounds));
}

/// The same calls on every rank: the seed decides.
pub fn mixed_calls(fixture: &Fixture, random: &Random, rounds: usize) {
    for round in 0..rounds {
        let mut random = random.fork(round);
        let below = random.below(BYTES / 8);
        let count = random.pick(&[0, 1, 3, 64, 1000, 1025, below]);
        let message = Message::random(&mut random, count, fixture.communicator.world_size());
        fixture.check(&message, Placement::random(&mut random));
    }
    // Larger than a launch takes: in pieces.
    let mut random = random.fork(rounds);
    let message = Message::new(
        &mut random,
        (fast_allreduce::DType::F32, fast_allreduce::ReduceOp::Sum),
        BYTES / 4,
        fixture.communicator.world_size(),
    );
    for kind in MemoryKind::ALL {
        fixture.check(&message, Placement::of(kind));
    }
}

fn ranks_on_one_gpu() {
    for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None]) {
        for size in [1, 2, 3] {
            let setup = Setup { first_epoch: u32::MAX - 7, ..Setup::with(algorithm) };
            calls("threads::ranks_on_one_gpu", size, 1, setup, 12);
        }
    }
}

fn ranks_on_two_gpus() {
    for algorithm in Algorithm::DIRECT.map(Some).into_iter().chain([None]) {
        for size in [2, 4] {
            let setup = Setup { first_epoch: u32::MAX - 9, ..Setup::with(algorithm) };
            calls("threads::ranks_on_two_gpus", size, 2, setup, 12);
        }
    }
}

/// The ways to share that are meant for processes work within one too.
fn each_way_of_sharing_within_a_process() {
    each_way_of_sharing(1);
}

fn each_way_of_sharing_between_gpus() {
    each_way_of_sharing(2);
}

fn each_way_of_sharing(devices: usize) {
    for sharing in [Sharing::Pointers, Sharing::Descriptor, Sharing::Ipc] {
        let setup = Setup { sharing: Some(sharing), ..Setup::default() };
        calls(&format!("each_way_of_sharing {sharing:?}"), 2, devices, setup, 6);
    }
}

fn calls_move_between_streams() {
    let random = Random::new("threads::calls_move_between_streams");
    fixtures(2, 1, Setup::with(Algorithm::TwoShotPull), 4096, |fixture| {
        let other = fixture.communicator.device().context().new_stream().unwrap();
        let placements = [
            Placement::of(MemoryKind::Plain),
            Placement::of(MemoryKind::Pool),
            Placement::of(MemoryKind::Registered),
        ];
        for round in 0..10 {
            let mut random = random.fork(round);
            let messages = placements.map(|_| Message::random(&mut random, 300, 2));
            for (message, placement) in messages.iter().zip(placements) {
                fixture.prepare(message, placement);
            }
            fixture.stream.synchronize().unwrap();
            // Nothing orders the three but the communicator.
            for (i, (message, placement)) in messages.iter().zip(placements).enumerate() {
                let stream = if (i + round) % 2 == 0 { &fixture.stream } else { &other };
                fixture.start(stream, message, placement).unwrap();
            }
            other.synchronize().unwrap();
            for (message, placement) in messages.iter().zip(placements) {
                fixture.report(message, placement, fixture.compare(message, placement));
            }
        }
    });
}
