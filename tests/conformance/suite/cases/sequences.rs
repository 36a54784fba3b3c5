//! Cases of state that earlier calls leave: epochs, grids that change, buffers that are dropped, communicators used in
//! turn.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use super::{any_kind, of_each_algorithm, ALL_WORLDS, DIRECT};
use crate::suite::message::{Collective, Message, Place, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Plans, Scenario, Sequence, Setup, Step};
use crate::suite::world::World;

/// Tests registered buffers that are dropped and allocated again: ids are reused, and views of the new buffers are
/// found.
pub fn buffers_dropped_and_allocated_again(world: &dyn World) {
    for size in world.sizes(&[2, 3]) {
        let random = Random::new(&format!("reallocation in a world of {size}"));
        let setups = [Algorithm::OneShotPull, Algorithm::TwoShotPull].map(Setup::with);
        let scenario = Scenario::new(setups, |_| {
            let kind = (DType::F32, ReduceOp::Sum);
            let message = Message::new(&mut random.fork(0), kind, 700, size, Values::Plain);
            let call = |communicator, input, output| {
                let placements = vec![Placement { input, output }; size];
                Step::Call { communicator, message: 0, placements }
            };
            let rounds = (0..24).flat_map(|round| {
                let (communicator, input) = (round % 2, Place::registered(round % 4));
                [
                    Step::MakeRoom { communicator },
                    call(communicator, input, Some(Place::plain(round))),
                    call(communicator, input, None),
                ]
            });
            Sequence::new(3 * 24, vec![message], rounds.collect())
        });
        world.run(size, &[scenario]);
    }
}

/// Tests epochs that wrap around at 2^32, at every parity, in launches of different grids.
pub fn epochs_that_wrap_around(world: &dyn World) {
    for size in world.sizes(&[3, 2]) {
        let random = Random::new(&format!("wrap-around in a world of {size}"));
        let random = &random;
        let scenario = |first_epoch| {
            let setup = Setup { workers: 3, max_bytes: 256 << 10, first_epoch, ..Setup::default() };
            Scenario::new(of_each_algorithm(setup), move |_| {
                let kind = (DType::U8, ReduceOp::Sum);
                let messages = [5, 200_000, 64, 9000]
                    .map(|count| Message::new(&mut random.fork(count), kind, count, size, Values::Plain));
                let mut random = random.fork(first_epoch as usize);
                let calls =
                    (0..DIRECT).flat_map(|communicator| (0..12).map(move |call| (communicator, call)));
                let call = |(communicator, call): (usize, usize)| Step::Call {
                    communicator,
                    message: call % 4,
                    placements: Placement::randoms(&mut random, size),
                };
                Sequence::new(DIRECT * 12, messages.into(), calls.map(call).collect())
            })
        };
        world.run(size, &((u32::MAX - 6)..=u32::MAX).map(scenario).collect::<Vec<_>>());
    }
}

/// Tests launches with changing numbers of blocks: the epochs of unused blocks keep up, and slices move to other
/// blocks.
pub fn grids_that_change(world: &dyn World) {
    // On the host the last two counts use more than one block. On a GPU they use the maximum, and the smaller counts
    // use fewer.
    const COUNTS: [usize; 6] = [3, 1500, 5000, 20_000, 70_001, 140_003];
    for size in world.sizes(&[2, 3]) {
        let random = Random::new(&format!("grids in a world of {size}"));
        let setup = Setup { workers: 3, max_bytes: 256 << 10, ..Setup::default() };
        let scenario = Scenario::new(of_each_algorithm(setup), |plans| {
            let mut grids = COUNTS.map(|count| plans.plan(0, count, DType::U8).blocks).to_vec();
            grids.dedup();
            assert!(grids.len() >= 3 && grids.is_sorted(), "these counts have different grids: {grids:?}");
            let kind = (DType::U8, ReduceOp::Sum);
            let messages =
                COUNTS.map(|count| Message::new(&mut random.fork(count), kind, count, size, Values::Plain));
            let mut random = random.fork(99);
            let calls = (0..DIRECT).flat_map(|communicator| [communicator; 60]);
            let call = |communicator| Step::Call {
                communicator,
                message: random.below(COUNTS.len()),
                placements: Placement::randoms(&mut random, size),
            };
            Sequence::new(DIRECT * 60, messages.into(), calls.map(call).collect())
        });
        world.run(size, &[scenario]);
    }
}

/// Tests several communicators of one world, one for each algorithm and one without a fixed algorithm, used in any
/// order.
pub fn communicators_in_turn(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&[3, 4, 2, 8]) {
        let random = Random::new(&format!("sequences in a world of {size}"));
        let algorithms = [None, None].into_iter().chain(Algorithm::DIRECT.map(Some));
        let setups = algorithms.zip([4096, 1 << 20, 4096, 4224, 5000, 64 << 10]);
        let setups = setups.map(|(algorithm, max_bytes)| Setup { max_bytes, ..Setup::with(algorithm) });
        let scenario = Scenario::new(setups, |_| {
            let mut of_messages = random.fork(size);
            let messages: Vec<_> = (0..80).map(|_| any_message(&mut of_messages, size)).collect();
            let mut random = random.fork(99);
            let call = |_| Step::Call {
                communicator: random.below(6),
                message: random.below(messages.len()),
                placements: Placement::randoms(&mut random, size),
            };
            let steps = (0..400).map(call).collect();
            Sequence::new(400, messages, steps).thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Returns a random message, usually a small one: in a large world, a large one needs very many pieces of a small
/// region.
fn any_message(random: &mut Random, size: usize) -> Message {
    let case = any_kind(random);
    let count = any_bytes(random) / case.0.size();
    let values = random.pick(&Values::ALL);
    Message::new(random, case, count, size, values)
}

fn any_bytes(random: &mut Random) -> usize {
    match random.below(8) {
        0 | 1 => random.below(160),
        2 => random.below(60_000),
        _ => random.below(6000),
    }
}

/// Tests calls of all kinds in worlds of every size. The seed is fixed, so that a failure on one machine can be
/// reproduced on another.
pub fn calls_at_random(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&ALL_WORLDS) {
        let mut random = Random::fixed(0x5eed + size as u64);
        let pick = |random: &mut Random| Setup {
            max_bytes: 4096 + random.below(60_000),
            workers: 1 + random.below(3),
            // The epoch wraps around during the test.
            first_epoch: u32::MAX - random.below(25) as u32,
            ..Setup::default()
        };
        let setups = of_each_algorithm(pick(&mut random));
        let scenario = Scenario::new(setups, |_| {
            let mut random = random.fork(size);
            let messages: Vec<_> = (0..30).map(|_| any_message(&mut random, size)).collect();
            Sequence::each_on_each(DIRECT * 30, messages, DIRECT, || Placement::randoms(&mut random, size))
                .thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Tests all collectives in any order, alternating with allreduces of every algorithm: each call must leave the regions
/// in a state that any next call can use.
pub fn all_collectives_at_random(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&ALL_WORLDS) {
        let random = Random::new(&format!("all collectives in a world of {size}"));
        let setup = Setup { workers: 3, first_epoch: u32::MAX - 40, ..Setup::default() };
        let every = |max_bytes| Setup { every_algorithm: true, max_bytes, ..setup };
        let setups = [every(4096), every(40_000), every(300_000), Setup { workers: 1, ..every(20_000) }];
        let scenario = Scenario::new(setups, |plans| {
            let mut of_messages = random.fork(size);
            let message = |number| match number % 3 {
                0 => any_allreduce(&mut of_messages, size, plans, number % setups.len()),
                _ => any_other(&mut of_messages, size),
            };
            let messages: Vec<_> = (0..120).map(message).collect();
            let mut random = random.fork(99);
            let calls = (0..400).map(|_| random.below(messages.len())).collect::<Vec<_>>();
            let call = |message| Step::Call {
                communicator: message % setups.len(),
                message,
                placements: Placement::randoms(&mut random, size),
            };
            let steps = calls.into_iter().map(call).collect();
            Sequence::new(400, messages, steps).thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

fn any_allreduce(random: &mut Random, size: usize, plans: &Plans, communicator: usize) -> Message {
    let kind = any_kind(random);
    let count = any_bytes(random) / kind.0.size();
    let values = random.pick(&Values::ALL);
    Message::in_order(random, kind, count, size, values, plans.order(communicator, kind, count))
}

fn any_other(random: &mut Random, size: usize) -> Message {
    let (dtype, op) = any_kind(random);
    let count = any_bytes(random) / dtype.size() / size;
    let kind = random.below(Collective::OTHERS);
    let collective = Collective::other(kind, random, op, count, size);
    let values = random.pick(&Values::ALL);
    Message::of(random, collective, dtype, count, size, values)
}
