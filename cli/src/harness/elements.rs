//! Loops over elements of a type that is known at run time. Only these are compiled for every type.

use std::ops::Range;

use fast_allreduce::{DType, ReduceOp};
use fast_allreduce_oracle::number::{bf16, e4m3, e5m2, f16, Number, F8E4M3, F8E5M2};

use super::check::{judge, Promise, Verdict};
use super::inputs::Inputs;
use super::memory::{poison, typed, typed_mut};
#[cfg(feature = "cuda")]
use super::reference::{deviation, Rounding};
use super::work::Work;
use crate::failure::Failure;

/// The loops of a type. Memory holds whole elements, and is aligned for them.
pub trait Elements: Sync {
    /// Writes inputs, like [`Inputs::fill`].
    fn fill(&self, inputs: &Inputs, rank: usize, memory: &mut [u8]);

    /// Checks a result, like [`judge`].
    fn judge(&self, inputs: &Inputs, work: &Work, output: &[u8], promise: Promise) -> Verdict;

    /// Counts the elements outside `output` that have changed: those of `input`, which holds a rank's input, and
    /// the rest, which is poison.
    fn count_changed(
        &self,
        inputs: &Inputs,
        rank: usize,
        memory: &[u8],
        input: Range<usize>,
        output: Range<usize>,
    ) -> u64;

    /// Reduces the ranks' inputs in rank order. Returns false if the reference in f64 disagrees.
    #[cfg(feature = "cuda")]
    fn reduce(&self, op: ReduceOp, inputs: &[&[u8]], result: &mut [u8]) -> bool;

    /// Reduces `values` into `results`, like [`Combine::combine`].
    fn combine(&self, op: ReduceOp, results: &mut [u8], values: &[u8]);
}

/// Returns the loops of a type.
pub fn elements(dtype: DType) -> Result<&'static dyn Elements, Failure> {
    Ok(match dtype {
        DType::F16 => &Of::<f16>::HERE,
        DType::Bf16 => &Of::<bf16>::HERE,
        DType::F32 => &Of::<f32>::HERE,
        DType::F64 => &Of::<f64>::HERE,
        DType::I8 => &Of::<i8>::HERE,
        DType::U8 => &Of::<u8>::HERE,
        DType::I32 => &Of::<i32>::HERE,
        DType::U32 => &Of::<u32>::HERE,
        DType::I64 => &Of::<i64>::HERE,
        DType::U64 => &Of::<u64>::HERE,
        DType::F8E4M3 => &Of::<F8E4M3>::HERE,
        DType::F8E5M2 => &Of::<F8E5M2>::HERE,
        other => return Err(Failure::Usage(format!("there is no reference for {other}"))),
    })
}

struct Of<T>(std::marker::PhantomData<fn(T)>);

impl<T> Of<T> {
    const HERE: Self = Self(std::marker::PhantomData);
}

impl<T: Number + Combine> Elements for Of<T> {
    fn fill(&self, inputs: &Inputs, rank: usize, memory: &mut [u8]) {
        inputs.fill::<T>(rank, typed_mut(memory));
    }

    fn judge(&self, inputs: &Inputs, work: &Work, output: &[u8], promise: Promise) -> Verdict {
        judge::<T>(inputs, work, typed(output), promise)
    }

    fn count_changed(
        &self,
        inputs: &Inputs,
        rank: usize,
        memory: &[u8],
        input: Range<usize>,
        output: Range<usize>,
    ) -> u64 {
        let memory = typed::<T>(memory);
        let is_changed = |&index: &usize| {
            let before = match input.contains(&index) {
                true => inputs.value(rank, index - input.start),
                false => poison::<T>(),
            };
            memory[index].bits() != before.bits()
        };
        let outside = (0..output.start).chain(output.end..memory.len());
        outside.filter(is_changed).count() as u64
    }

    #[cfg(feature = "cuda")]
    fn reduce(&self, op: ReduceOp, inputs: &[&[u8]], result: &mut [u8]) -> bool {
        let inputs: Vec<&[T]> = inputs.iter().map(|input| typed(input)).collect();
        let mut values = vec![poison::<T>(); inputs.len()];
        let mut is_plausible = true;
        for (index, result) in typed_mut::<T>(result).iter_mut().enumerate() {
            values.iter_mut().zip(&inputs).for_each(|(value, input)| *value = input[index]);
            *result = T::reduce(op, &values);
            is_plausible &= deviation(*result, op, &values, Rounding::Once).is_plausible();
        }
        is_plausible
    }

    fn combine(&self, op: ReduceOp, results: &mut [u8], values: &[u8]) {
        T::combine(op, typed_mut(results), typed(values));
    }
}

/// The loops of the naive allreduce, which rounds at every step.
pub trait Combine: Sized {
    /// Reduces `values` into `results`, element by element.
    fn combine(op: ReduceOp, results: &mut [Self], values: &[Self]);
}

fn each<T: Copy>(results: &mut [T], values: &[T], f: impl Fn(T, T) -> T) {
    results.iter_mut().zip(values).for_each(|(result, &value)| *result = f(*result, value));
}

macro_rules! combine {
    ($($type:ty, $add:expr, $multiply:expr, $min:expr, $max:expr;)*) => {$(
        impl Combine for $type {
            fn combine(op: ReduceOp, results: &mut [Self], values: &[Self]) {
                match op {
                    ReduceOp::Sum => each(results, values, $add),
                    ReduceOp::Prod => each(results, values, $multiply),
                    ReduceOp::Min => each(results, values, $min),
                    ReduceOp::Max => each(results, values, $max),
                    op => unreachable!("the naive allreduce refuses {op}"),
                }
            }
        }
    )*};
}

macro_rules! combine_integers {
    ($($type:ty)*) => {
        combine! {$($type, <$type>::wrapping_add, <$type>::wrapping_mul, Ord::min, Ord::max;)*}
    };
}

combine_integers! { i8 u8 i32 u32 i64 u64 }

combine! {
    f32, |a, b| a + b, |a, b| a * b, f32::min, f32::max;
    f64, |a, b| a + b, |a, b| a * b, f64::min, f64::max;
    f16, |a, b| a + b, |a, b| a * b, f16::min, f16::max;
    bf16, |a, b| a + b, |a, b| a * b, bf16::min, bf16::max;
}

/// For types without instructions for arithmetic: by f32.
macro_rules! combine_widened {
    ($($type:ty, $round:expr;)*) => {$(
        combine! {
            $type,
            |a, b| $round(a.to_f32() + b.to_f32()),
            |a, b| $round(a.to_f32() * b.to_f32()),
            |a, b| $round(a.to_f32().min(b.to_f32())),
            |a, b| $round(a.to_f32().max(b.to_f32()));
        }
    )*};
}

combine_widened! { F8E4M3, e4m3; F8E5M2, e5m2; }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_outside_of_the_output_are_counted() {
        let inputs = Inputs::new(3, 1, 2, ReduceOp::Sum);
        let elements = elements(DType::I32).unwrap();
        let mut memory = crate::harness::memory::Lines::new(10 * 4).unwrap();
        elements.fill(&inputs, 1, &mut memory[2 * 4..6 * 4]);
        let count = |memory: &[u8]| elements.count_changed(&inputs, 1, memory, 2..6, 4..7);
        assert_eq!(count(&memory), 0);
        memory[4 * 4..7 * 4].fill(1);
        assert_eq!(count(&memory), 0, "the output");
        memory[3] ^= 1;
        memory[2 * 4] ^= 1;
        memory[9 * 4] ^= 1;
        assert_eq!(count(&memory), 3);
    }

    #[test]
    #[cfg(feature = "cuda")]
    fn a_reduction_is_that_of_the_type() {
        let elements = elements(DType::U8).unwrap();
        let mut result = [0; 2];
        assert!(elements.reduce(ReduceOp::Sum, &[&[200, 1], &[100, 2]], &mut result));
        assert_eq!(result, [44, 3]);
    }
}
