//! What a reduction of one element is, from the definition in [`ReduceOp`]'s documentation. Shares nothing with the kernels.

use fast_allreduce::{DType, ReduceOp, Scale, MAX_RANKS};
use half::{bf16, f16};

use super::float8::{F8E4M3, F8E5M2};
use super::inputs::real;
use super::rivals::naive::Combine;

/// An element type with its definition of the operations.
///
/// # Safety
///
/// `DTYPE` is the type's, and every bit pattern is a value of it.
pub unsafe trait Number: Copy + Combine + 'static {
    const DTYPE: DType;

    /// What outputs hold before a checked call.
    fn poison() -> Self;

    /// A value for inputs, from 64 random bits.
    fn from_random(random: u64, op: ReduceOp) -> Self;

    /// Its bits: equal elements have equal bits, and only they.
    fn bits(self) -> u64;

    /// The ranks' elements reduced in rank order.
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;

    /// How far this result is from the reduction in f64, or for integers from the exact one. A second opinion on floats.
    fn deviation(self, op: ReduceOp, values: &[Self], rounding: Rounding) -> Deviation;
}

/// Where an implementation may round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// In the accumulator type, and once more at the end.
    Once,
    /// In the element type, at every step.
    ///
    /// A sum of n elements in any order, be it a tree or a ring, has n - 1 additions on the way of each element or fewer, each
    /// of which is off by at most u times its result, and no partial sum exceeds the sum of magnitudes M: together (n - 1) u M.
    /// An average rounds once more, and so may the result: u times it. A partial product is off by a factor of 1 + u at each of
    /// n - 1 steps: the same with the product's magnitude for M. Where numbers are subnormal u does not hold, but the least
    /// positive number for each step does. Minima, maxima and integers have nothing to round.
    EveryStep,
}

/// A result's distance from what it should be.
#[derive(Debug, Clone, Copy)]
pub struct Deviation {
    /// Infinite where one of them is no number.
    pub error: f64,
    /// What rounding explains.
    pub bound: f64,
}

impl Deviation {
    /// True if rounding explains it.
    pub fn is_plausible(self) -> bool {
        self.error <= self.bound
    }
}

macro_rules! integer {
    ($($type:ty => $dtype:ident),*) => {$(
        // SAFETY: an integer.
        unsafe impl Number for $type {
            const DTYPE: DType = DType::$dtype;

            fn poison() -> Self {
                0xa5a5_a5a5_a5a5_a5a5_u64 as Self
            }

            fn from_random(random: u64, _op: ReduceOp) -> Self {
                random as Self
            }

            fn bits(self) -> u64 {
                self as u64
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                // A product wraps modulo 2^128, hence modulo any smaller power of two too.
                let wide = || values.iter().map(|&value| i128::from(value));
                let reduced = match op {
                    ReduceOp::Sum => wide().sum(),
                    ReduceOp::Prod => wide().fold(1, i128::wrapping_mul),
                    ReduceOp::Min => wide().min().unwrap_or_default(),
                    ReduceOp::Max => wide().max().unwrap_or_default(),
                    ReduceOp::Avg => wide().sum::<i128>() / values.len() as i128,
                    ReduceOp::BitAnd => wide().fold(-1, |all, value| all & value),
                    ReduceOp::BitOr => wide().fold(0, |all, value| all | value),
                    ReduceOp::BitXor => wide().fold(0, |all, value| all ^ value),
                    op => unreachable!("integers have no {op}, or the reference lacks it"),
                };
                reduced as Self
            }

            fn deviation(self, op: ReduceOp, values: &[Self], _rounding: Rounding) -> Deviation {
                let error = i128::from(self) - i128::from(Self::reduce(op, values));
                Deviation { error: error.unsigned_abs() as f64, bound: 0.0 }
            }
        }
    )*};
}

integer!(i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

/// The operations in an accumulator type.
macro_rules! accumulate {
    ($name:ident, $type:ty, $canonical:expr) => {
        fn $name(op: ReduceOp, values: impl ExactSizeIterator<Item = $type>) -> $type {
            let count = values.len() as $type;
            let pick = |a: $type, b: $type, is_first: bool, is_first_of_equals: bool| match a == b {
                _ if a.is_nan() || b.is_nan() => <$type>::NAN,
                true if is_first_of_equals => a,
                false if is_first => a,
                _ => b,
            };
            let reduced: $type = match op {
                ReduceOp::Sum | ReduceOp::PreMulSum(_) => values.fold(0.0, |a, b| a + b),
                ReduceOp::Prod => values.fold(1.0, |a, b| a * b),
                ReduceOp::Min => {
                    values.fold(<$type>::INFINITY, |a, b| pick(a, b, a < b, a.is_sign_negative()))
                }
                ReduceOp::Max => {
                    values.fold(<$type>::NEG_INFINITY, |a, b| pick(a, b, a > b, a.is_sign_positive()))
                }
                ReduceOp::Avg => values.fold(0.0, |a, b| a + b) / count,
                op => unreachable!("floats have no {op}, or the reference lacks it"),
            };
            if reduced.is_nan() {
                <$type>::from_bits($canonical)
            } else {
                reduced
            }
        }
    };
}

accumulate!(reduce_f32, f32, u32::MAX >> 1);
accumulate!(reduce_f64, f64, u64::MAX >> 1);

/// Relative errors of one rounding, and the least positive number.
struct Precision {
    accumulator: f64,
    result: f64,
    least: f64,
}

/// Compares with a reduction in f64 that runs through the ranks backwards.
fn deviation(
    result: f64,
    op: ReduceOp,
    values: impl DoubleEndedIterator<Item = f64>,
    limit: &Precision,
    rounding: Rounding,
) -> Deviation {
    let mut backwards = [0.0; MAX_RANKS];
    let mut count = 0;
    for (slot, value) in backwards.iter_mut().zip(values.rev()) {
        *slot = value;
        count += 1;
    }
    let values = &backwards[..count];
    let n = count as f64;
    // The result, and what the accumulator's errors are relative to.
    let (expected, scale) = match op {
        ReduceOp::Min => (values.iter().copied().fold(f64::INFINITY, f64::min), 0.0),
        ReduceOp::Max => (values.iter().copied().fold(f64::NEG_INFINITY, f64::max), 0.0),
        ReduceOp::Prod => {
            let product: f64 = values.iter().product();
            (product, product.abs())
        }
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => {
            let divisor = if op == ReduceOp::Avg { n } else { 1.0 };
            let magnitudes: f64 = values.iter().map(|value| value.abs()).sum();
            (values.iter().sum::<f64>() / divisor, magnitudes / divisor)
        }
        op => unreachable!("floats have no {op}, or the reference lacks it"),
    };
    let error = (result - expected).abs();
    let error = if error.is_nan() { f64::INFINITY } else { error };
    if matches!(op, ReduceOp::Min | ReduceOp::Max) {
        return Deviation { error, bound: 0.0 };
    }
    let (step, least) = match rounding {
        Rounding::Once => (limit.accumulator, limit.least),
        Rounding::EveryStep => (limit.result, n * limit.least),
    };
    // Both sides round at every step, and a margin of 1 % covers the errors of errors.
    let bound = 2.0 * (n + 1.0) * step * scale + limit.result * expected.abs() + least;
    Deviation { error, bound: 1.01 * bound }
}

/// What a premultiplied sum adds.
trait Products: Sized {
    /// All ranks have the same scale here.
    fn products(values: &[Self], scale: Scale) -> Vec<Self>;
}

macro_rules! float {
    ($type:ty => $dtype:ident, $bits:ty, $accumulator:ty, $widen:expr, $round:expr, $reduce:ident, $precision:expr) => {
        impl Products for $type {
            fn products(values: &[Self], scale: Scale) -> Vec<Self> {
                let scale = scale.get() as $accumulator;
                values.iter().map(|&value| $round($widen(value) * scale)).collect()
            }
        }

        // SAFETY: a float, or the bits of one.
        unsafe impl Number for $type {
            const DTYPE: DType = DType::$dtype;

            fn poison() -> Self {
                Self::from_bits(0xa5a5_a5a5_a5a5_a5a5_u64 as $bits)
            }

            fn from_random(random: u64, op: ReduceOp) -> Self {
                $round(real(random, op) as $accumulator)
            }

            fn bits(self) -> u64 {
                self.to_bits().into()
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                if let ReduceOp::PreMulSum(scale) = op {
                    return Self::reduce(ReduceOp::Sum, &Self::products(values, scale));
                }
                let reduced = $reduce(op, values.iter().map(|&value| $widen(value)));
                if reduced.is_nan() {
                    return Self::from_bits(<$bits>::MAX >> 1);
                }
                $round(reduced)
            }

            fn deviation(self, op: ReduceOp, values: &[Self], rounding: Rounding) -> Deviation {
                if let ReduceOp::PreMulSum(scale) = op {
                    return self.deviation(ReduceOp::Sum, &Self::products(values, scale), rounding);
                }
                let precision: Precision = $precision;
                let values = values.iter().map(|&value| f64::from(value));
                deviation(f64::from(self), op, values, &precision, rounding)
            }
        }
    };
}

const F32_ROUNDING: f64 = f32::EPSILON as f64 / 2.0;
const F64_ROUNDING: f64 = f64::EPSILON / 2.0;

float!(
    f16 => F16,
    u16,
    f32,
    f16::to_f32,
    f16::from_f32,
    reduce_f32,
    Precision { accumulator: F32_ROUNDING, result: 0.5f64.powi(11), least: 0.5f64.powi(24) }
);
float!(
    bf16 => Bf16,
    u16,
    f32,
    bf16::to_f32,
    bf16::from_f32,
    reduce_f32,
    Precision { accumulator: F32_ROUNDING, result: 0.5f64.powi(8), least: 0.5f64.powi(133) }
);
float!(
    F8E4M3 => F8E4M3,
    u8,
    f32,
    F8E4M3::to_f32,
    F8E4M3::from_f32,
    reduce_f32,
    Precision { accumulator: F32_ROUNDING, result: 0.5f64.powi(4), least: 0.5f64.powi(9) }
);
float!(
    F8E5M2 => F8E5M2,
    u8,
    f32,
    F8E5M2::to_f32,
    F8E5M2::from_f32,
    reduce_f32,
    Precision { accumulator: F32_ROUNDING, result: 0.5f64.powi(3), least: 0.5f64.powi(16) }
);
float!(
    f32 => F32,
    u32,
    f32,
    f32::from,
    f32::from,
    reduce_f32,
    Precision { accumulator: F32_ROUNDING, result: F32_ROUNDING, least: 0.5f64.powi(149) }
);
float!(
    f64 => F64,
    u64,
    f64,
    f64::from,
    f64::from,
    reduce_f64,
    Precision { accumulator: F64_ROUNDING, result: F64_ROUNDING, least: f64::from_bits(1) }
);

#[cfg(test)]
mod tests {
    use super::*;
    use ReduceOp::{Avg, Max, Min, Prod, Sum};

    #[test]
    fn integers_wrap_and_average_toward_zero() {
        assert_eq!(u8::reduce(Sum, &[200, 100]), 44);
        assert_eq!(i8::reduce(Prod, &[100, 3]), 44);
        assert_eq!(i8::reduce(Avg, &[-128, -128, -127]), -127);
        assert_eq!(u64::reduce(Avg, &[u64::MAX; 16]), u64::MAX);
        assert_eq!(u64::reduce(Prod, &[u64::MAX, u64::MAX]), 1);
        assert_eq!(i64::reduce(Min, &[3, i64::MIN, 2]), i64::MIN);
        assert_eq!(i32::reduce(Max, &[-3, -2]), -2);
        assert_eq!(u8::reduce(ReduceOp::BitAnd, &[0b1101, 0b1011]), 0b1001);
        assert_eq!(i8::reduce(ReduceOp::BitOr, &[-128, 1]), -127);
        assert_eq!(u64::reduce(ReduceOp::BitXor, &[u64::MAX, 1, 1]), u64::MAX);
    }

    #[test]
    fn halves_accumulate_in_f32_and_round_once() {
        // In f16, 2048 + 1 rounds back to 2048 at each step.
        let ones = [2048.0, 1.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::reduce(Sum, &ones).to_f32(), 2050.0);
        let ones = [256.0, 1.0, 1.0].map(bf16::from_f32);
        assert_eq!(bf16::reduce(Sum, &ones).to_f32(), 258.0);
        // 1 + 2^-11 is halfway between two halves, and 2^-23 tips it.
        let tipped = [1.0, 0.000_488_28, 0.000_000_12].map(f16::from_f32);
        assert_eq!(f16::reduce(Sum, &tipped).to_bits(), 0x3c01);
        assert_eq!(f16::reduce(Avg, &[1.0, 2.0].map(f16::from_f32)).to_f32(), 1.5);
    }

    #[test]
    fn floats_add_in_rank_order_from_positive_zero() {
        assert_eq!(f32::reduce(Sum, &[-0.0, -0.0]).to_bits(), 0);
        let (forth, back) = ([1e8f32, 1.0, -1e8], [-1e8f32, 1e8, 1.0]);
        assert_eq!((f32::reduce(Sum, &forth), f32::reduce(Sum, &back)), (0.0, 1.0));
    }

    #[test]
    fn minimum_and_maximum_know_zeros_and_nan() {
        for values in [[0.0f64, -0.0], [-0.0, 0.0]] {
            assert!(f64::reduce(Min, &values).is_sign_negative());
            assert!(f64::reduce(Max, &values).is_sign_positive());
        }
        for values in [[-f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert_eq!(f32::reduce(Min, &values).to_bits(), 0x7fff_ffff);
            assert_eq!(f32::reduce(Max, &values).to_bits(), 0x7fff_ffff);
        }
        assert_eq!(bf16::reduce(Sum, &[bf16::INFINITY, bf16::NEG_INFINITY]).to_bits(), 0x7fff);
    }

    #[test]
    fn a_result_beyond_rounding_is_not_plausible() {
        let values = [0.1f32, 0.2, 0.3, -0.5];
        for op in ReduceOp::ARITHMETIC.into_iter().chain([ReduceOp::PreMulSum(0.3.into())]) {
            let is_plausible = |result: f32| result.deviation(op, &values, Rounding::Once).is_plausible();
            let result = f32::reduce(op, &values);
            assert!(is_plausible(result), "{op}");
            assert!(!is_plausible(result * 1.001 + 1e-5), "{op}");
            assert!(!is_plausible(f32::NAN), "{op}");
        }
    }

    #[test]
    fn who_rounds_at_every_step_may_deviate_by_more_but_not_by_much() {
        // Each 1 is lost in f16 at 2048, the last of them too.
        let values = [2048.0, 1.0, 1.0].map(f16::from_f32);
        let stepwise = f16::from_f32(2048.0);
        let deviation = |result: f16, rounding| result.deviation(Sum, &values, rounding);
        assert_eq!(deviation(stepwise, Rounding::Once).error, 2.0);
        assert!(!deviation(stepwise, Rounding::Once).is_plausible());
        assert!(deviation(stepwise, Rounding::EveryStep).is_plausible());
        assert!(!deviation(f16::from_f32(2070.0), Rounding::EveryStep).is_plausible());
        for op in [Min, Max] {
            assert!(!stepwise.deviation(op, &values[1..], Rounding::EveryStep).is_plausible());
        }
        assert_eq!(200u8.deviation(Sum, &[200, 100], Rounding::EveryStep).error, 156.0);
    }
}
