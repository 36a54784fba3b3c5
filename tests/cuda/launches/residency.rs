//! Tests that the blocks of several communicators of one process are resident on the same GPUs together, in whatever
//! order the calls arrive on each GPU. The stand-in driver runs no more blocks than its multiprocessors hold.

use std::time::Duration;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Algorithm, Communicator, Cuda, DType, Error, ReduceOp, Settings};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::threads;
use crate::random::Random;

tests! {
    stand_in_of_parent =>
        calls_in_any_order_have_room,
        a_promise_that_is_broken_ends_in_a_timeout,
        too_many_are_refused_with_the_way_out;
}

/// Runs `body` in a separate process, on devices with this number of multiprocessors, each of which holds one block of
/// 512 threads.
fn on(multiprocessors: usize, test: &str, body: impl FnOnce()) {
    match part() {
        Some(_) => body(),
        None => {
            let mut command = this_test(&format!("launches::residency::{test}"), "alone");
            command.env("STAND_IN_MULTIPROCESSORS", multiprocessors.to_string());
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{test}: {report}"));
        }
    }
}

fn calls_in_any_order_have_room() {
    on(4, "calls_in_any_order_have_room", || {
        for (rank, (blocks, problems)) in
            crossed(Duration::from_secs(20), |device| device).into_iter().enumerate()
        {
            assert_eq!((blocks, problems), ([2, 1], Vec::new()), "rank {rank}");
        }
    });
}

/// Tests why blocks are limited: if each communicator may use all blocks, the calls wait for each other until they time
/// out.
fn a_promise_that_is_broken_ends_in_a_timeout() {
    on(4, "a_promise_that_is_broken_ends_in_a_timeout", || {
        // On a busy machine the calls may happen to arrive in the same order.
        let is_late = (0..10).any(|_| {
            let ranks = crossed(Duration::from_secs(1), Cuda::one_at_a_time);
            assert!(ranks.iter().all(|(blocks, _)| *blocks == [4, 4]));
            let problems: Vec<_> = ranks.into_iter().flat_map(|(_, problems)| problems).collect();
            assert!(problems.iter().all(|problem| problem.contains("timed out")), "{problems:?}");
            !problems.is_empty()
        });
        assert!(is_late, "the calls did not time out");
    });
}

/// Calls two communicators on two GPUs, in opposite orders. Returns for each rank the blocks of both, and the errors.
fn crossed(timeout: Duration, of: impl Fn(Cuda) -> Cuda + Sync) -> Vec<([usize; 2], Vec<String>)> {
    const BYTES: usize = 256 << 10;
    // Large enough to use all available blocks.
    const COUNT: usize = 60_000;
    let random = Random::new("launches::residency::crossed");
    let started = std::sync::Barrier::new(2);
    let rank = |rank: usize, bootstraps: [Threads; 2]| {
        let mut fixtures = bootstraps.map(|bootstrap| {
            let builder = Communicator::builder().algorithm(Algorithm::OneShotPull).max_bytes(BYTES);
            let device = of(Cuda::new(context(rank)).unwrap());
            Fixture::new(builder.timeout(timeout).build(device, bootstrap).unwrap(), BYTES)
        });
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), COUNT, 2);
        let blocks = fixtures.each_ref().map(|it| it.communicator.plan(COUNT, DType::F32).blocks);
        let placement = Placement::of(MemoryKind::Plain);
        for fixture in &fixtures {
            fixture.prepare(&message, placement);
            fixture.stream.synchronize().unwrap();
        }
        started.wait();
        fixtures.rotate_left(rank);
        for fixture in &fixtures {
            fixture.start(&fixture.stream, &message, placement).unwrap();
            // The blocks of the first call are resident after this time.
            std::thread::sleep(Duration::from_millis(100));
            started.wait();
        }
        let outcomes = fixtures.each_ref().map(|fixture| fixture.compare(&message, placement));
        started.wait();
        (blocks, outcomes.into_iter().filter_map(Result::err).collect())
    };
    let both = [Threads::world(2).unwrap(), Threads::world(2).unwrap()]
        .map(|world| <[_; 2]>::try_from(world).unwrap());
    let [[first_0, first_1], [second_0, second_1]] = both;
    std::thread::scope(|scope| {
        let rank = &rank;
        let other = scope.spawn(move || rank(1, [first_1, second_1]));
        vec![rank(0, [first_0, second_0]), other.join().unwrap()]
    })
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
            // The refused communicator holds no blocks, and dropping one frees its blocks.
            world.barrier().unwrap();
            drop(second);
            world.barrier().unwrap();
            again().unwrap().barrier().unwrap();
            world.barrier().unwrap();
        });
        // If each communicator is limited to one block, there is room for one per multiprocessor.
        let with = |name, value| {
            let mut settings = Settings::new();
            settings.set("device", "cuda:0").and_then(|()| settings.set(name, value)).unwrap();
            settings.build(Threads::world(1).unwrap().remove(0))
        };
        let one = || with("max_blocks", "1");
        let all: Vec<_> = (0..4).map(|_| one().unwrap()).collect();
        assert!(matches!(one(), Err(Error::Unavailable { .. })));
        // A communicator with `one_at_a_time` may use all blocks of the GPU, and reserves none.
        let alone = || with("one_at_a_time", "1").unwrap();
        let both = [alone(), alone()];
        assert_eq!(both.each_ref().map(|it| it.plan(1 << 20, DType::F32).blocks), [4, 4]);
        assert!(matches!(one(), Err(Error::Unavailable { .. })));
        drop((all, both));
        one().unwrap();
    });
}
