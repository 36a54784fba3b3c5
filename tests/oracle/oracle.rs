//! Expected results of reductions in rank order, with a second check: floats are within rounding errors of the exact
//! result, and integers have the properties that define their results.

use fast_allreduce::{DType, ReduceOp, MAX_RANKS};

use crate::number::{of_type, Accumulator, Format, Number};

/// Returns the operation of a rank: in a premultiplied sum each rank has its own scale.
pub fn of_rank(op: ReduceOp, rank: usize) -> ReduceOp {
    match op {
        ReduceOp::PreMulSum(scale) => {
            ReduceOp::PreMulSum((scale.get() * [1.0, -0.3, 2.5, 0.1][rank % 4]).into())
        }
        op => op,
    }
}

/// Reduces a premultiplied sum as a plain sum of products rounded to the type.
pub fn multiplied(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> (ReduceOp, Vec<Vec<u8>>) {
    let size = dtype.size();
    let products = |(rank, input): (usize, &Vec<u8>)| {
        let ReduceOp::PreMulSum(scale) = of_rank(op, rank) else { return input.clone() };
        let product = |element: &[u8]| of_type!(dtype, T => T::of_bits(bits(element)).product(scale).bits());
        input.chunks(size).flat_map(|element| product(element).to_le_bytes()[..size].to_vec()).collect()
    };
    let sum = if let ReduceOp::PreMulSum(_) = op { ReduceOp::Sum } else { op };
    (sum, inputs.iter().enumerate().map(products).collect())
}

/// Returns the expected output for the ranks' inputs, all as bytes.
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
        of_type!(dtype, T => check::<T>(op, elements, result));
        output.extend_from_slice(&result.to_le_bytes()[..size]);
    }
    output
}

/// Returns the bits of one element.
pub fn bits(element: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    u64::from_le_bytes(bytes)
}

/// Reduces one element: takes the bits of the ranks' values and returns the bits of the result. An average divides by
/// `ranks`.
pub fn reduce_element(dtype: DType, op: ReduceOp, elements: &[u64], ranks: usize) -> u64 {
    of_type!(dtype, T => {
        let mut values = [T::of_bits(0); MAX_RANKS];
        values.iter_mut().zip(elements).for_each(|(value, &bits)| *value = T::of_bits(bits));
        T::reduce_of(op, &values[..elements.len()], ranks).bits()
    })
}

/// Checks the bits of a result in another way than they were computed.
///
/// # Panics
///
/// If the result is beyond the bound of its error, or for integers not exact.
pub fn check<T: Number>(op: ReduceOp, elements: &[u64], result: u64) {
    match T::FORMAT {
        Some(format) => assert_float_bound::<T>(&format, op, elements, result),
        None => assert_integer::<T>(op, elements, result),
    }
}

/// Asserts the properties that define integer results.
fn assert_integer<T: Number>(op: ReduceOp, elements: &[u64], result: u64) {
    let values = elements.iter().map(|&bits| T::of_bits(bits).to_i128());
    let (ranks, sum) = (elements.len() as i128, values.clone().sum::<i128>());
    let (dtype, result) = (T::DTYPE, T::of_bits(result).to_i128());
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

/// Asserts that a result is within rounding errors of the exact one, or has the right class (NaN, infinity).
fn assert_float_bound<T: Number>(format: &Format, op: ReduceOp, elements: &[u64], result: u64) {
    let values = elements.iter().map(|&bits| T::of_bits(bits).to_f64());
    let result_value = T::of_bits(result).to_f64();
    let ranks = elements.len() as f64;
    let Accumulator { unit, largest, least } = format.accumulator;
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
            // With an infinity, the product depends on whether another factor underflows to 0 first.
            return op == ReduceOp::Prod
                || result_value == infinities
                || (result_value.is_nan() && infinities.is_nan());
        }
        // Sums as pairs of doubles, which are far more exact than the bound.
        let (mut high, mut low, magnitude);
        if op == ReduceOp::Prod {
            (high, low) = (1.0, 0.0);
            for value in values.clone() {
                let product: f64 = high * value;
                low = high.mul_add(value, -product) + low * value;
                high = product;
                if high != 0.0 && !(least..=largest / 2.0).contains(&high.abs()) {
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
        let bound = (ranks + 2.0) * unit * magnitude + 2.0 * format.unit * exact.abs() + format.least;
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
