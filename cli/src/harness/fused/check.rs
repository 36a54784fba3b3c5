//! Checks residuals and normalised rows against the reference, element by element.

use fast_allreduce::{ReduceOp, MAX_RANKS};
use fast_allreduce_oracle::norms::norm_row;

use crate::harness::check::Verdict;
use crate::harness::inputs::Inputs;
use crate::harness::memory::poison;
use crate::harness::norm::{Float, EPSILON, NORM};

/// The promise that results are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The documented bits of residual and output.
    SameBits,
    /// The documented bits of the residual; the output within the bound of roundings, given that residual.
    SameResidual,
    /// Any order of ranks, with a rounding at every step.
    AnyOrder,
}

/// Returns the inputs of a call: those of its ranks, then the residual and the weights.
pub fn inputs(seed: u64, round: u64, world_size: usize) -> Inputs {
    Inputs::new(seed, round, world_size + 2, ReduceOp::Sum)
}

/// Writes the residual before the call.
pub fn fill_residual<T: Float>(inputs: &Inputs, residual: &mut [T]) {
    inputs.fill(inputs.world_size() - 2, residual);
}

pub fn fill_weight<T: Float>(inputs: &Inputs, weight: &mut [T]) {
    inputs.fill(inputs.world_size() - 1, weight);
}

/// The verdict on a residual and an output.
#[derive(Debug, Default)]
pub struct Judged {
    pub verdict: Verdict,
    /// The first element of the message that is wrong in either.
    pub first: Option<usize>,
}

impl Judged {
    fn count(&mut self, index: usize, error: f64, bound: f64, is_same: bool) {
        // NaN is within no bound.
        let is_right = is_same && error <= bound;
        if !is_right {
            self.verdict.wrong += 1;
            self.first = Some(self.first.map_or(index, |first| first.min(index)));
        }
        self.verdict.error = self.verdict.error.max(if error.is_nan() { f64::INFINITY } else { error });
    }
}

/// Checks the results of a call against the promise: rows of `weight.len()` elements.
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

/// Checks the residual: the rounded sum over ranks, added to the residual before the call, and rounded.
fn judge_residual<T: Float>(
    inputs: &Inputs,
    first: usize,
    residual: &[T],
    promise: Promise,
    judged: &mut Judged,
) {
    let world_size = inputs.world_size() - 2;
    let (unit, least) = T::ROUNDING;
    let step = if promise == Promise::AnyOrder { unit } else { f32::ROUNDING.0 };
    let mut values = [poison::<T>(); MAX_RANKS];
    let values = &mut values[..world_size];
    for (index, result) in (first..).zip(residual) {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        let before: T = inputs.value(world_size, index);
        let sum: f64 = values.iter().map(|value| value.to_f64()).sum();
        let magnitudes: f64 = values.iter().map(|value| value.to_f64().abs()).sum();
        let exact = sum + before.to_f64();
        let steps = 2.0 * (world_size as f64 + 1.0) * step * magnitudes;
        let bound = 1.01 * (steps + unit * (sum.abs() + exact.abs())) + (world_size as f64 + 1.0) * least;
        let is_same = promise == Promise::AnyOrder || {
            let sum = T::reduce(ReduceOp::Sum, values);
            added(sum, before).bits() == result.bits()
        };
        judged.count(index, (result.to_f64() - exact).abs(), bound, is_same);
    }
}

/// Adds in f32, and rounds.
fn added<T: Float>(sum: T, residual: T) -> T {
    T::from_f64((sum.to_f64() as f32 + residual.to_f64() as f32).into())
}

/// Normalises a row, with the documented bits.
fn normalised<T: Float>(row: &[T], weight: &[T]) -> Vec<T> {
    let wide = |elements: &[T]| elements.iter().map(|x| x.to_f64() as f32).collect::<Vec<_>>();
    let normed = norm_row(&wide(row), NORM, Some(&wide(weight)), None);
    normed.into_iter().map(|x| T::from_f64(x.into())).collect()
}

/// Checks the bits of the sum over ranks alone.
pub fn wrong_sums<T: Float>(inputs: &Inputs, sum: &[T]) -> Judged {
    let mut judged = Judged::default();
    let world_size = inputs.world_size() - 2;
    let mut values = [poison::<T>(); MAX_RANKS];
    let values = &mut values[..world_size];
    for (index, result) in sum.iter().enumerate() {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        judged.count(index, 0.0, 0.0, T::reduce(ReduceOp::Sum, values).bits() == result.bits());
    }
    judged
}

/// Checks the normalised rows of the residual. The bound allows squares added in chains of hidden / 64 + 64 additions.
fn judge_output<T: Float>(
    first: usize,
    residual: &[T],
    weight: &[T],
    output: &[T],
    promise: Promise,
    judged: &mut Judged,
) {
    let hidden = residual.len() as f64;
    let squares: f64 = residual.iter().map(|x| x.to_f64().powi(2)).sum();
    let scale = 1.0 / (squares / hidden + f64::from(EPSILON)).sqrt();
    let (unit, least) = T::ROUNDING;
    let relative = 1.01 * (unit + (hidden / 64.0 + 64.0) * f32::ROUNDING.0);
    let bits = (promise == Promise::SameBits).then(|| normalised(residual, weight));
    for (index, (x, result)) in residual.iter().zip(output).enumerate() {
        let exact = x.to_f64() * scale * weight[index].to_f64();
        let is_same = bits.as_ref().is_none_or(|bits| bits[index].bits() == result.bits());
        judged.count(first + index, (result.to_f64() - exact).abs(), relative * exact.abs() + least, is_same);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::norm::add_and_norm;
    use half::{bf16, f16};

    const SHAPE: (usize, usize) = (3, 700);

    /// A right residual and output of two ranks, with the weights.
    fn right<T: Float>(inputs: &Inputs) -> [Vec<T>; 3] {
        let (rows, hidden) = SHAPE;
        let mut weight = vec![poison::<T>(); hidden];
        fill_weight(inputs, &mut weight);
        let element = |index| {
            let values = [inputs.value::<T>(0, index), inputs.value(1, index)];
            let before: T = inputs.value(2, index);
            added(T::reduce(ReduceOp::Sum, &values), before)
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
        sums[70] = T::from_f64(sums[70].to_f64() + 1.0);
        sums[90] = poison::<T>();
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
            wrong[701] = T::from_f64(wrong[701].to_f64() * 1.02 + 0.001);
            assert_eq!(judged(&residual, &wrong, promise), 1, "{promise:?}");
            let mut poisoned = output.clone();
            poisoned[0] = T::from_f64(f64::INFINITY);
            assert_eq!(judged(&residual, &poisoned, promise), 1, "{promise:?}");
            // A row of another residual is normalised otherwise.
            let mut other = residual.clone();
            other[3] = T::from_f64(other[3].to_f64() + 1.0);
            assert!(judged(&other, &output, promise) >= 2, "{promise:?}");
        }
        let mut unfused: Vec<T> = (0..output.len()).map(|index| inputs.value(2, index)).collect();
        let sum = |index| T::reduce(ReduceOp::Sum, &[inputs.value::<T>(0, index), inputs.value(1, index)]);
        let sums: Vec<T> = (0..output.len()).map(sum).collect();
        let mut normed = vec![poison::<T>(); output.len()];
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
