//! Compares residuals and normalised rows with the reference, element by element.

use fast_allreduce::{ReduceOp, MAX_RANKS};

use super::arithmetic::{normalised, Float, EPSILON};
use crate::harness::check::Verdict;
use crate::harness::inputs::Inputs;

/// What a way's results are held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The documented bits of both.
    SameBits,
    /// Those of the residual. The output: what roundings explain, of the rows that the residual has.
    SameResidual,
    /// Ranks in any order, with a rounding at every step.
    AnyOrder,
}

/// The inputs of a call are those of its ranks; then follow the residual and the weights.
pub fn inputs(seed: u64, round: u64, world_size: usize) -> Inputs {
    Inputs::new(seed, round, world_size + 2, ReduceOp::Sum)
}

/// Fills a residual as it is before the call.
pub fn fill_residual<T: Float>(inputs: &Inputs, residual: &mut [T]) {
    inputs.fill(inputs.world_size() - 2, residual);
}

pub fn fill_weight<T: Float>(inputs: &Inputs, weight: &mut [T]) {
    inputs.fill(inputs.world_size() - 1, weight);
}

/// What was found in a residual and an output.
#[derive(Debug, Default)]
pub struct Judged {
    pub verdict: Verdict,
    /// The first element of which either is wrong, in a message.
    pub first: Option<usize>,
}

impl Judged {
    fn count(&mut self, index: usize, error: f64, bound: f64, is_same: bool) {
        // No number is within no bound.
        let is_right = is_same && error <= bound;
        if !is_right {
            self.verdict.wrong += 1;
            self.first = Some(self.first.map_or(index, |first| first.min(index)));
        }
        self.verdict.error = self.verdict.error.max(if error.is_nan() { f64::INFINITY } else { error });
    }
}

/// Holds what a call has left to the promise: rows of `weight.len()` elements.
pub fn judge<T: Float>(
    inputs: &Inputs,
    weight: &[T],
    residual: &[T],
    output: &[T],
    promise: Promise,
) -> Judged {
    let mut judged = Judged::default();
    let hidden = weight.len();
    for (row, (residual, output)) in residual.chunks(hidden).zip(output.chunks(hidden)).enumerate() {
        judge_residual(inputs, row * hidden, residual, promise, &mut judged);
        judge_output(row * hidden, residual, weight, output, promise, &mut judged);
    }
    judged
}

/// The sum over ranks, rounded, and added to the residual before, rounded.
fn judge_residual<T: Float>(
    inputs: &Inputs,
    first: usize,
    residual: &[T],
    promise: Promise,
    judged: &mut Judged,
) {
    let world_size = inputs.world_size() - 2;
    let step = match promise {
        Promise::AnyOrder => T::ROUNDING,
        _ => f32::ROUNDING,
    };
    let mut values = [T::poison(); MAX_RANKS];
    let values = &mut values[..world_size];
    for (index, result) in (first..).zip(residual) {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        let before: T = inputs.value(world_size, index);
        let sum: f64 = values.iter().map(|value| f64::from(value.wide())).sum();
        let magnitudes: f64 = values.iter().map(|value| f64::from(value.wide()).abs()).sum();
        let exact = sum + f64::from(before.wide());
        let steps = 2.0 * (world_size as f64 + 1.0) * step * magnitudes;
        let bound =
            1.01 * (steps + T::ROUNDING * (sum.abs() + exact.abs())) + (world_size as f64 + 1.0) * T::LEAST;
        let is_same = promise == Promise::AnyOrder || {
            let sum = T::reduce(ReduceOp::Sum, values);
            T::rounded(sum.wide() + before.wide()).bits() == result.bits()
        };
        judged.count(index, (f64::from(result.wide()) - exact).abs(), bound, is_same);
    }
}

/// Holds the sum over ranks alone to its bits.
pub fn wrong_sums<T: Float>(inputs: &Inputs, sum: &[T]) -> Judged {
    let mut judged = Judged::default();
    let world_size = inputs.world_size() - 2;
    let mut values = [T::poison(); MAX_RANKS];
    let values = &mut values[..world_size];
    for (index, result) in sum.iter().enumerate() {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        judged.count(index, 0.0, 0.0, T::reduce(ReduceOp::Sum, values).bits() == result.bits());
    }
    judged
}

/// The rows of the residual, normalised. However its squares are added, it is in chains of no more than every 64th and some.
fn judge_output<T: Float>(
    first: usize,
    residual: &[T],
    weight: &[T],
    output: &[T],
    promise: Promise,
    judged: &mut Judged,
) {
    let hidden = residual.len() as f64;
    let squares: f64 = residual.iter().map(|x| f64::from(x.wide()).powi(2)).sum();
    let scale = 1.0 / (squares / hidden + f64::from(EPSILON)).sqrt();
    let relative = 1.01 * (T::ROUNDING + (hidden / 64.0 + 64.0) * f32::ROUNDING);
    let bits = (promise == Promise::SameBits).then(|| normalised(residual, weight));
    for (index, (x, result)) in residual.iter().zip(output).enumerate() {
        let exact = f64::from(x.wide()) * scale * f64::from(weight[index].wide());
        let is_same = bits.as_ref().is_none_or(|bits| bits[index].bits() == result.bits());
        judged.count(
            first + index,
            (f64::from(result.wide()) - exact).abs(),
            relative * exact.abs() + T::LEAST,
            is_same,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::rms_norm::arithmetic::add_and_norm;
    use half::{bf16, f16};

    const SHAPE: (usize, usize) = (3, 700);

    /// A right residual and output of two ranks, with the weights.
    fn right<T: Float>(inputs: &Inputs) -> [Vec<T>; 3] {
        let (rows, hidden) = SHAPE;
        let mut weight = vec![T::poison(); hidden];
        fill_weight(inputs, &mut weight);
        let element = |index| {
            let values = [inputs.value::<T>(0, index), inputs.value(1, index)];
            let before: T = inputs.value(2, index);
            T::rounded(T::reduce(ReduceOp::Sum, &values).wide() + before.wide())
        };
        let residual: Vec<T> = (0..rows * hidden).map(element).collect();
        let output = residual.chunks(hidden).flat_map(|row| normalised(row, &weight)).collect();
        [residual, output, weight]
    }

    fn notices_sums<T: Float>() {
        let inputs = inputs(5, 1, 2);
        let sum = |index| T::reduce(ReduceOp::Sum, &[inputs.value::<T>(0, index), inputs.value(1, index)]);
        let mut sums: Vec<T> = (0..100).map(sum).collect();
        assert_eq!(wrong_sums(&inputs, &sums).verdict.wrong, 0);
        sums[70] = T::rounded(sums[70].wide() + 1.0);
        sums[90] = T::poison();
        let judged = wrong_sums(&inputs, &sums);
        assert_eq!((judged.verdict.wrong, judged.first), (2, Some(70)));
    }

    #[test]
    fn wrong_sums_are_noticed() {
        notices_sums::<f16>();
        notices_sums::<bf16>();
        notices_sums::<f32>();
    }

    fn notices<T: Float>() {
        let inputs = inputs(5, 1, 2);
        let [residual, output, weight] = right::<T>(&inputs);
        let judged = |residual: &[T], output: &[T], promise| {
            judge(&inputs, &weight, residual, output, promise).verdict.wrong
        };
        for promise in [Promise::SameBits, Promise::SameResidual, Promise::AnyOrder] {
            assert_eq!(judged(&residual, &output, promise), 0, "{promise:?}");
            let mut wrong = output.clone();
            wrong[701] = T::rounded(wrong[701].wide() * 1.02 + 0.001);
            assert_eq!(judged(&residual, &wrong, promise), 1, "{promise:?}");
            let mut poisoned = output.clone();
            poisoned[0] = T::rounded(f32::INFINITY);
            assert_eq!(judged(&residual, &poisoned, promise), 1, "{promise:?}");
            // A row of another residual is normalised otherwise.
            let mut other = residual.clone();
            other[3] = T::rounded(other[3].wide() + 1.0);
            assert!(judged(&other, &output, promise) >= 2, "{promise:?}");
        }
        let mut unfused: Vec<T> = (0..output.len()).map(|index| inputs.value(2, index)).collect();
        let sum = |index| T::reduce(ReduceOp::Sum, &[inputs.value::<T>(0, index), inputs.value(1, index)]);
        let sums: Vec<T> = (0..output.len()).map(sum).collect();
        let mut normed = vec![T::poison(); output.len()];
        add_and_norm(&sums, &mut unfused, &mut normed, &weight);
        assert_eq!(judged(&unfused, &normed, Promise::SameResidual), 0);
    }

    #[test]
    fn what_is_wrong_is_noticed_and_what_is_right_is_not() {
        notices::<f32>();
        notices::<f16>();
        notices::<bf16>();
    }
}
