//! Communicators of one process on the same GPUs have room side by side, whatever order their calls come in on each GPU. The
//! stand-in driver lets no more blocks run than its multiprocessors hold.

use std::time::Duration;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Algorithm, Communicator, Cuda, DType, Error, ReduceOp};

use crate::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::gpu::{context, stand_in_of_parent};
use crate::processes::{part, this_test, Process};
use crate::random::Random;
use crate::threads::threads;

tests! {
    stand_in_of_parent => calls_in_any_order_have_room, too_many_are_refused_with_the_way_out;
}

/// Runs `body` in a process of its own, on devices that hold so many blocks of 512 threads.
fn on(multiprocessors: usize, test: &str, body: impl FnOnce()) {
    match part() {
        Some(_) => body(),
        None => {
            let mut command = this_test(&format!("residency::{test}"), "alone");
            command.env("STAND_IN_MULTIPROCESSORS", multiprocessors.to_string());
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{test}: {report}"));
        }
    }
}

fn calls_in_any_order_have_room() {
    on(4, "calls_in_any_order_have_room", || {
        let random = Random::new("residency::calls_in_any_order_have_room");
        let setup = Setup {
            timeout: Duration::from_secs(10),
            max_bytes: 256 << 10,
            ..Setup::with(Algorithm::OneShotPull)
        };
        let (first, second) = (Threads::world(2).unwrap(), Threads::world(2).unwrap());
        let started = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (rank, (first, second)) in first.into_iter().zip(second).enumerate() {
                let (random, started) = (&random, &started);
                scope.spawn(move || {
                    let fixture = |bootstrap| {
                        Fixture::new(setup.try_build(context(rank), bootstrap).unwrap(), 256 << 10)
                    };
                    let mut fixtures = [fixture(first), fixture(second)];
                    // Enough for all blocks that there may be.
                    let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 60_000, 2);
                    let blocks =
                        fixtures.each_ref().map(|it| it.communicator.plan(60_000, DType::F32).blocks);
                    assert_eq!(blocks, [2, 1]);
                    let placement = Placement::of(MemoryKind::Plain);
                    for fixture in &fixtures {
                        fixture.prepare(&message, placement);
                        fixture.stream.synchronize().unwrap();
                    }
                    started.wait();
                    // Each GPU has the other's last call first.
                    fixtures.rotate_left(rank);
                    for fixture in &fixtures {
                        fixture.start(&fixture.stream, &message, placement).unwrap();
                        started.wait();
                    }
                    for fixture in &fixtures {
                        fixture.report(&message, placement, fixture.compare(&message, placement));
                    }
                    started.wait();
                });
            }
        });
    });
}

fn too_many_are_refused_with_the_way_out() {
    on(4, "too_many_are_refused_with_the_way_out", || {
        threads(3, 2, |bootstrap, context| {
            // Rank 0 and rank 2 share a GPU.
            let world = Setup::default().try_build(context, bootstrap).unwrap();
            let again = || world.split(Some(0), 0).map(|part| part.unwrap());
            let blocks = |of: &Communicator<Cuda>| of.plan(1 << 20, DType::F32).blocks;
            let second = again().unwrap();
            assert_eq!((blocks(&world), blocks(&second)), (1, 1));
            let error = again().expect_err("there is no room").to_string();
            for fact in [
                "rank 0's",
                "2 communicators",
                "4 blocks",
                "drop one",
                "Cuda::max_blocks",
                "Cuda::one_at_a_time",
            ] {
                assert!(error.contains(fact), "{error}");
            }
            // What was refused has nothing, and what goes makes room.
            world.barrier().unwrap();
            drop(second);
            world.barrier().unwrap();
            again().unwrap().barrier().unwrap();
            world.barrier().unwrap();
        });
        // As many as there are multiprocessors, if each says that it is content with one.
        let small = |bootstrap| {
            Communicator::builder().build(Cuda::new(context(0)).unwrap().max_blocks(1), bootstrap)
        };
        let one = || small(Threads::world(1).unwrap().remove(0));
        let all: Vec<_> = (0..4).map(|_| one().unwrap()).collect();
        assert!(matches!(one(), Err(Error::Unavailable { .. })));
        // Who promises to be alone has all of the GPU, and takes nothing of it.
        let alone = || {
            let device = Cuda::new(context(0)).unwrap().one_at_a_time();
            Communicator::builder().build(device, Threads::world(1).unwrap().remove(0)).unwrap()
        };
        let both = [alone(), alone()];
        assert_eq!(both.each_ref().map(|it| it.plan(1 << 20, DType::F32).blocks), [4, 4]);
        assert!(matches!(one(), Err(Error::Unavailable { .. })));
        drop((all, both));
        one().unwrap();
    });
}
