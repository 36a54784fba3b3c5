//! Cases of the collectives other than allreduce: every type, small counts, edges, and places in memory.

use fast_allreduce::{DType, ReduceOp};

use super::{
    operations, types, ALL_WORLDS, COLLECTIVES, OPERATIONS, REDUCING, SIZES, SMALL, TYPES, TYPE_SIZES,
};
use crate::suite::message::{Collective, Message, Place, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Expected, Scenario, Sequence, Setup, Step};
use crate::suite::world::World;

/// Minimum number of calls, with three counts around each of eight edges for every collective. About half are too large
/// in some of the worlds.
const LEAST: usize = 140;

/// Tests every collective with every type, and every operation if it reduces, anywhere in memory.
pub fn every_collective(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&ALL_WORLDS) {
        let random = Random::new(&format!("collectives in a world of {size}"));
        let setups = [Setup { max_bytes: SMALL, ..Setup::default() }];
        let scenario = Scenario::new(setups, |_| {
            let mut random = random.fork(size);
            let mut messages = Vec::new();
            for (dtype, kind) in types(size).flat_map(|dtype| kinds().map(move |kind| (dtype, kind))) {
                for op in operations(dtype, size) {
                    let count = 1 + random.below(400) / dtype.size();
                    let collective = Collective::other(kind, &mut random, op, count, size);
                    let reduces = collective.op().is_some();
                    let values = random.pick(&Values::ALL);
                    messages.push(Message::of(&mut random, collective, dtype, count, size, values));
                    if !reduces {
                        break;
                    }
                }
            }
            let expected = TYPES * (COLLECTIVES - REDUCING + REDUCING * OPERATIONS);
            Sequence::each_on_each(expected, messages, 1, || Placement::randoms(&mut random, size))
                .thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Tests counts of up to a few packs, with each collective in turn.
pub fn every_small_count_of_collectives(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&[3, 2, 5]) {
        let random = Random::new(&format!("small counts of collectives in a world of {size}"));
        let setups = [Setup { max_bytes: SMALL, every_algorithm: true, workers: 2, ..Setup::default() }];
        let scenario = Scenario::new(setups, |_| {
            let counts = [DType::F16, DType::I64]
                .into_iter()
                .flat_map(|dtype| (0..=257).map(move |count| (dtype, count)));
            let calls = counts.flat_map(|call| kinds().map(move |kind| (call, kind)));
            // The counts are those of two types.
            of_each(2 * 258 * COLLECTIVES, &mut random.fork(size), size, calls).thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Tests shares and messages of several pieces that end at each edge: a pack, the pieces of a message and of a share, a
/// chunk of a channel.
pub fn every_boundary_of_collectives(world: &dyn World) {
    let thin = world.thin();
    let regions = [(1 << 20, 3), (SMALL, 1), (10_000, 2)];
    for size in world.sizes(&[3, 2, 7]) {
        let random = Random::new(&format!("boundaries of collectives in a world of {size}"));
        let scenario = |(max_bytes, workers): (usize, usize)| {
            let random = &random;
            Scenario::new([Setup { max_bytes, workers, ..Setup::default() }], move |plans| {
                let dtype = SIZES[(size + max_bytes) % 4];
                let pack = plans.pack_bytes;
                // Bytes of a launch that stages whole messages, of one that stages each rank's share, and the host's
                // maximum for a launch.
                let (whole, share, launch) =
                    (max_bytes / pack * pack, max_bytes / size / pack * pack, 256 << 10);
                // Two slots for each peer in 120 KiB.
                let chunk = (120 << 10) / (2 * (size - 1)) / 128 * 128;
                let edges = [pack, whole, share, launch, launch / size, chunk, 2 * chunk, 3 * share];
                let counts = edges.into_iter().map(|bytes| bytes / dtype.size());
                let calls = counts.flat_map(|edge| [edge - 1, edge, edge + 1].map(|count| (dtype, count)));
                let calls = calls.flat_map(|call| kinds().map(move |kind| (call, kind)));
                let bytes = |kind, count| Collective::most_shares(kind, size) * count * dtype.size();
                let calls = calls.filter(|((_, count), kind)| bytes(*kind, *count) < 300 << 10);
                of_each(Expected::AtLeast(LEAST), &mut random.fork(max_bytes), size, calls)
                    .thinned(4 * thin, size)
            })
        };
        world.run(size, &regions.map(scenario));
    }
}

/// Tests calls that are in place on all, some or no ranks, with inputs registered on all, some or no ranks, at odd
/// offsets.
pub fn every_placement_of_collectives(world: &dyn World) {
    const OFFSETS: [usize; 6] = [0, 1, 2, 3, 7, 32];
    for size in world.sizes(&[2, 3, 5]) {
        let random = Random::new(&format!("placements of collectives in a world of {size}"));
        let placement = |number: usize, rank: usize| {
            let offset = |number: usize| OFFSETS[(number + rank) % OFFSETS.len()];
            let registered = [false, true, rank % 2 == 0, rank == 0, rank != 0][number % 5];
            let place = if registered { Place::registered } else { Place::plain };
            let output = match number % 3 {
                0 => None,
                1 => Some(Place::plain(offset(number / 6))),
                _ => (rank != number % size).then(|| Place::registered(offset(number / 2))),
            };
            Placement { input: place(offset(number)), output }
        };
        let setups = [Setup { max_bytes: SMALL, ..Setup::default() }];
        let scenario = Scenario::new(setups, |_| {
            let counts = [1, 37, 1000].into_iter().flat_map(|count| SIZES.map(|dtype| (dtype, count)));
            let calls = counts.flat_map(|call| kinds().map(move |kind| (call, kind)));
            let expected = TYPE_SIZES * 3 * COLLECTIVES;
            let Sequence { messages, .. } = of_each(expected, &mut random.fork(size), size, calls);
            // Each of the 15 patterns with each message.
            let pairs =
                (0..15).flat_map(|pattern| (0..messages.len()).map(move |message| (pattern, message)));
            let call = |(pattern, message): (usize, usize)| Step::Call {
                communicator: 0,
                message,
                placements: (0..size).map(|rank| placement(pattern + 15 * message, rank)).collect(),
            };
            let steps = pairs.map(call).collect();
            Sequence::new(15 * expected, messages, steps)
        });
        world.run(size, &[scenario]);
    }
}

fn kinds() -> std::ops::Range<usize> {
    0..Collective::OTHERS
}

/// Makes a sequence with one call of each, anywhere in memory.
fn of_each(
    expected: impl Into<Expected>,
    random: &mut Random,
    size: usize,
    calls: impl Iterator<Item = ((DType, usize), usize)>,
) -> Sequence {
    let message = |((dtype, count), kind)| {
        let collective = Collective::other(kind, random, ReduceOp::Sum, count, size);
        Message::of(random, collective, dtype, count, size, Values::Plain)
    };
    let messages = calls.map(message).collect();
    Sequence::each_on_each(expected, messages, 1, || Placement::randoms(random, size))
}
