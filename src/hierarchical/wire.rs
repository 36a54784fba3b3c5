//! How elements are given to MPI, which has no 16-bit floats, and whose libraries do not all agree with this crate on
//! the rest.
//!
//! | | sum, product, average | minimum, maximum |
//! |---|---|---|
//! | f16, bf16, f32 | f32 | the order of f32 as i32 |
//! | f64 | f64 | the order of f64 as i64 |
//! | i8, u8, i32, u32 | u32 | i32; u32 with its top bit flipped |
//! | i64, u64 | u64 | i64; u64 with its top bit flipped |
//!
//! 16-bit floats are reduced in f32 and rounded once. An operation of this crate's own on 16 bits would round at each
//! of MPI's steps, and to gather all nodes' slices and reduce them here would take bytes that grow with the nodes.
//!
//! Narrow integers are widened, as sums of 8 bits saturate in Open MPI 4.1.4; unsigned ones are compared as signed
//! ones, as MPICH 4.0.2 does so in any case. The order of floats is that of `ReduceOp`: -0 is below +0, and a NaN wins.

use half::{bf16, f16};

use crate::bootstrap::{Combine, Words};
use crate::dtype::Element;
use crate::op::ReduceOp;

/// An element that MPI can be given in some form.
pub(super) trait Wire: Element {
    /// What MPI is to reduce.
    fn encode(elements: &[Self], op: ReduceOp) -> Words;

    /// What it made of it, of this many nodes.
    fn decode(words: &Words, op: ReduceOp, nodes: usize, elements: &mut [Self]);
}

/// What MPI is to do.
pub(super) fn combine(op: ReduceOp) -> Combine {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => Combine::Sum,
        ReduceOp::Prod => Combine::Prod,
        ReduceOp::Min => Combine::Min,
        ReduceOp::Max => Combine::Max,
    }
}

fn is_extreme(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Min | ReduceOp::Max)
}

fn fill<T, W: Copy>(elements: &mut [T], words: &[W], of: impl Fn(W) -> T) {
    for (element, &word) in elements.iter_mut().zip(words) {
        *element = of(word);
    }
}

/// Floats of one width: their order as integers, in which a NaN is the largest for a maximum and the smallest for a
/// minimum.
macro_rules! ordered {
    ($rank:ident, $value:ident, $float:ty, $integer:ty) => {
        fn $rank(value: $float, op: ReduceOp) -> $integer {
            match (value.is_nan(), op) {
                (true, ReduceOp::Min) => <$integer>::MIN,
                (true, _) => <$integer>::MAX,
                (false, _) => {
                    let bits = value.to_bits() as $integer;
                    // Of negative numbers, the larger magnitude is the smaller number.
                    if bits < 0 {
                        bits ^ <$integer>::MAX
                    } else {
                        bits
                    }
                }
            }
        }

        fn $value(rank: $integer) -> $float {
            if rank == <$integer>::MIN || rank == <$integer>::MAX {
                return <$float>::NAN;
            }
            let bits = if rank < 0 { rank ^ <$integer>::MAX } else { rank };
            <$float>::from_bits(bits as _)
        }
    };
}
ordered!(rank32, value32, f32, i32);
ordered!(rank64, value64, f64, i64);

macro_rules! float {
    ($float:ty, $wide:ty, $Wide:ident, $Order:ident, $rank:ident, $value:ident, $widen:expr, $narrow:expr, $nan:expr) => {
        impl Wire for $float {
            fn encode(elements: &[Self], op: ReduceOp) -> Words {
                let wide = elements.iter().map(|&element| $widen(element));
                if is_extreme(op) {
                    Words::$Order(wide.map(|value| $rank(value, op)).collect())
                } else {
                    Words::$Wide(wide.collect())
                }
            }

            fn decode(words: &Words, op: ReduceOp, nodes: usize, elements: &mut [Self]) {
                // The one NaN that results hold, whichever MPI's arithmetic left.
                let narrow =
                    |value: $wide| if value.is_nan() { <$float>::from_bits($nan) } else { $narrow(value) };
                match words {
                    Words::$Wide(words) if op == ReduceOp::Avg => {
                        fill(elements, words, |value| narrow(value / nodes as $wide));
                    }
                    Words::$Wide(words) => fill(elements, words, narrow),
                    Words::$Order(words) => fill(elements, words, |rank| narrow($value(rank))),
                    _ => unreachable!("what was encoded"),
                }
            }
        }
    };
}
float!(f16, f32, F32, I32, rank32, value32, f16::to_f32, f16::from_f32, 0x7FFF);
float!(bf16, f32, F32, I32, rank32, value32, bf16::to_f32, bf16::from_f32, 0x7FFF);
float!(f32, f32, F32, I32, rank32, value32, std::convert::identity, std::convert::identity, 0x7FFF_FFFF);
float!(
    f64,
    f64,
    F64,
    I64,
    rank64,
    value64,
    std::convert::identity,
    std::convert::identity,
    0x7FFF_FFFF_FFFF_FFFF
);

/// `$flip` is what makes signed order of an unsigned number's.
macro_rules! integer {
    ($integer:ty, $unsigned:ty, $Unsigned:ident, $signed:ty, $Signed:ident, $flip:expr) => {
        impl Wire for $integer {
            fn encode(elements: &[Self], op: ReduceOp) -> Words {
                let signed = elements.iter().map(|&element| element as $signed);
                if is_extreme(op) {
                    Words::$Signed(signed.map(|value| value ^ $flip).collect())
                } else {
                    // Modulo a power of two, so the low bits are those of the sum or product of the narrow type.
                    Words::$Unsigned(signed.map(|value| value as $unsigned).collect())
                }
            }

            fn decode(words: &Words, _: ReduceOp, _: usize, elements: &mut [Self]) {
                match words {
                    Words::$Signed(words) => fill(elements, words, |value| (value ^ $flip) as Self),
                    Words::$Unsigned(words) => fill(elements, words, |value| value as Self),
                    _ => unreachable!("what was encoded"),
                }
            }
        }
    };
}
integer!(i8, u32, U32, i32, I32, 0);
integer!(u8, u32, U32, i32, I32, 0);
integer!(i32, u32, U32, i32, I32, 0);
integer!(u32, u32, U32, i32, I32, i32::MIN);
integer!(i64, u64, U64, i64, I64, 0);
integer!(u64, u64, U64, i64, I64, i64::MIN);

#[cfg(test)]
mod tests {
    use super::*;

    /// What a faultless MPI would make of one element of each of several nodes.
    fn reduce<T: Wire + Default>(elements: &[T], op: ReduceOp) -> T {
        macro_rules! fold {
            ($words:expr, $kind:ident, $add:expr, $multiply:expr) => {{
                let numbers = $words.iter().map(|words| match words {
                    Words::$kind(numbers) => numbers[0],
                    _ => unreachable!(),
                });
                let combined = match combine(op) {
                    Combine::Sum => numbers.reduce($add),
                    Combine::Prod => numbers.reduce($multiply),
                    Combine::Min => numbers.reduce(|a, b| if b < a { b } else { a }),
                    Combine::Max => numbers.reduce(|a, b| if b > a { b } else { a }),
                };
                Words::$kind(vec![combined.unwrap()])
            }};
        }
        let words: Vec<Words> = elements.iter().map(|&element| T::encode(&[element], op)).collect();
        let combined = match &words[0] {
            Words::F32(_) => fold!(words, F32, |a, b| a + b, |a, b| a * b),
            Words::F64(_) => fold!(words, F64, |a, b| a + b, |a, b| a * b),
            Words::I32(_) => fold!(words, I32, i32::wrapping_add, i32::wrapping_mul),
            Words::I64(_) => fold!(words, I64, i64::wrapping_add, i64::wrapping_mul),
            Words::U32(_) => fold!(words, U32, u32::wrapping_add, u32::wrapping_mul),
            Words::U64(_) => fold!(words, U64, u64::wrapping_add, u64::wrapping_mul),
        };
        let mut output = [T::default()];
        T::decode(&combined, op, elements.len(), &mut output);
        output[0]
    }

    #[test]
    fn integers_wrap_and_are_compared_as_they_are() {
        assert_eq!(reduce(&[100i8, 100, 100], ReduceOp::Sum), 100i8.wrapping_mul(3));
        assert_eq!(reduce(&[-128i8, 3, 5], ReduceOp::Prod), (-128i8).wrapping_mul(15));
        assert_eq!(reduce(&[200u8, 100], ReduceOp::Sum), 44);
        assert_eq!(reduce(&[u32::MAX, 2], ReduceOp::Prod), u32::MAX - 1);
        assert_eq!(reduce(&[i64::MIN, -1], ReduceOp::Sum), i64::MAX);
        extremes(0u8, 255);
        extremes(-128i8, 127);
        extremes(0u32, u32::MAX);
        extremes(i32::MIN, i32::MAX);
        extremes(5u64, 1 << 63);
        extremes(i64::MIN, 5);
    }

    fn extremes<T: Wire + Default + PartialEq + std::fmt::Debug>(least: T, most: T) {
        assert_eq!(reduce(&[most, least], ReduceOp::Min), least);
        assert_eq!(reduce(&[least, most], ReduceOp::Max), most);
    }

    #[test]
    fn extremes_of_floats_are_those_of_the_standard() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let pick = |a: f32, b: f32| if op == ReduceOp::Min { a } else { b };
            for (a, b) in [
                (-0.0, 0.0),
                (-1.0, 0.5),
                (-2.0, -1.0),
                (f32::NEG_INFINITY, f32::MIN),
                (f32::MAX, f32::INFINITY),
                (-f32::from_bits(1), f32::from_bits(1)),
            ] {
                for elements in [[a, b], [b, a]] {
                    assert_eq!(reduce(&elements, op).to_bits(), pick(a, b).to_bits());
                    let wide = elements.map(f64::from);
                    assert_eq!(reduce(&wide, op).to_bits(), f64::from(pick(a, b)).to_bits());
                }
            }
            for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)] {
                assert_eq!(reduce(&[f32::INFINITY, nan, f32::NEG_INFINITY], op).to_bits(), 0x7FFF_FFFF);
                let halves = [f16::from_f32(nan), f16::INFINITY, f16::NEG_INFINITY];
                assert_eq!(reduce(&halves, op).to_bits(), 0x7FFF);
            }
            let bits = reduce(&[f64::INFINITY, -f64::NAN], op).to_bits();
            assert_eq!(bits, 0x7FFF_FFFF_FFFF_FFFF);
        }
    }

    #[test]
    fn sums_of_16_bits_are_rounded_once_and_averages_do_not_overflow() {
        // In f16, 2048 + 1 is 2048.
        let halves = [2048.0, 1.0, 1.0].map(f16::from_f32);
        assert_eq!(reduce(&halves, ReduceOp::Sum), f16::from_f32(2050.0));
        let large = [60_000.0; 4].map(f16::from_f32);
        assert_eq!(reduce(&large, ReduceOp::Sum), f16::INFINITY);
        assert_eq!(reduce(&large, ReduceOp::Avg), large[0]);
        let opposite = [bf16::INFINITY, bf16::NEG_INFINITY];
        assert_eq!(reduce(&opposite, ReduceOp::Sum).to_bits(), 0x7FFF);
        assert_eq!(reduce(&[1.0f64, 2.0], ReduceOp::Avg), 1.5);
    }
}
