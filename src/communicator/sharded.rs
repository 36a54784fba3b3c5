//! RMSNorm of rows whose elements are divided among the ranks: columns as typed values, and the host's calls.

use std::ops::Range;

use super::slices::Slices;
use super::Communicator;
use crate::call::{same_length, Call, Collective, RawShardedRows};
use crate::catalogue::DType;
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

/// Columns of a rank's rows that [`sharded_rms_norm`](Communicator#method.sharded_rms_norm) normalises together with
/// the columns of the other ranks.
///
/// `epsilon` is 1e-6 unless it is set.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// // A token's queries, keys and values: each rank has 4, 2 and 2 elements.
/// let mut qkv = [2.0_f32, 2.0, 2.0, 2.0, 3.0, -3.0, 7.0, 7.0];
/// let queries = ShardedColumns::on_host(0..4, 8).weight(&[1.0, 1.0, 1.0, 0.5]).epsilon(0.0);
/// let keys = ShardedColumns::on_host(4..6, 4).epsilon(0.0);
/// communicator.sharded_rms_norm_in_place(&mut qkv, 8, &[queries, keys])?;
/// assert_eq!(qkv, [1.0, 1.0, 1.0, 0.5, 1.0, -1.0, 7.0, 7.0]);
/// # Ok(()) });
/// ```
#[must_use]
pub struct ShardedColumns<'a, D: Slices, T: 'a> {
    columns: Range<usize>,
    total: usize,
    pub(super) weight: Option<D::Read<'a, T>>,
    epsilon: f32,
    unit_offset: bool,
}

impl<T: Element> ShardedColumns<'_, Host, T> {
    /// Selects `columns` of this rank's rows, of `total` elements on all ranks.
    ///
    /// Ranks may have different numbers of columns. If several ranks have a copy of the same elements, these count
    /// several times in `total`.
    pub fn on_host(columns: Range<usize>, total: usize) -> Self {
        Self::new(columns, total)
    }
}

impl<'a, D: Slices, T: Element> ShardedColumns<'a, D, T> {
    pub(super) fn new(columns: Range<usize>, total: usize) -> Self {
        Self { columns, total, weight: None, epsilon: 1e-6, unit_offset: false }
    }

    /// Multiplies element i of the columns by `weight[i]`.
    pub fn weight(self, weight: D::Read<'a, T>) -> Self {
        Self { weight: Some(weight), ..self }
    }

    /// Sets what is added to the mean of the squares.
    pub fn epsilon(self, epsilon: f32) -> Self {
        Self { epsilon, ..self }
    }

    /// Adds 1 to each weight, as Gemma does.
    pub fn unit_offset(self) -> Self {
        Self { unit_offset: true, ..self }
    }

    /// Returns the columns by address: of rows of `width` elements, from one buffer to another.
    pub(super) fn at(&self, [input, output, weight]: [u64; 3], width: usize) -> RawShardedRows {
        let skipped = (self.columns.start * T::DTYPE.size()) as u64;
        RawShardedRows {
            input: input + skipped,
            output: output + skipped,
            input_stride: width,
            output_stride: width,
            columns: self.columns.len(),
            total: self.total,
            weight,
            epsilon: self.epsilon,
            unit_offset: self.unit_offset,
        }
    }

    /// Refuses parts that `length` elements in rows of `width` do not have. Returns the number of rows.
    pub(super) fn check_parts(parts: &[Self], length: usize, width: usize) -> Result<usize> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if width == 0 || length % width != 0 {
            return refuse("width", format!("{width} in {length} elements"), "whole rows");
        }
        if !(1..=2).contains(&parts.len()) {
            return refuse("parts", parts.len().to_string(), "one or two parts of a row");
        }
        for Self { columns, weight, .. } in parts {
            if columns.start > columns.end || columns.end > width {
                return refuse("columns", format!("{columns:?} of {width}"), "columns of a row");
            }
            if let Some(len) = weight.map(D::len).filter(|&len| len != columns.len()) {
                let value = format!("{len} elements for {} columns", columns.len());
                return refuse("weight", value, "one for each column");
            }
        }
        Ok(length / width)
    }
}

/// Parts of a call by address; only the first `parts.len()` are used.
pub(super) fn raw_parts<D: Slices, T: Element>(
    parts: &[ShardedColumns<'_, D, T>],
    [input, output]: [u64; 2],
    weights: [u64; 2],
    width: usize,
) -> [RawShardedRows; 2] {
    std::array::from_fn(|number| match parts.get(number) {
        Some(part) => part.at([input, output, weights[number]], width),
        None => RawShardedRows::in_place(0, 0),
    })
}

impl Communicator<Host> {
    /// Normalises rows whose elements are divided among the ranks: RMSNorm over the whole rows.
    ///
    /// `input` and `output` have rows of `width` elements. A call normalises one or two parts of each row, for example
    /// a rank's queries and keys, and leaves other columns of the output as they are. The ranks exchange the sums of
    /// the squares of their columns: a few bytes for each row. All ranks have the same number of rows. `docs/fused.md`
    /// has the formula and the order of additions.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// // Two rows of 4 elements, 2 on each rank.
    /// let (input, mut output) = ([3.0_f32, 3.0, -5.0, 5.0], [0.0; 4]);
    /// let columns = ShardedColumns::on_host(0..2, 4).epsilon(0.0);
    /// communicator.sharded_rms_norm(&input, &mut output, 2, &[columns])?;
    /// assert_eq!(output, [1.0, 1.0, -1.0, 1.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// * [`Error::LengthMismatch`], if input and output differ in length.
    /// * [`Error::InvalidSetting`] for a type other than f16, bf16 and f32; elements that are not whole rows; no part
    ///   or more than two; columns beyond the row, or more than 65,536; a total below the rank's own columns or above
    ///   1,048,576; an epsilon that is negative, infinite or NaN; and weights that are not one for each column.
    /// * [`Error::InvalidPointer`] for parts that share columns.
    /// * [`Error::Disagreement`] also where ranks differ in rows, parts, totals, epsilon or offset.
    /// * [Errors of every call](Communicator#errors-of-every-call).
    pub fn sharded_rms_norm<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        width: usize,
        parts: &[ShardedColumns<'_, Host, T>],
    ) -> Result<()> {
        same_length(input.len(), output.len())?;
        let rows = ShardedColumns::check_parts(parts, output.len(), width)?;
        // SAFETY: the slices have that many rows, and are borrowed for the length of the call.
        unsafe { self.sharded([input.as_ptr() as u64, output.as_mut_ptr() as u64], rows, width, parts) }
    }

    /// Normalises as [`Communicator::sharded_rms_norm`] does, in place. [`ShardedColumns`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::sharded_rms_norm`], except [`Error::LengthMismatch`].
    pub fn sharded_rms_norm_in_place<T: Element>(
        &self,
        data: &mut [T],
        width: usize,
        parts: &[ShardedColumns<'_, Host, T>],
    ) -> Result<()> {
        let rows = ShardedColumns::check_parts(parts, data.len(), width)?;
        // SAFETY: as in `sharded_rms_norm`; the output may be the input.
        unsafe { self.sharded([data.as_mut_ptr() as u64; 2], rows, width, parts) }
    }

    /// Carries out a call from one address to another.
    ///
    /// # Safety
    ///
    /// During the call, the memory at the first address is valid for reads, and at the second for writes, of `rows`
    /// rows of `width` elements. [`ShardedColumns::check_parts`] has passed.
    unsafe fn sharded<T: Element>(
        &self,
        memory: [u64; 2],
        rows: usize,
        width: usize,
        parts: &[ShardedColumns<'_, Host, T>],
    ) -> Result<()> {
        let weight = |number: usize| {
            let weight = parts.get(number).and_then(|part| part.weight);
            weight.map_or(0, |weight| weight.as_ptr() as u64)
        };
        let raw = raw_parts(parts, memory, [weight(0), weight(1)], width);
        let collective = Collective::ShardedRmsNorm(&raw[..parts.len()]);
        let call = Call { collective, input: 0, output: 0, count: rows, dtype: T::DTYPE };
        call.check(self.rank(), self.world_size())?;
        // SAFETY: the caller's obligation; weights are borrowed, one for each column.
        unsafe { self.run(call) }
    }

    /// Normalises as [`Communicator::sharded_rms_norm`] does, with memory by address.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// // Queries and keys in separate memory.
    /// let (mut queries, mut keys) = ([4.0_f32; 3 * 8], [2.0_f32; 3 * 4]);
    /// let rows = |memory: &mut [f32], columns| {
    ///     let in_place = RawShardedRows::in_place(memory.as_mut_ptr() as u64, columns);
    ///     RawShardedRows { columns, total: 2 * columns, epsilon: 0.0, ..in_place }
    /// };
    /// let parts = [rows(&mut queries, 8), rows(&mut keys, 4)];
    /// // SAFETY: the arrays have 3 rows, and only this thread has them.
    /// unsafe { communicator.sharded_rms_norm_raw(&parts, 3, DType::F32)? };
    /// assert_eq!((queries, keys), ([1.0; 24], [1.0; 12]));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::sharded_rms_norm`]; [`Error::InvalidPointer`] for null and misaligned addresses, and
    /// for memory that overlaps where [`RawShardedRows`] does not permit it.
    ///
    /// # Safety
    ///
    /// During the call, the memory whose addresses are in `parts` is valid for the reads and writes that
    /// [`RawShardedRows`] describes, of `rows` rows. No other thread writes what is read or accesses what is written.
    pub unsafe fn sharded_rms_norm_raw(
        &self,
        parts: &[RawShardedRows],
        rows: usize,
        dtype: DType,
    ) -> Result<()> {
        let (input, output) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: the caller's obligation.
        unsafe { self.collective_raw(Collective::ShardedRmsNorm(parts), input, output, rows, dtype) }
    }
}
