//! What a reduction in the order of the ranks must give, from the documentation of `ReduceOp` and not from the kernels; and a second opinion on floats,
//! which bounds the error against the exact result.

use fast_allreduce::{DType, ReduceOp, MAX_RANKS};
use half::{bf16, f16};

use crate::ofp8::{Ofp8, E4M3, E5M2};

/// A rank's part of a premultiplied sum, of which each rank has a scale of its own; any other operation as it is.
pub fn of_rank(op: ReduceOp, rank: usize) -> ReduceOp {
    match op {
        ReduceOp::PreMulSum(scale) => {
            ReduceOp::PreMulSum((scale.get() * [1.0, -0.3, 2.5, 0.1][rank % 4]).into())
        }
        op => op,
    }
}

/// A premultiplied sum as the sum that it is, of products that are rounded to the type.
pub fn multiplied(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> (ReduceOp, Vec<Vec<u8>>) {
    let size = dtype.size();
    let products = |(rank, input): (usize, &Vec<u8>)| {
        let ReduceOp::PreMulSum(scale) = of_rank(op, rank) else { return input.clone() };
        let product = |element| product(dtype, bits(element), scale.get()).to_le_bytes()[..size].to_vec();
        input.chunks(size).flat_map(product).collect()
    };
    let sum = if let ReduceOp::PreMulSum(_) = op { ReduceOp::Sum } else { op };
    (sum, inputs.iter().enumerate().map(products).collect())
}

/// In the accumulator's arithmetic, rounded to the type.
fn product(dtype: DType, bits: u64, scale: f64) -> u64 {
    let scale_f32 = scale as f32;
    match dtype {
        DType::F16 => f16::from_f32(f16::from_bits(bits as u16).to_f32() * scale_f32).to_bits().into(),
        DType::Bf16 => bf16::from_f32(bf16::from_bits(bits as u16).to_f32() * scale_f32).to_bits().into(),
        DType::F8E4M3 | DType::F8E5M2 => {
            let format = Ofp8::of(dtype).expect("one of the two");
            format.round((format.number(bits) as f32 * scale_f32).into())
        }
        DType::F32 => (f32::from_bits(bits as u32) * scale_f32).to_bits().into(),
        DType::F64 => (f64::from_bits(bits) * scale).to_bits(),
        _ => unreachable!("integers have no scales: {dtype}"),
    }
}

/// The expected output for the ranks' inputs, all as bytes.
pub fn reduce(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let (op, inputs) = &multiplied(dtype, op, inputs);
    let op = *op;
    let size = dtype.size();
    let mut output = Vec::with_capacity(inputs[0].len());
    for at in (0..inputs[0].len()).step_by(size) {
        let mut elements = [0; MAX_RANKS];
        for (element, input) in elements.iter_mut().zip(inputs) {
            *element = bits(&input[at..at + size]);
        }
        let elements = &elements[..inputs.len()];
        let result = reduce_element(dtype, op, elements, elements.len());
        match Format::of(dtype) {
            Some(format) => assert_float_bound(format, op, elements, result),
            None => assert_integer(dtype, op, elements, result),
        }
        output.extend_from_slice(&result.to_le_bytes()[..size]);
    }
    output
}

/// The bits of one element.
pub fn bits(element: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    u64::from_le_bytes(bytes)
}

/// One element: the bits of the ranks' values to the bits of the result. An average is that of `ranks` values.
pub fn reduce_element(dtype: DType, op: ReduceOp, elements: &[u64], ranks: usize) -> u64 {
    match dtype {
        DType::F16 => {
            let result =
                fold_f32(op, elements.iter().map(|&bits| f16::from_bits(bits as u16).to_f32()), ranks);
            u64::from(if result.is_nan() { 0x7FFF } else { f16::from_f32(result).to_bits() })
        }
        DType::Bf16 => {
            let result =
                fold_f32(op, elements.iter().map(|&bits| bf16::from_bits(bits as u16).to_f32()), ranks);
            u64::from(if result.is_nan() { 0x7FFF } else { bf16::from_f32(result).to_bits() })
        }
        DType::F8E4M3 | DType::F8E5M2 => {
            let format = Ofp8::of(dtype).expect("one of the two");
            format.round(fold_f32(op, elements.iter().map(|&bits| format.number(bits) as f32), ranks).into())
        }
        DType::F32 => {
            let result = fold_f32(op, elements.iter().map(|&bits| f32::from_bits(bits as u32)), ranks);
            u64::from(if result.is_nan() { 0x7FFF_FFFF } else { result.to_bits() })
        }
        DType::F64 => {
            let result = fold_f64(op, elements.iter().map(|&bits| f64::from_bits(bits)), ranks);
            if result.is_nan() {
                0x7FFF_FFFF_FFFF_FFFF
            } else {
                result.to_bits()
            }
        }
        _ => fold_integers(op, elements.iter().map(|&bits| integer(dtype, bits)), ranks),
    }
}

macro_rules! fold_floats {
    ($name:ident, $float:ty) => {
        fn $name(op: ReduceOp, values: impl Iterator<Item = $float>, ranks: usize) -> $float {
            match op {
                ReduceOp::Sum => values.fold(0.0, |sum, value| sum + value),
                ReduceOp::Avg => values.fold(0.0, |sum, value| sum + value) / ranks as $float,
                ReduceOp::Prod => values.fold(1.0, |product, value| product * value),
                ReduceOp::Min => {
                    extreme(values, <$float>::is_nan, |a, b| a < b || (a == b && a.is_sign_negative()))
                }
                ReduceOp::Max => {
                    extreme(values, <$float>::is_nan, |a, b| a > b || (a == b && a.is_sign_positive()))
                }
                _ => unreachable!("an operation that the oracle does not know: {op}"),
            }
        }
    };
}
fold_floats!(fold_f32, f32);
fold_floats!(fold_f64, f64);

/// IEEE 754-2019 minimum or maximum: a NaN wins, `before` orders the rest.
fn extreme<F: Copy>(
    values: impl Iterator<Item = F>,
    is_nan: impl Fn(F) -> bool,
    before: impl Fn(F, F) -> bool,
) -> F {
    let pick = |a, b| if is_nan(a) || (!is_nan(b) && before(a, b)) { a } else { b };
    values.reduce(pick).expect("a world has a rank")
}

/// Exactly, then cut to 64 bits; the caller keeps as many as the type has.
fn fold_integers(op: ReduceOp, values: impl Iterator<Item = i128>, ranks: usize) -> u64 {
    let result = match op {
        ReduceOp::Sum => values.sum::<i128>(),
        ReduceOp::Avg => values.sum::<i128>() / ranks as i128,
        ReduceOp::Prod => values.fold(1i128, i128::wrapping_mul),
        ReduceOp::Min => values.min().expect("a world has a rank"),
        ReduceOp::Max => values.max().expect("a world has a rank"),
        ReduceOp::BitAnd => values.fold(-1, |all, value| all & value),
        ReduceOp::BitOr => values.fold(0, |all, value| all | value),
        ReduceOp::BitXor => values.fold(0, |all, value| all ^ value),
        _ => unreachable!("an operation that the oracle does not know: {op}"),
    };
    result as u64
}

fn integer(dtype: DType, bits: u64) -> i128 {
    match dtype {
        DType::I8 => i128::from(bits as i8),
        DType::U8 => i128::from(bits as u8),
        DType::I32 => i128::from(bits as i32),
        DType::U32 => i128::from(bits as u32),
        DType::I64 => i128::from(bits as i64),
        DType::U64 => i128::from(bits),
        _ => unreachable!("a type that the oracle does not know: {dtype}"),
    }
}

/// The properties that define the integer results.
fn assert_integer(dtype: DType, op: ReduceOp, elements: &[u64], result: u64) {
    let values = elements.iter().map(|&bits| integer(dtype, bits));
    let (ranks, sum, result) = (elements.len() as i128, values.clone().sum::<i128>(), integer(dtype, result));
    let holds = match op {
        ReduceOp::Sum => (sum - result) % (1 << (8 * dtype.size())) == 0,
        ReduceOp::Avg => {
            let rest = sum - result * ranks;
            rest.abs() < ranks && (rest == 0 || (rest < 0) == (sum < 0))
        }
        ReduceOp::Min => values.clone().all(|value| result <= value) && values.clone().any(|v| v == result),
        ReduceOp::Max => values.clone().all(|value| result >= value) && values.clone().any(|v| v == result),
        _ => true,
    };
    assert!(holds, "the oracle is wrong: {dtype} {op} of {elements:x?} is not {result}");
}

/// A float type, as the error bound needs it.
struct Format {
    widen: fn(u64) -> f64,
    /// Largest relative error of one rounding to the type.
    unit: f64,
    largest: f64,
    /// What is larger than that is NaN.
    finite: bool,
    /// The smallest subnormal.
    tiny: f64,
    /// The same of the accumulator, with its smallest normal number.
    accumulator: (f64, f64, f64),
}

impl Format {
    fn of(dtype: DType) -> Option<Self> {
        const SINGLE: (f64, f64, f64) =
            (f32::EPSILON as f64 / 2.0, f32::MAX as f64, f32::MIN_POSITIVE as f64);
        const DOUBLE: (f64, f64, f64) = (f64::EPSILON / 2.0, f64::MAX, f64::MIN_POSITIVE);
        let (widen, unit, largest, tiny, accumulator): (fn(u64) -> f64, _, _, _, _) = match dtype {
            DType::F16 => {
                (|bits| f16::from_bits(bits as u16).to_f64(), 2f64.powi(-11), 65504.0, 2f64.powi(-24), SINGLE)
            }
            DType::Bf16 => (
                |bits| bf16::from_bits(bits as u16).to_f64(),
                2f64.powi(-8),
                bf16::MAX.to_f64(),
                2f64.powi(-133),
                SINGLE,
            ),
            DType::F8E4M3 => (|bits| E4M3.number(bits), 2f64.powi(-4), 448.0, 2f64.powi(-9), SINGLE),
            DType::F8E5M2 => (|bits| E5M2.number(bits), 2f64.powi(-3), 57344.0, 2f64.powi(-16), SINGLE),
            DType::F32 => {
                (|bits| f64::from(f32::from_bits(bits as u32)), SINGLE.0, SINGLE.1, 2f64.powi(-149), SINGLE)
            }
            DType::F64 => (f64::from_bits, DOUBLE.0, DOUBLE.1, f64::from_bits(1), DOUBLE),
            _ => return None,
        };
        let finite = dtype == DType::F8E4M3;
        Some(Self { widen, unit, largest, finite, tiny, accumulator })
    }
}

/// Asserts that a result is within the rounding errors of its operations around the exact one, or of the right class.
fn assert_float_bound(format: Format, op: ReduceOp, elements: &[u64], result: u64) {
    let values = elements.iter().map(|&bits| (format.widen)(bits));
    let result_value = (format.widen)(result);
    let ranks = elements.len() as f64;
    let (unit, largest, smallest) = format.accumulator;
    let right = || -> bool {
        if values.clone().any(f64::is_nan) {
            return result_value.is_nan();
        }
        if matches!(op, ReduceOp::Min | ReduceOp::Max) {
            let ordered =
                |value| if op == ReduceOp::Min { result_value <= value } else { result_value >= value };
            return values.clone().all(ordered) && elements.contains(&result);
        }
        let finite = values.clone().filter(|value| value.is_finite());
        if op != ReduceOp::Prod && finite.map(f64::abs).sum::<f64>() > largest / 2.0 {
            return true; // may overflow on the way
        }
        if values.clone().any(f64::is_infinite) {
            let infinities = values.clone().filter(|value| value.is_infinite()).sum::<f64>();
            // A product of an infinity depends on whether another underflows to 0 first.
            return op == ReduceOp::Prod
                || result_value == infinities
                || (result_value.is_nan() && infinities.is_nan());
        }
        // Unevaluated sums of two doubles: far more exact than the bound.
        let (mut high, mut low, magnitude);
        if op == ReduceOp::Prod {
            (high, low) = (1.0, 0.0);
            for value in values.clone() {
                let product: f64 = high * value;
                low = high.mul_add(value, -product) + low * value;
                high = product;
                if high != 0.0 && !(smallest..=largest / 2.0).contains(&high.abs()) {
                    return true; // left the range on the way: no relative bound holds
                }
            }
            magnitude = high.abs();
        } else {
            (high, low) = (0.0, 0.0);
            for value in values.clone() {
                let sum: f64 = high + value;
                let of_value = sum - high;
                low += (high - (sum - of_value)) + (value - of_value);
                high = sum;
            }
            magnitude = values.clone().map(f64::abs).sum::<f64>();
        }
        let divisor = if op == ReduceOp::Avg { ranks } else { 1.0 };
        let (exact, rest, magnitude) = (high / divisor, low / divisor, magnitude / divisor);
        let bound = (ranks + 2.0) * unit * magnitude + 2.0 * format.unit * exact.abs() + format.tiny;
        if format.finite && result_value.is_nan() {
            return exact.abs() + bound >= format.largest;
        }
        if result_value.is_infinite() {
            return exact.abs() + bound >= format.largest && result_value.signum() == exact.signum();
        }
        ((result_value - exact) - rest).abs() <= bound
    };
    assert!(right(), "the oracle is out of bounds: {op} of {elements:x?} is not {result:#x}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(op: ReduceOp, values: &[f32]) -> f32 {
        let bits: Vec<u64> = values.iter().map(|&v| u64::from(f16::from_f32(v).to_bits())).collect();
        f16::from_bits(reduce_element(DType::F16, op, &bits, bits.len()) as u16).to_f32()
    }

    #[test]
    fn known_results() {
        // 2048 + 1 + 1 is 2050 in f32, and 2048 where each step rounds.
        assert_eq!(halves(ReduceOp::Sum, &[2048.0, 1.0, 1.0]), 2050.0);
        assert_eq!(halves(ReduceOp::Max, &[-0.0, 0.0]).to_bits(), 0);
        assert_eq!(halves(ReduceOp::Min, &[0.0, -0.0]).to_bits(), 0x8000_0000);
        assert_eq!(halves(ReduceOp::Sum, &[65504.0, 65504.0]), f32::INFINITY);
        let nan = reduce_element(DType::F32, ReduceOp::Min, &[0xFFC0_0001, 0], 2);
        assert_eq!(nan, 0x7FFF_FFFF);
        let sum = reduce_element(DType::F32, ReduceOp::Sum, &[0x8000_0000, 0x8000_0000], 2);
        assert_eq!(sum, 0, "from +0");
        let average = |values: &[i64]| {
            let bits: Vec<u64> = values.iter().map(|&value| value as u64).collect();
            reduce_element(DType::I64, ReduceOp::Avg, &bits, bits.len()) as i64
        };
        assert_eq!(average(&[-7, 0]), -3);
        assert_eq!(average(&[i64::MIN, i64::MIN]), i64::MIN);
        assert_eq!(average(&[i64::MAX, i64::MAX, i64::MAX]), i64::MAX);
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn a_wrong_sum_is_out_of_bounds() {
        let one = u64::from(1f32.to_bits());
        let format = Format::of(DType::F32).unwrap();
        assert_float_bound(format, ReduceOp::Sum, &[one, one], u64::from(2.00001f32.to_bits()));
    }
}
