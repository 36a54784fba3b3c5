//! Element types and their reductions, written from the documentation of [`ReduceOp`], independently of the kernels.

use fast_allreduce::{DType, ReduceOp, Scale};
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};

/// An element type with its definition of the operations.
///
/// # Safety
///
/// `DTYPE` matches the type, and every bit pattern is a valid value.
pub unsafe trait Number: Copy + 'static {
    const DTYPE: DType;

    /// Properties of a float type; `None` for integers.
    const FORMAT: Option<Format>;

    /// Converts from bits: the lowest are used.
    fn of_bits(bits: u64) -> Self;

    /// Returns the bits of the value: two elements are equal if and only if their bits are.
    fn bits(self) -> u64;

    /// Returns the exact value of a float.
    fn to_f64(self) -> f64;

    /// Returns the exact value of an integer.
    fn to_i128(self) -> i128;

    /// Rounds to the accumulator's type, then to this type.
    fn from_f64(value: f64) -> Self;

    /// Reduces the elements in the given order. An average divides by `ranks`.
    fn reduce_of(op: ReduceOp, values: &[Self], ranks: usize) -> Self;

    /// Returns a rank's term of a premultiplied sum: computed in the accumulator's type, rounded to this type.
    fn product(self, scale: Scale) -> Self;

    /// Reduces the ranks' elements in rank order. In a premultiplied sum all ranks have the same scale.
    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        match op {
            ReduceOp::PreMulSum(scale) => {
                let products: Vec<_> = values.iter().map(|value| value.product(scale)).collect();
                Self::reduce_of(ReduceOp::Sum, &products, values.len())
            }
            op => Self::reduce_of(op, values, values.len()),
        }
    }
}

/// Properties of a float type that error bounds need.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// Largest relative error of one rounding to the type.
    pub unit: f64,
    pub largest: f64,
    /// Larger magnitudes are NaN.
    pub finite: bool,
    /// Smallest subnormal.
    pub least: f64,
    pub accumulator: Accumulator,
}

/// A type in which floats are accumulated.
#[derive(Debug, Clone, Copy)]
pub struct Accumulator {
    pub unit: f64,
    pub largest: f64,
    /// Smallest normal number.
    pub least: f64,
}

impl Format {
    const fn of(unit: f64, largest: f64, finite: bool, least: f64, accumulator: Accumulator) -> Self {
        Self { unit, largest, finite, least, accumulator }
    }
}

const SINGLE: Accumulator = Accumulator {
    unit: f32::EPSILON as f64 / 2.0,
    largest: f32::MAX as f64,
    least: f32::MIN_POSITIVE as f64,
};
const DOUBLE: Accumulator =
    Accumulator { unit: f64::EPSILON / 2.0, largest: f64::MAX, least: f64::MIN_POSITIVE };

/// Evaluates an expression with the Rust type of an element type.
macro_rules! of_type {
    ($dtype:expr, $number:ident => $value:expr) => {
        of_type! {
            $dtype, $number => $value;
            I8: i8, U8: u8, I32: i32, U32: u32, I64: i64, U64: u64, F32: f32, F64: f64,
            F16: half::f16, Bf16: half::bf16, F8E4M3: float8::F8E4M3, F8E5M2: float8::F8E5M2
        }
    };
    ($dtype:expr, $number:ident => $value:expr; $($variant:ident: $type:ty),*) => {
        match $dtype {
            $(DType::$variant => {
                type $number = $type;
                $value
            })*
            other => unreachable!("a type that the oracle does not know: {other}"),
        }
    };
}
pub(crate) use of_type;

macro_rules! integer {
    ($($type:ty => $dtype:ident),*) => {$(
        // SAFETY: an integer.
        unsafe impl Number for $type {
            const DTYPE: DType = DType::$dtype;
            const FORMAT: Option<Format> = None;

            #[inline]
            fn of_bits(bits: u64) -> Self {
                bits as Self
            }

            #[inline]
            fn bits(self) -> u64 {
                self as u64
            }

            #[inline]
            fn to_f64(self) -> f64 {
                self as f64
            }

            fn to_i128(self) -> i128 {
                self.into()
            }

            fn from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline]
            fn reduce_of(op: ReduceOp, values: &[Self], ranks: usize) -> Self {
                // A product wraps modulo 2^128, and so modulo any smaller power of two.
                let wide = || values.iter().map(|&value| i128::from(value));
                let reduced = match op {
                    ReduceOp::Sum => wide().sum(),
                    ReduceOp::Prod => wide().fold(1, i128::wrapping_mul),
                    ReduceOp::Min => wide().min().unwrap_or_default(),
                    ReduceOp::Max => wide().max().unwrap_or_default(),
                    ReduceOp::Avg => wide().sum::<i128>() / ranks as i128,
                    ReduceOp::BitAnd => wide().fold(-1, |all, value| all & value),
                    ReduceOp::BitOr => wide().fold(0, |all, value| all | value),
                    ReduceOp::BitXor => wide().fold(0, |all, value| all ^ value),
                    op => unreachable!("integers have no {op}, or the reference lacks it"),
                };
                reduced as Self
            }

            fn product(self, _: Scale) -> Self {
                unreachable!("integers have no scales")
            }
        }
    )*};
}

integer!(i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

/// Operations in an accumulator type. Minima and maxima (IEEE 754-2019) of a NaN are NaN.
macro_rules! accumulate {
    ($name:ident, $type:ty) => {
        fn $name(op: ReduceOp, values: impl Iterator<Item = $type>, ranks: usize) -> $type {
            let pick = |a: $type, b: $type, is_first: bool, is_first_of_equals: bool| match a == b {
                _ if a.is_nan() || b.is_nan() => <$type>::NAN,
                true if is_first_of_equals => a,
                false if is_first => a,
                _ => b,
            };
            match op {
                ReduceOp::Sum => values.fold(0.0, |a, b| a + b),
                ReduceOp::Prod => values.fold(1.0, |a, b| a * b),
                ReduceOp::Min => {
                    values.fold(<$type>::INFINITY, |a, b| pick(a, b, a < b, a.is_sign_negative()))
                }
                ReduceOp::Max => {
                    values.fold(<$type>::NEG_INFINITY, |a, b| pick(a, b, a > b, a.is_sign_positive()))
                }
                ReduceOp::Avg => values.fold(0.0, |a, b| a + b) / ranks as $type,
                op => unreachable!("floats have no {op}, or the reference lacks it"),
            }
        }
    };
}

accumulate!(reduce_f32, f32);
accumulate!(reduce_f64, f64);

macro_rules! float {
    ($type:ty => $dtype:ident, $bits:ty, $accumulator:ident, $reduce:ident, $widen:expr, $round:expr, $format:expr) => {
        // SAFETY: a float, or the bits of one.
        unsafe impl Number for $type {
            const DTYPE: DType = DType::$dtype;
            const FORMAT: Option<Format> = Some($format);

            #[inline]
            fn of_bits(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }

            #[inline]
            fn bits(self) -> u64 {
                self.to_bits().into()
            }

            #[inline]
            fn to_f64(self) -> f64 {
                $widen(self).into()
            }

            fn to_i128(self) -> i128 {
                self.to_f64() as i128
            }

            fn from_f64(value: f64) -> Self {
                $round(value as $accumulator)
            }

            #[inline]
            fn reduce_of(op: ReduceOp, values: &[Self], ranks: usize) -> Self {
                let reduced = $reduce(op, values.iter().map(|&value| $widen(value)), ranks);
                // The canonical NaN, whichever NaN the arithmetic produced.
                if reduced.is_nan() {
                    return Self::from_bits(<$bits>::MAX >> 1);
                }
                $round(reduced)
            }

            fn product(self, scale: Scale) -> Self {
                $round($widen(self) * scale.get() as $accumulator)
            }
        }
    };
}

float!(f32 => F32, u32, f32, reduce_f32, f32::from, f32::from,
    Format::of(SINGLE.unit, SINGLE.largest, false, SINGLE.least * f32::EPSILON as f64, SINGLE));
float!(f64 => F64, u64, f64, reduce_f64, f64::from, f64::from,
    Format::of(DOUBLE.unit, DOUBLE.largest, false, DOUBLE.least * f64::EPSILON, DOUBLE));
float!(f16 => F16, u16, f32, reduce_f32, f16::to_f32, f16::from_f32,
    Format::of(1.0 / 2048.0, 65504.0, false, 1.0 / 16_777_216.0, SINGLE));
float!(bf16 => Bf16, u16, f32, reduce_f32, bf16::to_f32, bf16::from_f32,
    Format::of(1.0 / 256.0, bf16::MAX.to_f64_const(), false, SINGLE.least / 128.0, SINGLE));
float!(F8E4M3 => F8E4M3, u8, f32, reduce_f32, |value: F8E4M3| value.to_f32(), e4m3,
    Format::of(1.0 / 16.0, 448.0, true, 1.0 / 512.0, SINGLE));
float!(F8E5M2 => F8E5M2, u8, f32, reduce_f32, |value: F8E5M2| value.to_f32(), e5m2,
    Format::of(1.0 / 8.0, 57344.0, false, 1.0 / 65536.0, SINGLE));

/// Rounds to nearest, ties to even, without the saturation of [`F8E4M3::from_f32`]: results beyond 448 are NaN.
pub fn e4m3(value: f32) -> F8E4M3 {
    match value.abs() <= 464.0 {
        true => F8E4M3::from_f32(value),
        false => F8E4M3::from_bits(0x7F),
    }
}

/// Rounds to nearest, ties to even, without the saturation of [`F8E5M2::from_f32`]: results beyond 57344 are infinite.
pub fn e5m2(value: f32) -> F8E5M2 {
    match value.abs() < 61440.0 {
        true => F8E5M2::from_f32(value),
        false if value.is_nan() => F8E5M2::from_bits(0x7F),
        false => F8E5M2::from_bits(if value > 0.0 { 0x7C } else { 0xFC }),
    }
}
