//! Cases with counts around each threshold: a pack, a slice of packs, a piece of the message, a change of the grid.

use fast_allreduce::{Algorithm, DType, Plan, ReduceOp};

use super::{ALGORITHMS, SIZES};
use crate::suite::message::{Message, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Expected, Scenario, Sequence, Setup};
use crate::suite::world::World;

/// Minimum number of counts of both types together: five around each of six edges, without duplicates and those beyond
/// the limit, plus those where the grid changes.
const LEAST: usize = 24;

/// Tests messages of several pieces that end at each edge.
pub fn every_boundary(world: &dyn World) {
    let regions = [(1 << 20, 3), (4 << 10, 1), (10_000, 1), (64 << 10, 1)];
    let regions = if world.thin() > 1 { &regions[..2] } else { &regions[..] };
    for size in world.sizes(&[3, 2, 4, 7]) {
        let of_algorithm = |(algorithm, index): (Algorithm, usize)| {
            // Each algorithm runs with two of the types, so that every pair of algorithm and type occurs in some world.
            let dtypes = [SIZES[(index + size) % 4], SIZES[(index + size + 1) % 4]];
            regions.iter().map(move |&(max_bytes, workers)| {
                boundaries_of(size, Setup { max_bytes, workers, ..Setup::with(algorithm) }, dtypes)
            })
        };
        let scenarios = Algorithm::ALL.into_iter().zip(0..).flat_map(of_algorithm);
        let scenarios: Vec<_> = scenarios.collect();
        assert_eq!(scenarios.len(), ALGORITHMS * regions.len());
        world.run(size, &scenarios);
    }
}

fn boundaries_of(size: usize, setup: Setup, dtypes: [DType; 2]) -> Scenario<'static> {
    let name = format!("boundaries of {:?}, {} bytes, {size}", setup.algorithm, setup.max_bytes);
    let random = Random::new(&name);
    Scenario::new([setup], move |plans| {
        let mut of_messages = random.fork(size);
        let counts = dtypes.into_iter().flat_map(|dtype| {
            let plan = |count| plans.plan(0, count, dtype);
            let counts = boundaries(&plan, size, plans.pack_bytes / dtype.size(), dtype.size());
            counts.into_iter().map(move |count| (dtype, count))
        });
        let messages = counts.map(|(dtype, count)| {
            let kind = (dtype, ReduceOp::Sum);
            let order = plans.order(0, kind, count);
            Message::in_order(&mut of_messages, kind, count, size, Values::Plain, order)
        });
        let messages = messages.collect();
        let mut random = random.fork(100);
        Sequence::each_on_each(Expected::AtLeast(LEAST), messages, 1, || {
            Placement::randoms(&mut random, size)
        })
    })
}

/// Returns the counts to test. `pack` is the number of elements of a pack.
fn boundaries(plan: &dyn Fn(usize) -> Plan, world: usize, pack: usize, element_size: usize) -> Vec<usize> {
    let piece = plan(1).piece_bytes / element_size;
    let mut edges = vec![pack, world * pack, piece, 2 * piece, 5 * piece, piece + world * pack];
    // At most eight pieces.
    let limit = ((400 << 10) / element_size).min(8 * piece);
    let (mut from, steps) = (1, edges.len() + 2 * 3);
    // If the grid grows in many steps, only the first three.
    while plan(from).blocks != plan(limit).blocks && edges.len() < steps {
        let next = next_change(from, limit, |count| plan(count).blocks);
        edges.extend([next, plan(next).piece_bytes / element_size]);
        from = next;
    }
    let around = |edge: usize| [edge.saturating_sub(pack + 1), edge - 1, edge, edge + 1, edge + pack - 1];
    let mut counts: Vec<_> =
        edges.into_iter().flat_map(around).filter(|&count| count > 0 && count <= limit).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Returns the first number above `from` at which the monotonic function `of` has another value than at `from`.
fn next_change(from: usize, to: usize, of: impl Fn(usize) -> usize) -> usize {
    let (mut low, mut high) = (from, to);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if of(middle) == of(from) {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}
