//! Expected results of an allreduce over several nodes: exact for integers; for floats, a bound on the error of any
//! order of additions, computed in f64.

use std::fmt::Debug;

use fast_allreduce::{Element, ReduceOp};
use half::{bf16, f16};

/// An element type with its reference.
pub trait Number: Element + Debug {
    /// Makes a value from random bits.
    fn draw(bits: u64, op: ReduceOp) -> Self;

    /// Returns why `result` cannot be the operation's result for all ranks' `values`, if it cannot.
    fn objection(op: ReduceOp, values: &[Self], result: Self) -> Option<String>;

    fn bits(self) -> u64;
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn draw(bits: u64, _: ReduceOp) -> Self {
                bits as Self
            }

            fn objection(op: ReduceOp, values: &[Self], result: Self) -> Option<String> {
                let values = values.iter().copied();
                let expected = match op {
                    ReduceOp::Sum => values.fold(0, Self::wrapping_add),
                    ReduceOp::Prod => values.fold(1, Self::wrapping_mul),
                    ReduceOp::Min => values.min().unwrap(),
                    ReduceOp::Max => values.max().unwrap(),
                    _ => panic!("no reference for {op}"),
                };
                (result != expected).then(|| format!("{result}, and not {expected}"))
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integer!(i8, u8, i32, u32, i64, u64);

/// `$unit`: half a unit in the last place of 1 in the type; `$wide`: in its accumulator.
macro_rules! float {
    ($type:ty, $unit:expr, $wide:expr, $to:expr, $from:expr) => {
        impl Number for $type {
            fn draw(bits: u64, op: ReduceOp) -> Self {
                let uniform = (bits >> 40) as f64 / (1u64 << 24) as f64;
                // Products stay within f16's range.
                $from(if op == ReduceOp::Prod { 0.75 + uniform / 2.0 } else { 4.0 * uniform - 2.0 })
            }

            fn objection(op: ReduceOp, values: &[Self], result: Self) -> Option<String> {
                let ranks = values.len() as f64;
                let wide = values.iter().map(|&value| -> f64 { $to(value) });
                let magnitude: f64 = wide.clone().map(f64::abs).sum();
                // Each addition rounds in the accumulator, each of the two levels rounds once to the type, and an
                // average once more.
                let relative = 2.0 * ranks * $wide + 4.0 * $unit;
                let (expected, bound) = match op {
                    ReduceOp::Sum => (wide.sum::<f64>(), magnitude * relative),
                    ReduceOp::Avg => (wide.sum::<f64>() / ranks, magnitude / ranks * relative),
                    ReduceOp::Prod => {
                        let product = wide.product::<f64>();
                        (product, product.abs() * relative)
                    }
                    ReduceOp::Min => (wide.fold(f64::INFINITY, f64::min), 0.0),
                    ReduceOp::Max => (wide.fold(f64::NEG_INFINITY, f64::max), 0.0),
                    _ => panic!("no reference for {op}"),
                };
                let result: f64 = $to(result);
                let is_right = (result - expected).abs() <= bound;
                (!is_right).then(|| format!("{result}, and not {expected} within {bound:e}"))
            }

            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}
float!(f16, 2f64.powi(-11), 2f64.powi(-24), f16::to_f64, f16::from_f64);
float!(bf16, 2f64.powi(-8), 2f64.powi(-24), bf16::to_f64, bf16::from_f64);
float!(f32, 2f64.powi(-24), 2f64.powi(-24), f64::from, |value: f64| value as f32);
float!(f64, 2f64.powi(-53), 2f64.powi(-53), std::convert::identity, std::convert::identity);

/// Random bits for a rank, a call and an element; the same on every rank.
fn bits(rank: usize, call: usize, index: usize) -> u64 {
    let mut bits = (rank as u64) << 48 ^ (call as u64) << 32 ^ index as u64;
    for multiplier in [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB] {
        bits = (bits ^ bits >> 29).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(multiplier);
    }
    bits ^ bits >> 31
}

/// Input of a rank in a call.
pub fn input<T: Number>(rank: usize, call: usize, count: usize, op: ReduceOp) -> Vec<T> {
    (0..count).map(|index| T::draw(bits(rank, call, index), op)).collect()
}

/// Asserts that `output` is the call's result in a world of `ranks` ranks.
pub fn check<T: Number>(output: &[T], ranks: usize, call: usize, op: ReduceOp) {
    for (index, &result) in output.iter().enumerate() {
        let values: Vec<T> = (0..ranks).map(|rank| T::draw(bits(rank, call, index), op)).collect();
        if let Some(objection) = T::objection(op, &values, result) {
            panic!(
                "{op} of {} {} between {ranks} ranks, element {index}: {objection}",
                output.len(),
                T::DTYPE
            );
        }
    }
}
