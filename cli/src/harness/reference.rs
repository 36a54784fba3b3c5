//! An independent check of results: their distance from a reduction in f64, and the bound that rounding explains.

use fast_allreduce::{ReduceOp, MAX_RANKS};
use fast_allreduce_oracle::number::Number;

/// When an implementation rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// In the accumulator type, and once more at the end.
    Once,
    /// In the element type, at every step.
    ///
    /// In a sum of n elements in any order (a tree or a ring), each element takes part in at most n - 1 additions.
    /// Each addition has an error of at most u times its result, and no partial sum exceeds the sum of magnitudes
    /// M: together (n - 1) u M. An average rounds once more, and so may the result: u times the result. A partial
    /// product has an error of a factor 1 + u at each of n - 1 steps: the same bound with the product's magnitude
    /// for M. For subnormal numbers u does not hold, but the least positive number for each step does. Minima,
    /// maxima and integers are not rounded.
    EveryStep,
}

/// The distance of a result from the reference.
#[derive(Debug, Clone, Copy)]
pub struct Deviation {
    /// Infinite if one of them is NaN.
    pub error: f64,
    /// The largest error that rounding explains.
    pub bound: f64,
}

impl Deviation {
    /// Returns whether rounding explains the error.
    pub fn is_plausible(self) -> bool {
        self.error <= self.bound
    }
}

/// Returns the distance of a result from the reduction in f64 in reverse rank order, or for integers from the exact
/// reduction.
pub fn deviation<T: Number>(result: T, op: ReduceOp, values: &[T], rounding: Rounding) -> Deviation {
    let Some(limit) = T::FORMAT else {
        let error = result.to_i128() - T::reduce(op, values).to_i128();
        return Deviation { error: error.unsigned_abs() as f64, bound: 0.0 };
    };
    let mut backwards = [0.0; MAX_RANKS];
    for (slot, value) in backwards.iter_mut().zip(values.iter().rev()) {
        *slot = match op {
            ReduceOp::PreMulSum(scale) => value.product(scale).to_f64(),
            _ => value.to_f64(),
        };
    }
    let (result, values) = (result.to_f64(), &backwards[..values.len()]);
    let n = values.len() as f64;
    // The expected result, and the magnitude that the accumulator's errors are relative to.
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
    if !expected.is_finite() {
        // A premultiplied sum with a NaN or an infinite scale.
        let is_same = result == expected || result.is_nan() && expected.is_nan();
        return Deviation { error: if is_same { 0.0 } else { f64::INFINITY }, bound: 0.0 };
    }
    let error = (result - expected).abs();
    let error = if error.is_nan() { f64::INFINITY } else { error };
    if matches!(op, ReduceOp::Min | ReduceOp::Max) {
        return Deviation { error, bound: 0.0 };
    }
    let (step, least) = match rounding {
        Rounding::Once => (limit.accumulator.unit, limit.least),
        Rounding::EveryStep => (limit.unit, n * limit.least),
    };
    // Both sides round at every step; a margin of 1 % covers errors of second order.
    let bound = 2.0 * (n + 1.0) * step * scale + limit.unit * expected.abs() + least;
    Deviation { error, bound: 1.01 * bound }
}

#[cfg(test)]
mod tests {
    use fast_allreduce_oracle::number::f16;

    use super::*;

    #[test]
    fn a_result_beyond_rounding_is_not_plausible() {
        let values = [0.1f32, 0.2, 0.3, -0.5];
        for op in ReduceOp::ARITHMETIC.into_iter().chain([ReduceOp::PreMulSum(0.3.into())]) {
            let is_plausible = |result: f32| deviation(result, op, &values, Rounding::Once).is_plausible();
            let result = f32::reduce(op, &values);
            assert!(is_plausible(result), "{op}");
            assert!(!is_plausible(result * 1.001 + 1e-5), "{op}");
            assert!(!is_plausible(f32::NAN), "{op}");
        }
        for scale in [f64::NAN, f64::INFINITY] {
            let op = ReduceOp::PreMulSum(scale.into());
            let is_plausible =
                |result: f32| deviation(result, op, &values[..3], Rounding::Once).is_plausible();
            assert!(is_plausible(f32::reduce(op, &values[..3])) && !is_plausible(1.0), "{op}");
        }
    }

    #[test]
    fn rounding_at_every_step_has_a_wider_bound() {
        // Each 1 is lost in f16 at 2048.
        let values = [2048.0, 1.0, 1.0].map(f16::from_f32);
        let stepwise = f16::from_f32(2048.0);
        let deviated = |result: f16, rounding| deviation(result, ReduceOp::Sum, &values, rounding);
        assert_eq!(deviated(stepwise, Rounding::Once).error, 2.0);
        assert!(!deviated(stepwise, Rounding::Once).is_plausible());
        assert!(deviated(stepwise, Rounding::EveryStep).is_plausible());
        assert!(!deviated(f16::from_f32(2070.0), Rounding::EveryStep).is_plausible());
        for op in [ReduceOp::Min, ReduceOp::Max] {
            assert!(!deviation(stepwise, op, &values[1..], Rounding::EveryStep).is_plausible());
        }
        assert_eq!(deviation(200u8, ReduceOp::Sum, &[200, 100], Rounding::EveryStep).error, 156.0);
    }
}
