//! The cases. Each runs one scenario in worlds of several sizes; `conformance!` makes tests of them.

mod boundaries;
mod collectives;
mod orders;
mod sequences;

use fast_allreduce::{Algorithm, DType, ReduceOp};

pub use self::boundaries::every_boundary;
pub use self::collectives::{
    every_boundary_of_collectives, every_collective, every_placement_of_collectives,
    every_small_count_of_collectives,
};
pub use self::orders::{every_order, every_order_in_little_room, every_order_of_sockets};
pub use self::sequences::{
    all_collectives_at_random, buffers_dropped_and_allocated_again, calls_at_random, communicators_in_turn,
    epochs_that_wrap_around, grids_that_change,
};
use super::message::{Collective, Message, Place, Placement};
use super::random::{Random, Values};
use super::scenario::{Scenario, Sequence, Setup, Step};
use super::world::World;

/// One type of each size, floats first.
const SIZES: [DType; 4] = [DType::Bf16, DType::F32, DType::I64, DType::U8];

/// All world sizes, the preferred ones first.
const ALL_WORLDS: [usize; 9] = [2, 3, 1, 4, 5, 6, 7, 8, 16];

/// Returns a setup for each direct algorithm with a small region, in which most messages of these cases are divided
/// into pieces.
fn of_each_algorithm(setup: Setup) -> [Setup; DIRECT] {
    Algorithm::DIRECT.map(|algorithm| Setup { algorithm: Some(algorithm), ..setup })
}

const SMALL: usize = 4 << 10;

// These constants determine the expected numbers of steps.
const ALGORITHMS: usize = Algorithm::ALL.len();
const DIRECT: usize = Algorithm::DIRECT.len();
const TYPES: usize = DType::ALL.len() - 1;
/// Number of operations tested with each type.
const OPERATIONS: usize = ReduceOp::ARITHMETIC.len() + 1;
const VALUES: usize = 3;
/// Number of different element sizes.
const TYPE_SIZES: usize = 4;
/// Number of collectives other than allreduce.
const COLLECTIVES: usize = Collective::OTHERS;
/// Number of those that reduce.
const REDUCING: usize = Collective::REDUCING;

/// Returns all types except one of the two 8-bit floats, which share an arithmetic: one is tested in odd worlds, the
/// other in even ones.
pub fn types(size: usize) -> impl Iterator<Item = DType> {
    let left_out = if size % 2 == 0 { DType::F8E5M2 } else { DType::F8E4M3 };
    DType::ALL.into_iter().filter(move |&dtype| dtype != left_out)
}

/// Returns the operations to test with a type: those that all types have, and one that only some types have. Of the
/// operations on integers only, each type gets a different one, so that the types of a world cover them all.
pub fn operations(dtype: DType, number: usize) -> [ReduceOp; OPERATIONS] {
    const INTEGER_ONLY: &[ReduceOp] = &ReduceOp::INTEGER_ONLY;
    let other = match dtype.is_float() {
        true => ReduceOp::PreMulSum(0.7.into()),
        false => INTEGER_ONLY[(number + dtype as usize) % INTEGER_ONLY.len()],
    };
    std::array::from_fn(|index| ReduceOp::ARITHMETIC.get(index).copied().unwrap_or(other))
}

/// Returns a random type and one of its operations.
pub fn any_kind(random: &mut Random) -> (DType, ReduceOp) {
    let dtype = random.pick(&DType::ALL);
    let number = random.below(ReduceOp::INTEGER_ONLY.len());
    (dtype, random.pick(&operations(dtype, number)))
}

pub fn types_and_operations(size: usize) -> impl Iterator<Item = (DType, ReduceOp)> {
    types(size).flat_map(move |dtype| operations(dtype, size).map(|op| (dtype, op)))
}

/// Returns messages of every type and operation with values of all kinds, of `count` elements each.
pub fn product(
    random: &mut Random,
    size: usize,
    count: impl Fn(&mut Random, DType) -> usize,
) -> Vec<Message> {
    let product = types_and_operations(size).flat_map(|case| Values::ALL.map(|values| (case, values)));
    let message = |(case, values): ((DType, ReduceOp), _)| {
        let count = count(random, case.0);
        Message::new(random, case, count, size, values)
    };
    product.map(message).collect()
}

/// Tests every type, operation and algorithm with values of all kinds, anywhere in memory. All algorithms must give
/// equal bits.
pub fn every_type_operation_and_algorithm(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&ALL_WORLDS) {
        let random = Random::new(&format!("product in a world of {size}"));
        let setups = of_each_algorithm(Setup { max_bytes: SMALL, ..Setup::default() });
        let scenario = Scenario::new(setups, |_| {
            let most = |dtype: DType| 256 / dtype.size();
            let messages =
                product(&mut random.fork(size), size, |random, dtype| 1 + random.below(most(dtype)));
            let mut random = random.fork(100);
            let expected = TYPES * OPERATIONS * VALUES * DIRECT;
            Sequence::each_on_each(expected, messages, DIRECT, || Placement::randoms(&mut random, size))
                .thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Tests counts of up to a few packs.
pub fn every_small_count(world: &dyn World) {
    let thin = world.thin();
    for size in world.sizes(&[3, 2, 5]) {
        let random = Random::new(&format!("small counts in a world of {size}"));
        let setups = of_each_algorithm(Setup { max_bytes: SMALL, ..Setup::default() });
        let scenario = Scenario::new(setups, |plans| {
            let most = 4 * plans.pack_bytes + 1;
            let counts = SIZES.into_iter().flat_map(|dtype| (0..=most).map(move |count| (dtype, count)));
            let mut of_messages = random.fork(size);
            let message = |(dtype, count)| {
                Message::new(&mut of_messages, (dtype, ReduceOp::Sum), count, size, Values::Plain)
            };
            let messages = counts.map(message).collect();
            let mut random = random.fork(100);
            let expected = TYPE_SIZES * (4 * plans.pack_bytes + 2) * DIRECT;
            Sequence::each_on_each(expected, messages, DIRECT, || Placement::randoms(&mut random, size))
                .thinned(thin, size)
        });
        world.run(size, &[scenario]);
    }
}

/// Tests each pair of offsets, different on each rank; inputs registered on all, some or no ranks; in place and out of
/// place.
pub fn every_placement(world: &dyn World) {
    const OFFSETS: [usize; 6] = [0, 1, 2, 3, 7, 32];
    let setup = Setup { max_bytes: SMALL, ..Setup::default() };
    for size in world.sizes(&[2, 3, 5]) {
        let random = Random::new(&format!("placements in a world of {size}"));
        let placement = |number: usize, (input, output): (usize, usize), rank: usize| {
            let offset = |number: usize| OFFSETS[(number + rank) % OFFSETS.len()];
            // The ranks whose inputs are registered: none, all, even ranks, rank 0 alone, all except rank 0.
            let registered = [false, true, rank % 2 == 0, rank == 0, rank != 0][number % 5];
            let input =
                if registered { Place::registered(offset(input)) } else { Place::plain(offset(input)) };
            let output = match number % 3 {
                // In place on all ranks, on none, on some.
                0 => None,
                1 => Some(Place::plain(offset(output))),
                _ => (rank != number % size).then(|| Place::registered(offset(output))),
            };
            Placement { input, output }
        };
        let setups = of_each_algorithm(setup).into_iter().chain([setup]);
        let scenario = Scenario::new(setups, |_| {
            let mut random = random.fork(size);
            let counts = [1, 37, 1000].into_iter().flat_map(|count| SIZES.map(|dtype| (dtype, count)));
            let message = |(dtype, count)| {
                Message::new(&mut random, (dtype, ReduceOp::Sum), count, size, Values::Plain)
            };
            let messages = counts.map(message).collect::<Vec<_>>();
            let pairs = || (0..OFFSETS.len()).flat_map(|i| (0..OFFSETS.len()).map(move |j| (i, j)));
            let steps = (0..=DIRECT).flat_map(|communicator| {
                pairs().enumerate().map(move |(number, pair)| (communicator, number, pair))
            });
            let call = |(communicator, number, pair)| Step::Call {
                communicator,
                message: number % messages.len(),
                placements: (0..size).map(|rank| placement(number, pair, rank)).collect(),
            };
            let steps = steps.map(call).collect();
            // Each pair of the six offsets on each communicator.
            Sequence::new((DIRECT + 1) * 6 * 6, messages, steps)
        });
        world.run(size, &[scenario]);
    }
}
