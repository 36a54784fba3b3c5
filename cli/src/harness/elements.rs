//! Elements of a type that is known at run time, in bytes. What is done with each of them is compiled for every type, all else of
//! this program once.

use std::ops::{Deref, DerefMut, Range};

use fast_allreduce::{DType, ReduceOp};
use half::{bf16, f16};

use super::check::{count_changed, judge, Promise, Verdict};
use super::float8::{F8E4M3, F8E5M2};
use super::inputs::Inputs;
use super::reference::Number;
#[cfg(feature = "cuda")]
use super::reference::Rounding;
use super::work::Work;
use crate::failure::Failure;

/// What elements hold in every byte before a checked call.
pub const POISON: u8 = 0xa5;

/// A type's loops. Memory is as long as whole elements are, and aligned for them.
pub trait Elements: Sync {
    /// As [`Inputs::fill`].
    fn fill(&self, inputs: &Inputs, rank: usize, memory: &mut [u8]);

    /// As [`judge`].
    fn judge(&self, inputs: &Inputs, work: &Work, output: &[u8], promise: Promise) -> Verdict;

    /// As [`count_changed`].
    fn count_changed(&self, inputs: &Inputs, rank: usize, input: &[u8]) -> u64;

    /// Of memory whose `input` holds a rank's, and the rest poison: the elements outside `output` that are no longer that. Ranges
    /// are of elements.
    fn count_changed_beside(
        &self,
        inputs: &Inputs,
        rank: usize,
        memory: &[u8],
        input: Range<usize>,
        output: Range<usize>,
    ) -> u64;

    /// The ranks' memory reduced in rank order. False where a second opinion differs.
    #[cfg(feature = "cuda")]
    fn reduce(&self, op: ReduceOp, inputs: &[&[u8]], result: &mut [u8]) -> bool;

    /// As [`Combine::combine`](super::rivals::naive::Combine::combine).
    fn combine(&self, op: ReduceOp, results: &mut [u8], values: &[u8]);

    /// As [`Combine::finish`](super::rivals::naive::Combine::finish).
    fn finish(&self, op: ReduceOp, results: &mut [u8], world_size: usize);
}

/// Those of a type.
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

impl<T: Number> Elements for Of<T> {
    fn fill(&self, inputs: &Inputs, rank: usize, memory: &mut [u8]) {
        inputs.fill::<T>(rank, typed_mut(memory));
    }

    fn judge(&self, inputs: &Inputs, work: &Work, output: &[u8], promise: Promise) -> Verdict {
        judge::<T>(inputs, work, typed(output), promise)
    }

    fn count_changed(&self, inputs: &Inputs, rank: usize, input: &[u8]) -> u64 {
        count_changed::<T>(inputs, rank, typed(input))
    }

    fn count_changed_beside(
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
                false => T::poison(),
            };
            memory[index].bits() != before.bits()
        };
        let beside = (0..output.start).chain(output.end..memory.len());
        beside.filter(is_changed).count() as u64
    }

    #[cfg(feature = "cuda")]
    fn reduce(&self, op: ReduceOp, inputs: &[&[u8]], result: &mut [u8]) -> bool {
        let inputs: Vec<&[T]> = inputs.iter().map(|input| typed(input)).collect();
        let mut values = vec![T::poison(); inputs.len()];
        let mut is_plausible = true;
        for (index, result) in typed_mut::<T>(result).iter_mut().enumerate() {
            values.iter_mut().zip(&inputs).for_each(|(value, input)| *value = input[index]);
            *result = T::reduce(op, &values);
            is_plausible &= result.deviation(op, &values, Rounding::Once).is_plausible();
        }
        is_plausible
    }

    fn combine(&self, op: ReduceOp, results: &mut [u8], values: &[u8]) {
        T::combine(op, typed_mut(results), typed(values));
    }

    fn finish(&self, op: ReduceOp, results: &mut [u8], world_size: usize) {
        T::finish(op, typed_mut(results), world_size);
    }
}

/// Bytes as the elements that they are.
///
/// # Panics
///
/// Where they are not aligned for them, or end within one.
#[inline]
pub fn typed<T: Number>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() {
        return &[];
    }
    // SAFETY: every bit pattern is a value of a number.
    let (before, elements, after) = unsafe { bytes.align_to() };
    assert!(before.is_empty() && after.is_empty(), "{} bytes are no whole elements", bytes.len());
    elements
}

/// As [`typed`].
#[inline]
pub fn typed_mut<T: Number>(bytes: &mut [u8]) -> &mut [T] {
    if bytes.is_empty() {
        return &mut [];
    }
    // SAFETY: every bit pattern is a value of a number, and the bytes of any value are bytes.
    let (before, elements, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "these bytes are no whole elements");
    elements
}

/// An element's bits, as a number.
#[cfg(feature = "cuda")]
pub fn bits(element: &[u8]) -> u64 {
    element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// Memory of this process, on a cache line's boundary.
pub struct Lines {
    storage: Vec<u8>,
    start: usize,
}

impl Lines {
    /// Poisoned.
    pub fn new(bytes: usize) -> Result<Self, Failure> {
        const ALIGNMENT: usize = 64;
        let length = bytes.saturating_add(ALIGNMENT);
        let mut storage = Vec::new();
        let none = |_| Failure::Usage(format!("no memory for a buffer of {bytes} bytes"));
        storage.try_reserve_exact(length).map_err(none)?;
        storage.resize(length, POISON);
        let start = storage.as_ptr().align_offset(ALIGNMENT);
        storage.truncate(start + bytes);
        Ok(Self { storage, start })
    }
}

impl Deref for Lines {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.storage[self.start..]
    }
}

impl DerefMut for Lines {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_poisoned() {
        for bytes in [0, 1, 63, 64, 4097] {
            let lines = Lines::new(bytes).unwrap();
            assert_eq!(lines.len(), bytes);
            assert!(bytes == 0 || lines.as_ptr() as usize % 64 == 0);
            assert!(lines.iter().all(|byte| *byte == POISON));
        }
    }

    #[test]
    fn poison_is_poison_of_every_type() {
        assert_eq!(typed::<u64>(&Lines::new(8).unwrap()), [u64::poison()]);
        assert_eq!(typed::<half::f16>(&Lines::new(2).unwrap())[0].to_bits(), half::f16::poison().to_bits());
    }

    #[test]
    fn what_changes_beside_an_output_is_counted() {
        let inputs = Inputs::new(3, 1, 2, ReduceOp::Sum);
        let elements = elements(DType::I32).unwrap();
        let mut memory = Lines::new(10 * 4).unwrap();
        elements.fill(&inputs, 1, &mut memory[2 * 4..6 * 4]);
        let count = |memory: &[u8]| elements.count_changed_beside(&inputs, 1, memory, 2..6, 4..7);
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
