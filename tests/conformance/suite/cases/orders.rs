//! Cases of the algorithms whose results differ in bits from the direct ones. They are compared with sums in their own
//! order.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use super::{types_and_operations, ALL_WORLDS, OPERATIONS, SIZES, SMALL, TYPES, TYPE_SIZES, VALUES};
use crate::suite::message::{Message, Placement};
use crate::suite::order::Order;
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Scenario, Sequence, Setup};
use crate::suite::world::World;

const ORDERED: [Algorithm; 2] = [Algorithm::Ring, Algorithm::HalvingDoubling];

/// Tests every type and operation with values of all kinds: integers and their averages are exact, NaNs and infinities
/// propagate.
pub fn every_order(world: &dyn World) {
    in_order(
        world,
        "product",
        TYPES * OPERATIONS * VALUES,
        Setup { max_bytes: 64 << 10, workers: 2, ..Setup::default() },
        product,
    );
}

/// Returns calls of every type and operation with values of all kinds.
fn product(random: &mut Random, size: usize) -> Vec<Call> {
    let kinds = types_and_operations(size).flat_map(|kind| Values::ALL.map(|values| (kind, values)));
    let count = |random: &mut Random, dtype: DType| match random.below(4) {
        // Fewer elements than ranks.
        0 => 1 + random.below(size),
        1 => random.below(6000) / dtype.size(),
        _ => random.below(600) / dtype.size(),
    };
    kinds.map(|((dtype, op), values)| (dtype, op, count(random, dtype), values)).collect()
}

/// Tests two-level pulls on pretended sockets: every type and operation in regions of two sizes, in the second with
/// pieces of few packs.
#[allow(dead_code, reason = "only the host has sockets")]
pub fn every_order_of_sockets(world: &dyn World) {
    let thin = world.thin();
    // Numbers of ranks and of sockets: two and three sockets, two to eight ranks on each.
    const WORLDS: [(usize, usize); 5] = [(4, 2), (6, 3), (6, 2), (8, 2), (16, 2)];
    let sizes = world.sizes(&WORLDS.map(|(size, _)| size));
    for (size, sockets) in WORLDS.into_iter().filter(|(size, _)| sizes.contains(size)) {
        let random = &Random::new(&format!("{sockets} sockets in a world of {size}"));
        let scenario = |max_bytes: usize| {
            let setup = Setup {
                algorithm: Some(Algorithm::TwoShotPull),
                max_bytes,
                workers: 2,
                sockets,
                ..Setup::default()
            };
            Scenario::new([setup], move |_| {
                let mut of_messages = random.fork(size);
                let calls = product(&mut of_messages, size);
                let message = |(dtype, op, count, values): Call| {
                    let order = match op == ReduceOp::Avg && !dtype.is_float() {
                        true => Order::Ranks,
                        false => Order::Sockets { each: size / sockets },
                    };
                    Message::in_order(&mut of_messages, (dtype, op), count, size, values, order)
                };
                let messages = calls.into_iter().map(message).collect();
                let mut random = random.fork(100);
                let expected = TYPES * OPERATIONS * VALUES;
                Sequence::each_on_each(expected, messages, 1, || Placement::randoms(&mut random, size))
                    .thinned(thin, size)
            })
        };
        world.run(size, &[64 << 10, SMALL].map(scenario));
    }
}

/// Tests pieces of few packs, and regions in which a step of a large ring does not fit; then a direct algorithm
/// replaces it.
pub fn every_order_in_little_room(world: &dyn World) {
    let setup = Setup { max_bytes: SMALL, ..Setup::default() };
    // Four counts for each type and operation.
    in_order(world, "orders in little room", TYPE_SIZES * OPERATIONS * 4, setup, |random, size| {
        let kinds = types_and_operations(size).filter(|(dtype, _)| SIZES.contains(dtype));
        let counts = kinds.flat_map(|(dtype, op)| [0, 1, size - 1, 900].map(|count| (dtype, op, count)));
        counts.map(|(dtype, op, count)| (dtype, op, count + random.below(3), Values::Plain)).collect()
    });
}

type Call = (DType, ReduceOp, usize, Values);

fn in_order(
    world: &dyn World,
    name: &str,
    expected: usize,
    setup: Setup,
    calls: impl Fn(&mut Random, usize) -> Vec<Call> + Sync,
) {
    let thin = world.thin();
    for size in world.sizes(&ALL_WORLDS) {
        let random = Random::new(&format!("{name} in a world of {size}"));
        let (random, calls) = (&random, &calls);
        let scenario = |algorithm: Algorithm| {
            Scenario::new([Setup { algorithm: Some(algorithm), ..setup }], move |plans| {
                let mut of_messages = random.fork(size);
                let calls = calls(&mut of_messages, size);
                let message = |(dtype, op, count, values)| {
                    let order = plans.order(0, (dtype, op), count);
                    Message::in_order(&mut of_messages, (dtype, op), count, size, values, order)
                };
                let messages = calls.into_iter().map(message).collect();
                let mut random = random.fork(100);
                Sequence::each_on_each(expected, messages, 1, || Placement::randoms(&mut random, size))
                    .thinned(thin, size)
            })
        };
        world.run(size, &ORDERED.map(scenario));
    }
}
