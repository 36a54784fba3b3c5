//! RMSNorm of rows whose elements are divided among the ranks, by address.

use std::hash::Hasher;

use fnv::FnvHasher;
use serde::{Deserialize, Serialize};

use super::fused::is_epsilon;
use super::operand::Operand;
use crate::abi::{FaShardedNorm, FaShardedRows, FA_MAX_RANKS, FA_MAX_ROW, FA_SHARDED_PARTS};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// A part of the rows of [`Collective::ShardedRmsNorm`](super::Collective::ShardedRmsNorm), by address: the columns
/// that this rank has of the rows of one norm.
///
/// `docs/fused.md` defines the arithmetic, to the bit. A call has one part, or two that are normalised independently,
/// such as queries and keys. All memory that is written is disjoint from all other memory of the call, except that a
/// part's output may be its input if their strides are equal. Parts may be columns of the same rows: then they have
/// equal strides. A rank that [records](crate::Communicator::record) also reads what is between the rows: it is then
/// valid for reads, and nothing else writes it during the call.
///
/// ```
/// use fast_allreduce::RawShardedRows;
///
/// // 3 rows of 8 queries and 4 keys. Each of two ranks has as many.
/// let mut rows = [0.5_f32; 3 * 12];
/// let queries = RawShardedRows { columns: 8, total: 16, ..RawShardedRows::in_place(rows.as_mut_ptr() as u64, 12) };
/// let keys = RawShardedRows { columns: 4, total: 8, ..RawShardedRows::in_place(queries.input + 8 * 4, 12) };
/// assert_eq!((keys.output, keys.output_stride), (keys.input, 12));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RawShardedRows {
    /// Address of this rank's elements of the first row.
    pub input: u64,
    /// Address of the output for them; it may be equal to the input.
    pub output: u64,
    /// Number of elements from a row of the input to the next.
    pub input_stride: usize,
    /// Number of elements from a row of the output to the next.
    pub output_stride: usize,
    /// Number of elements of a row that this rank has: 0 to 65,536. It may differ among ranks.
    pub columns: usize,
    /// Number of elements of a row on all ranks: what the mean of the squares is over. If several ranks have a copy of
    /// the same elements, these count several times.
    pub total: usize,
    /// Address of the weights of this rank's columns; 0 for weights of 1.
    pub weight: u64,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Whether 1 is added to each weight.
    pub unit_offset: bool,
}

// The only float is `epsilon`, and calls with a NaN are refused.
impl Eq for RawShardedRows {}

impl RawShardedRows {
    /// Returns rows at an address that are normalised in place, without columns or weights. `stride` is the number of
    /// elements from a row to the next.
    pub const fn in_place(address: u64, stride: usize) -> Self {
        Self {
            input: address,
            output: address,
            input_stride: stride,
            output_stride: stride,
            columns: 0,
            total: 0,
            weight: 0,
            epsilon: 1e-6,
            unit_offset: false,
        }
    }
}

/// Most elements of a row on all ranks.
const MOST_TOTAL: usize = FA_MAX_ROW as usize * FA_MAX_RANKS as usize;
/// Bits of a total in a digest.
const TOTAL: u32 = 21;
const _: () = assert!(MOST_TOTAL < 1 << TOTAL && FA_SHARDED_PARTS == 2);

/// Encodes in one word the facts that ranks must agree on: totals, which errors can decode, and a hash of the others.
pub(crate) fn digest(parts: &[RawShardedRows]) -> u64 {
    let mut hasher = FnvHasher::default();
    let mut totals = 0;
    for (number, part) in parts.iter().enumerate() {
        hasher.write(&part.epsilon.to_le_bytes());
        hasher.write(&[u8::from(part.unit_offset)]);
        totals |= (part.total as u64) << (TOTAL * number as u32);
    }
    // FNV mixes a byte into the upper bits only with the bytes after it.
    hasher.write(&[0; 8]);
    hasher.finish() >> (2 * TOTAL) << (2 * TOTAL) | totals
}

/// Describes a digest.
pub(crate) fn describe(digest: u64) -> String {
    let total = |number: u32| digest >> (TOTAL * number) & ((1 << TOTAL) - 1);
    let second = if total(1) == 0 { String::new() } else { format!(" and {}", total(1)) };
    format!("rows of {}{second}, epsilon and offset with the digest {:06x}", total(0), digest >> (2 * TOTAL))
}

/// Checks the values.
pub(crate) fn check_arguments(parts: &[RawShardedRows], dtype: DType) -> Result<()> {
    let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
    if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
        return refuse("element type", dtype.to_string(), "f16, bf16 or f32 where rows are normalised");
    }
    if !(1..=FA_SHARDED_PARTS as usize).contains(&parts.len()) {
        return refuse("parts", parts.len().to_string(), "one or two parts of a row");
    }
    for &RawShardedRows { columns, total, input_stride, output_stride, epsilon, .. } in parts {
        if columns > FA_MAX_ROW as usize {
            return refuse("columns", columns.to_string(), "at most 65536 elements of a row on each rank");
        }
        if !(columns.max(1)..=MOST_TOTAL).contains(&total) {
            let expected = "the elements of a row on all ranks, at most 1048576";
            return refuse("total", format!("{total}, where this rank has {columns}"), expected);
        }
        if input_stride.min(output_stride) < columns {
            let value = format!("{} for {columns} columns", input_stride.min(output_stride));
            return refuse("row stride", value, "at least the columns");
        }
        if !is_epsilon(epsilon) {
            return refuse("epsilon", epsilon.to_string(), "a number of at least 0");
        }
    }
    Ok(())
}

/// Returns the operands of a launch for `rows` rows from row `done` on.
pub(crate) fn piece(parts: &[RawShardedRows], dtype: DType, done: usize, rows: usize) -> FaShardedNorm {
    let none = FaShardedRows {
        from: 0,
        to: 0,
        weight: 0,
        from_stride: 0,
        to_stride: 0,
        row: 0,
        total: 0,
        epsilon: 0.0,
        unit_offset: 0,
    };
    let of = |part: &RawShardedRows| {
        let [from_stride, to_stride] =
            [part.input_stride, part.output_stride].map(|stride| (stride * dtype.size()) as u64);
        FaShardedRows {
            from: part.input + done as u64 * from_stride,
            to: part.output + done as u64 * to_stride,
            weight: part.weight,
            from_stride,
            to_stride,
            row: part.columns as u32,
            total: part.total as u32,
            epsilon: part.epsilon,
            unit_offset: u32::from(part.unit_offset),
        }
    };
    let part = std::array::from_fn(|number| parts.get(number).map_or(none, of));
    FaShardedNorm { part, parts: parts.len() as u32, rows: rows as u32 }
}

/// Memory of a part, or its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardedOperand {
    pub name: &'static str,
    /// From the first element to the last.
    pub operand: Operand,
    row_bytes: u64,
    /// Bytes from a row to the next; 0 for weights.
    stride: u64,
    part: usize,
    pub is_written: bool,
}

impl ShardedOperand {
    /// Returns whether both have bytes in common. Rows of equal strides may interleave; others must not.
    fn overlaps(&self, other: &Self) -> bool {
        if !self.operand.overlaps(&other.operand) {
            return false;
        }
        if self.stride == 0 || self.stride != other.stride {
            return true;
        }
        let (first, next) = match self.operand.address <= other.operand.address {
            true => (self, other),
            false => (other, self),
        };
        let apart = (next.operand.address - first.operand.address) % self.stride;
        apart < first.row_bytes || apart + next.row_bytes > self.stride
    }

    /// Returns whether one is the input, and the other the output, of a part that is normalised in place.
    fn is_in_place(&self, other: &Self) -> bool {
        let place = |one: &Self| (one.part, one.operand.address, one.stride);
        self.is_written != other.is_written && self.stride != 0 && place(self) == place(other)
    }
}

/// Returns the memory that the call reads or writes.
pub(crate) fn operands(parts: &[RawShardedRows], rows: usize, dtype: DType) -> Result<[ShardedOperand; 6]> {
    let of = |name, number: usize, which: usize| {
        let part = parts.get(number).copied().unwrap_or(RawShardedRows::in_place(0, 0));
        let (address, stride, rows) = match which {
            0 => (part.input, part.input_stride, rows),
            1 => (part.output, part.output_stride, rows),
            _ => (part.weight, 0, usize::from(part.weight != 0 && rows != 0)),
        };
        let elements = match (part.columns, rows) {
            (0, _) | (_, 0) => 0,
            (columns, rows) => (rows - 1).saturating_mul(stride).saturating_add(columns),
        };
        let bytes = |elements: usize| (elements as u64).saturating_mul(dtype.size() as u64);
        Ok(ShardedOperand {
            name,
            operand: Operand::new(name, address, elements, dtype)?,
            row_bytes: bytes(part.columns),
            // A single row has no next one.
            stride: if rows == 1 && which < 2 { u64::MAX } else { bytes(stride) },
            part: number,
            is_written: which == 1,
        })
    };
    Ok([
        of("input", 0, 0)?,
        of("output", 0, 1)?,
        of("weight", 0, 2)?,
        of("second input", 1, 0)?,
        of("second output", 1, 1)?,
        of("second weight", 1, 2)?,
    ])
}

/// Refuses memory that is written and has another use in the call, except a part's input as its output.
pub(crate) fn check_buffers(parts: &[RawShardedRows], rows: usize, dtype: DType) -> Result<()> {
    let all = operands(parts, rows, dtype)?;
    for (number, one) in all.iter().enumerate() {
        for other in &all[..number] {
            let clashes = one.is_written || other.is_written;
            if clashes && !one.is_in_place(other) && one.overlaps(other) {
                return Err(Error::InvalidPointer {
                    which: one.name,
                    address: one.operand.address as usize,
                    problem: "in memory that has another use in the call",
                    element_size: dtype.size(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_a_single_row_do_not_matter() {
        let part = |output, output_stride| RawShardedRows {
            output,
            output_stride,
            columns: 4,
            total: 4,
            ..RawShardedRows::in_place(4096, 8)
        };
        let check = |part, rows| check_buffers(&[part], rows, DType::F32).is_ok();
        assert!(check(part(4096, 8), 2) && check(part(4096, 5), 1) && !check(part(4096, 5), 2));
        assert!(!check(part(4100, 8), 1) && check(part(4112, 5), 1));
    }

    #[test]
    fn digests_differ_and_are_described() {
        let part = |total, epsilon, unit_offset| RawShardedRows {
            total,
            epsilon,
            unit_offset,
            ..RawShardedRows::in_place(0, 0)
        };
        let mut seen = std::collections::HashSet::new();
        for total in [1, 2, 1024, 6144, MOST_TOTAL] {
            for epsilon in [0.0, 1e-6, 1e-5, 1e-8, 0.5] {
                for unit_offset in [false, true] {
                    let one = part(total, epsilon, unit_offset);
                    assert!(seen.insert(digest(&[one])));
                    for other in [part(1024, 1e-6, false), part(1024, 1e-5, true), part(1, 1e-6, false)] {
                        assert!(seen.insert(digest(&[one, other])), "{one:?} {other:?}");
                    }
                }
            }
        }
        let text = describe(digest(&[part(6144, 1e-6, false), part(1024, 1e-6, false)]));
        assert!(text.starts_with("rows of 6144 and 1024, epsilon"), "{text}");
        assert!(describe(digest(&[part(MOST_TOTAL, 0.0, false)])).starts_with("rows of 1048576, epsilon"));
    }
}
