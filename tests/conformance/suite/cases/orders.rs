//! Cases of the algorithms whose results differ in bits from the direct ones. They are compared with sums in their own
//! order.

use fast_allreduce::{Algorithm, DType};

use super::{types_and_operations, ALL_WORLDS, OPERATIONS, SIZES, SMALL, TYPES, TYPE_SIZES, VALUES};
use crate::suite::message::{Message, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Scenario, Sequence, Setup};
use crate::suite::world::World;

const ORDERED: [Algorithm; 2] = [Algorithm::Ring, Algorithm::HalvingDoubling];

/// Tests every type and operation with values of all kinds: integers and their averages are exact, NaNs and infinities
/// propagate.
pub fn every_order(world: &dyn World) {
    let kinds = |size| types_and_operations(size).flat_map(|kind| Values::ALL.map(|values| (kind, values)));
    in_order(
        world,
        "product",
        TYPES * OPERATIONS * VALUES,
        Setup { max_bytes: 64 << 10, workers: 2, ..Setup::default() },
        |random, size| {
            let count = |random: &mut Random, dtype: DType| match random.below(4) {
                // Fewer elements than ranks.
                0 => 1 + random.below(size),
                1 => random.below(6000) / dtype.size(),
                _ => random.below(600) / dtype.size(),
            };
            kinds(size).map(|((dtype, op), values)| (dtype, op, count(random, dtype), values)).collect()
        },
    );
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

type Call = (DType, fast_allreduce::ReduceOp, usize, Values);

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
