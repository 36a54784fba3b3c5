//! Compares results with the reference, element by element.

use fast_allreduce::{ReduceOp, MAX_RANKS};
use fast_allreduce_oracle::number::Number;

use super::inputs::Inputs;
use super::memory::poison;
use super::reference::{deviation, Rounding};
use super::work::{Part, Source, Work};

/// The promise that results are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The bits of a reduction in rank order, within the bound of one rounding.
    SameBits,
    /// Any order, within the bound of rounding at every step.
    AnyOrder,
}

/// The verdict on results.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Verdict {
    /// Elements that break the promise.
    pub wrong: u64,
    /// The largest distance of an element from the reduction in f64.
    pub error: f64,
}

/// Checks `output`, the whole output of a call or its beginning, against the promise.
pub fn judge<T: Number>(inputs: &Inputs, work: &Work, output: &[T], promise: Promise) -> Verdict {
    let mut verdict = Verdict::default();
    let mut rest = output;
    for Part { length, source } in work.parts() {
        let (part, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        match source {
            Source::Reduced { first } => judge_reduced(inputs, part, first, promise, &mut verdict),
            Source::Copied { rank, first } => judge_copied(inputs, part, (rank, first), &mut verdict),
        }
    }
    verdict
}

/// Checks the reduction of all ranks' elements from `first` on.
fn judge_reduced<T: Number>(
    inputs: &Inputs,
    output: &[T],
    first: usize,
    promise: Promise,
    verdict: &mut Verdict,
) {
    let (op, world_size) = (inputs.op(), inputs.world_size());
    let mut values = [poison::<T>(); MAX_RANKS];
    let values = &mut values[..world_size];
    for (index, result) in (first..).zip(output) {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        let (deviation, is_same) = match promise {
            Promise::SameBits => {
                let is_same = result.bits() == T::reduce(op, values).bits();
                (deviation(*result, op, values, Rounding::Once), is_same)
            }
            Promise::AnyOrder => (deviation(*result, op, values, Rounding::EveryStep), true),
        };
        verdict.wrong += u64::from(!is_same || !deviation.is_plausible());
        verdict.error = verdict.error.max(deviation.error);
    }
}

/// Checks a copy of one rank's elements from index `first` on, bit for bit.
fn judge_copied<T: Number>(
    inputs: &Inputs,
    output: &[T],
    (rank, first): (usize, usize),
    verdict: &mut Verdict,
) {
    for (index, result) in (first..).zip(output) {
        let value: T = inputs.value(rank, index);
        if result.bits() != value.bits() {
            // Any operation on one value yields that value.
            let deviation = deviation(*result, ReduceOp::Max, &[value], Rounding::Once);
            verdict.wrong += 1;
            verdict.error = verdict.error.max(deviation.error);
        }
    }
}

/// Counts the elements of `rank`'s input that have changed.
pub fn count_changed<T: Number>(inputs: &Inputs, rank: usize, input: &[T]) -> u64 {
    let is_changed = |(index, element): (usize, &T)| element.bits() != inputs.value::<T>(rank, index).bits();
    input.iter().enumerate().map(is_changed).map(u64::from).sum()
}

#[cfg(test)]
mod tests {
    use fast_allreduce_oracle::number::{bf16, f16, F8E4M3, F8E5M2};

    use super::*;
    use fast_allreduce::{CallKind, DType};

    const COUNT: usize = 100;

    fn count_wrong<T: Number>(inputs: &Inputs, output: &[T]) -> u64 {
        judge(inputs, &work(inputs), output, Promise::SameBits).wrong
    }

    fn work(inputs: &Inputs) -> Work {
        Work::new(CallKind::AllReduce, DType::F32, inputs.op(), 0, COUNT, 0, inputs.world_size())
    }

    fn right<T: Number>(inputs: &Inputs) -> Vec<T> {
        let values =
            |index| (0..inputs.world_size()).map(|rank| inputs.value(rank, index)).collect::<Vec<T>>();
        (0..COUNT).map(|index| T::reduce(inputs.op(), &values(index))).collect()
    }

    fn notices_each_corruption<T: Number>(flip: fn(T) -> T) {
        for op in ReduceOp::ARITHMETIC {
            let inputs = Inputs::new(3, 0, 5, op);
            let right = right::<T>(&inputs);
            assert_eq!(count_wrong(&inputs, &right), 0, "{} {op}", T::DTYPE);
            for index in 0..COUNT {
                let mut output = right.clone();
                output[index] = flip(output[index]);
                assert_eq!(count_wrong(&inputs, &output), 1, "{} {op} at {index}", T::DTYPE);
            }
        }
    }

    #[test]
    fn one_flipped_bit_is_one_wrong_element() {
        notices_each_corruption::<f16>(|value| f16::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<bf16>(|value| bf16::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<F8E4M3>(|value| F8E4M3::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<F8E5M2>(|value| F8E5M2::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<f32>(|value| f32::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<f64>(|value| -value);
        notices_each_corruption::<i8>(|value| value ^ 1);
        notices_each_corruption::<u8>(|value| value ^ 128);
        notices_each_corruption::<i32>(|value| value ^ 1);
        notices_each_corruption::<u32>(|value| value ^ 1);
        notices_each_corruption::<i64>(|value| value ^ i64::MIN);
        notices_each_corruption::<u64>(|value| value ^ 1);
    }

    #[test]
    fn poison_old_results_and_missing_ranks_are_wrong() {
        let inputs = Inputs::new(3, 1, 4, ReduceOp::Sum);
        let count = COUNT as u64;
        assert_eq!(count_wrong(&inputs, &[poison::<f32>(); COUNT]), count);
        let old = right::<u64>(&Inputs::new(3, 0, 4, ReduceOp::Sum));
        assert_eq!(count_wrong(&inputs, &old), count);
        let without_one = right::<u64>(&Inputs::new(3, 1, 3, ReduceOp::Sum));
        assert_eq!(count_wrong(&inputs, &without_one), count);
    }

    #[test]
    fn an_error_is_the_largest_and_another_order_is_no_error() {
        let inputs = Inputs::new(3, 1, 4, ReduceOp::Sum);
        let right = right::<f32>(&inputs);
        let backwards = |index| (0..4).rev().map(|rank| inputs.value::<f32>(rank, index)).sum::<f32>();
        let mut output: Vec<f32> = (0..COUNT).map(backwards).collect();
        let verdict = judge(&inputs, &work(&inputs), &output, Promise::AnyOrder);
        assert!(verdict.wrong == 0 && verdict.error > 0.0 && verdict.error < 1e-6, "{verdict:?}");
        assert_ne!(judge(&inputs, &work(&inputs), &output, Promise::SameBits).wrong, 0);
        output[7] = right[7] + 0.25;
        let verdict = judge(&inputs, &work(&inputs), &output, Promise::AnyOrder);
        assert!(verdict.wrong == 1 && (verdict.error - 0.25).abs() < 1e-6, "{verdict:?}");
    }

    #[test]
    fn a_copy_from_the_wrong_place_is_wrong() {
        let inputs = Inputs::new(3, 1, 4, ReduceOp::Sum);
        for kind in CallKind::MEASURED {
            // Four shares of 25 elements, as seen by rank 2.
            let work = Work::new(kind, DType::F32, ReduceOp::Sum, 2, COUNT, 2, 4);
            let mut right: Vec<i64> = Vec::new();
            for Part { length, source } in work.parts() {
                right.extend((0..length).map(|index| match source {
                    Source::Copied { rank, first } => inputs.value(rank, first + index),
                    Source::Reduced { first } => {
                        let values = [0, 1, 2, 3].map(|rank| inputs.value(rank, first + index));
                        i64::reduce(ReduceOp::Sum, &values)
                    }
                }));
            }
            assert!(!right.is_empty());
            let judged = |output: &[i64]| judge(&inputs, &work, output, Promise::SameBits).wrong;
            assert_eq!(judged(&right), 0, "{}", kind.name());
            right.rotate_left(1);
            assert_eq!(judged(&right), right.len() as u64, "{}", kind.name());
        }
    }

    #[test]
    fn a_changed_input_is_noticed() {
        let inputs = Inputs::new(3, 1, 2, ReduceOp::Sum);
        let mut memory = [0i32; COUNT];
        inputs.fill(1, &mut memory);
        assert_eq!(count_changed(&inputs, 1, &memory), 0);
        memory[COUNT - 1] ^= 1;
        assert_eq!(count_changed(&inputs, 1, &memory), 1);
        assert_eq!(count_changed(&inputs, 0, &memory), COUNT as u64);
    }
}
