//! The calls of one rank of several nodes, over any engine, with their expected results.

use std::time::{Duration, Instant};

use fast_allreduce::{Element, Error, Hierarchical, Host, InterNode, ReduceOp};
use half::{bf16, f16};

use crate::reference::{check, input, Number};

/// Makes calls of every type and operation, with counts that divide unevenly among nodes or leave ranks without a
/// slice. Returns a digest of all results, which must be equal on all ranks.
pub fn every_call<E: InterNode<Host>>(world: &Hierarchical<Host, E>) -> u64 {
    [
        calls::<f16, E>(world),
        calls::<bf16, E>(world),
        calls::<f32, E>(world),
        calls::<f64, E>(world),
        calls::<i8, E>(world),
        calls::<u8, E>(world),
        calls::<i32, E>(world),
        calls::<u32, E>(world),
        calls::<i64, E>(world),
        calls::<u64, E>(world),
    ]
    .into_iter()
    .fold(0, mix)
}

fn calls<T: Number, E: InterNode<Host>>(world: &Hierarchical<Host, E>) -> u64 {
    let nodes = world.engine().nodes();
    let mut digest = 0;
    for op in ReduceOp::ARITHMETIC {
        if op == ReduceOp::Avg && !T::DTYPE.is_float() {
            refuse_average::<T, E>(world, nodes);
            continue;
        }
        for (call, count) in [0, 1, 2, 3, 5, 64, 1000, 4099].into_iter().enumerate() {
            let own: Vec<T> = input(world.rank(), call, count, op);
            let mut output: Vec<T> = input(99, call, count, op);
            world.all_reduce(&own, &mut output, op).unwrap();
            check(&output, world.world_size(), call, op);
            let mut data = own;
            world.all_reduce_in_place(&mut data, op).unwrap();
            assert!(data.iter().zip(&output).all(|(a, b)| a.bits() == b.bits()), "in place, {op} of {count}");
            digest = output.iter().fold(digest, |digest, value| mix(digest, value.bits()));
        }
    }
    digest
}

fn mix(digest: u64, bits: u64) -> u64 {
    (digest.rotate_left(7) ^ bits).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Checks that an average of integers is refused between nodes, where it would not be exact, and works on one node.
fn refuse_average<T: Number, E: InterNode<Host>>(world: &Hierarchical<Host, E>, nodes: usize) {
    let mut data: Vec<T> = input(0, 0, 5, ReduceOp::Sum);
    let outcome = world.all_reduce_in_place(&mut data, ReduceOp::Avg);
    if nodes == 1 {
        outcome.unwrap();
    } else {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, Error::Unavailable { .. }) && error.to_string().contains("average"),
            "{error}"
        );
    }
}

/// Special values of floats; a sum that overflows where the average does not; lengths that differ.
pub fn special_values<E: InterNode<Host>>(world: &Hierarchical<Host, E>) {
    let is_last = world.rank() + 1 == world.world_size();
    let nan = if is_last { -f32::NAN } else { 1.0 };
    let zero = if is_last { -0.0 } else { 0.0 };
    let mut data = [nan, zero, if is_last { f32::INFINITY } else { -1.0 }];
    world.all_reduce_in_place(&mut data, ReduceOp::Min).unwrap();
    let only = world.world_size() == 1;
    let least = if only { f32::INFINITY } else { -1.0 };
    assert_eq!(data.map(f32::to_bits), [0x7FFF_FFFF, (-0.0f32).to_bits(), least.to_bits()]);

    let large = f16::from_f32(60_000.0);
    let mut data = [large; 3];
    world.all_reduce_in_place(&mut data, ReduceOp::Avg).unwrap();
    assert!(data.iter().all(|value| (value.to_f32() / 60_000.0 - 1.0).abs() < 0.002), "{data:?}");
    world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    assert!(only || data == [f16::INFINITY; 3]);

    let error = world.all_reduce(&[1.0f32; 3], &mut [0.0; 2], ReduceOp::Sum).unwrap_err();
    assert_eq!(error, Error::LengthMismatch { input: 3, output: 2 });
    let mut data = [1u32];
    world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [world.world_size() as u32], "a refused argument does not poison the world");
}

/// A message that passes through regions in several pieces, and that engines do not send eagerly.
pub fn large_message<E: InterNode<Host>>(world: &Hierarchical<Host, E>) {
    const COUNT: u32 = 1_000_003;
    let own: Vec<u32> = (0..COUNT).map(|index| index.wrapping_mul(world.rank() as u32 + 1)).collect();
    let mut output = vec![0; own.len()];
    world.all_reduce(&own, &mut output, ReduceOp::Sum).unwrap();
    let ranks = world.world_size() as u32;
    let factor = ranks * (ranks + 1) / 2;
    assert!((0..COUNT).zip(&output).all(|(index, &sum)| sum == index.wrapping_mul(factor)));
    let mut data = own;
    world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    assert!(data == output, "in place");
}

/// Messages of lengths around those at which a call has one more piece.
pub fn pieces<E: InterNode<Host>>(world: &Hierarchical<Host, E>) {
    around_pieces(world, |number| number as u8);
    around_pieces(world, |number| number);
}

fn around_pieces<T: Element + PartialEq, E: InterNode<Host>>(
    world: &Hierarchical<Host, E>,
    element: impl Fn(u64) -> T,
) {
    // Of each rank, where the delay between nodes is short. Elsewhere the calls have fewer pieces.
    const SLICE_BYTES: usize = 256 << 10;
    let piece = SLICE_BYTES * world.local().world_size() / size_of::<T>();
    let (rank, ranks) = (world.rank() as u64, world.world_size() as u64);
    for count in [2 * piece, 2 * piece + 1, 3 * piece + 63] {
        let numbers = |factor: u64| (0..count as u64).map(move |index| index.wrapping_mul(factor));
        let mut data: Vec<T> = numbers(rank + 1).map(&element).collect();
        // Elements beyond the message.
        data.push(element(7));
        world.all_reduce_in_place(&mut data[..count], ReduceOp::Sum).unwrap();
        let expected: Vec<T> = numbers(ranks * (ranks + 1) / 2).map(&element).collect();
        assert!(
            data[..count] == expected && data[count] == element(7),
            "{count} of {} bytes",
            size_of::<T>()
        );
    }
}

/// The field in which the calls of nodes differ.
#[derive(Debug, Clone, Copy)]
pub enum Difference {
    Operation,
    Type,
    /// The number of elements, chosen so that the slices of some, all or none of the local ranks have equal lengths.
    Count([usize; 2]),
}

pub const DIFFERENCES: [Difference; 6] = [
    Difference::Operation,
    Difference::Type,
    Difference::Count([17, 18]),
    Difference::Count([100, 40_000]),
    Difference::Count([0, 1]),
    Difference::Count([1_000_000, 1]),
];

/// The ranks of the last node make a different call: all ranks get an error that says so, long before any limit.
pub fn differ<E: InterNode<Host>>(world: &Hierarchical<Host, E>, difference: Difference) {
    let is_last = world.engine().node() + 1 == world.engine().nodes();
    let started = Instant::now();
    let call = |count, op| world.all_reduce_in_place(&mut vec![1.5f32; count], op).map(drop);
    let (outcome, texts) = match difference {
        Difference::Operation => {
            let op = if is_last { ReduceOp::Prod } else { ReduceOp::Sum };
            (
                call(33, op),
                ["all_reduce of 33 f32 (sum)".to_owned(), "all_reduce of 33 f32 (prod)".to_owned()],
            )
        }
        Difference::Type => {
            let outcome = match is_last {
                true => world.all_reduce_in_place(&mut [1i32; 33], ReduceOp::Sum),
                false => call(33, ReduceOp::Sum),
            };
            (outcome, ["all_reduce of 33 f32 (sum)".to_owned(), "all_reduce of 33 i32 (sum)".to_owned()])
        }
        Difference::Count(counts) => (
            call(counts[usize::from(is_last)], ReduceOp::Sum),
            counts.map(|count| format!("all_reduce of {count} f32 (sum)")),
        ),
    };
    let error = outcome.expect_err("nodes differ");
    let Error::Disagreement { rank, theirs, own_rank, ours, .. } = &error else { panic!("{error}") };
    let (own, other) = (&texts[usize::from(is_last)], &texts[usize::from(!is_last)]);
    assert_eq!((ours, theirs, *own_rank), (own, other, world.rank()), "{difference:?}: {error}");
    let ranks = world.local().world_size();
    let is_of_last = |rank: usize| rank / ranks + 1 == world.engine().nodes();
    assert!(is_of_last(*rank) != is_last && rank % ranks == world.local().rank(), "{error}");
    assert!(started.elapsed() < Duration::from_secs(20), "{difference:?}: after {:?}", started.elapsed());
    let again = world.all_reduce_in_place(&mut [1.5f32; 33], ReduceOp::Sum);
    assert_eq!(again, Err(error), "it stays failed");
}
