//! All-gathers of quantised rows, by address.

use serde::{Deserialize, Serialize};

use super::fused::check_format;
use super::operand::Operand;
use crate::abi::{FaGatheredRows, FA_MAX_ROW, FA_SCALES_ALIGNMENT};
use crate::catalogue::{DType, Scaling};
use crate::error::{Error, Result};

/// Rows of [`Collective::AllGatherRows`](super::Collective::AllGatherRows), with the addresses of their scales. The
/// numbers are the input and the output of the call, whose type is theirs: a byte holds a number of 8 bits, or two of 4
/// bits.
///
/// All memory is disjoint, except that the input may be the rank's own share of the output.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// // Two rows of rank 0, none of rank 1.
/// let own = [2, 0][communicator.rank()];
/// let (numbers, scales) = (vec![5_i8; own * 3], vec![0.5_f32; own]);
/// let (mut all, mut all_scales) = ([0_i8; 6], [0.0_f32; 2]);
/// let rows = RawGatheredRows {
///     scaling: Scaling::PerRow,
///     hidden: 3,
///     scales: scales.as_ptr() as u64,
///     all_scales: all_scales.as_mut_ptr() as u64,
/// };
/// let (of, to) = (Collective::AllGatherRowsV(&rows, &[6, 0]), all.as_mut_ptr().cast());
/// // SAFETY: the arrays have the elements of the call, and only this thread has them.
/// unsafe { communicator.collective_raw(of, numbers.as_ptr().cast(), to, 0, DType::I8)? };
/// assert_eq!((all, all_scales), ([5; 6], [0.5; 2]));
/// # Ok(()) });
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawGatheredRows {
    /// Format. A scale that is given has nothing to gather: such rows are refused.
    pub scaling: Scaling,
    /// Number of elements of a row.
    pub hidden: usize,
    /// Address of the scales of this rank's rows, placed as in a message that has only these rows.
    pub scales: u64,
    /// Address of the output for the scales of all rows. Padding of tiles is not written.
    pub all_scales: u64,
}

/// First bit of the format in a digest. The lower bits are the length of a row.
const SCALING: u32 = 32;

impl RawGatheredRows {
    /// Returns the size of a row's numbers in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.scaling.number_bytes(self.hidden)
    }

    /// Returns the number of words of four bytes that a row's scales take in staging.
    fn words(&self) -> usize {
        (self.scaling.groups(self.hidden) * self.scaling.scale_type().size()).div_ceil(4)
    }

    /// Returns the bytes of staging that a row takes.
    pub(crate) fn staged_row(&self) -> usize {
        self.row_bytes() + 4 * self.words()
    }

    /// Returns the bytes of staging that rows with this number of bytes of numbers take.
    pub(crate) fn staged(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(FA_SCALES_ALIGNMENT as usize) + bytes / self.row_bytes() * 4 * self.words()
    }

    /// Encodes in one word the facts that ranks must agree on, besides the type of the numbers.
    pub(crate) fn digest(&self) -> u64 {
        self.hidden as u64 | u64::from(self.scaling as u32) << SCALING
    }

    /// Describes a digest.
    pub(crate) fn describe(digest: u64) -> String {
        let scaling = Scaling::ALL.into_iter().find(|&scaling| scaling as u64 == digest >> SCALING);
        let scaling = scaling.map_or("unknown", Scaling::name);
        format!("rows of {} with {scaling} scales", digest & ((1 << SCALING) - 1))
    }

    /// Returns the operands of a launch that begins at byte `done` of the own numbers. There are `own` bytes of own
    /// numbers, and `all` of all ranks.
    pub(crate) fn piece(&self, done: usize, own: usize, all: usize) -> FaGatheredRows {
        let &Self { scaling, hidden, scales, all_scales } = self;
        let row_bytes = self.row_bytes();
        FaGatheredRows {
            from: scaling.at(scales, (own / row_bytes, hidden), done / row_bytes),
            to: scaling.at(all_scales, (all / row_bytes, hidden), 0),
            row_bytes: row_bytes as u32,
            words: self.words() as u32,
        }
    }

    /// Checks the values.
    pub(crate) fn check_arguments(&self, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        let &Self { scaling, hidden, .. } = self;
        if scaling.is_given() {
            let expected = "a format whose scales are written; numbers alone are gathered by all_gather";
            return refuse("scaling", scaling.to_string(), expected);
        }
        if !(1..=FA_MAX_ROW as usize).contains(&hidden) {
            return refuse("hidden", hidden.to_string(), "1 to 65536 elements of a row");
        }
        check_format(scaling, dtype, hidden)
    }

    /// Checks that a share of this number of bytes is whole rows.
    pub(crate) fn check_rows(&self, count: usize) -> Result<()> {
        match count % self.row_bytes() {
            0 => Ok(()),
            _ => Err(Error::InvalidSetting {
                name: "hidden",
                value: format!("{} in a share of {count} numbers", self.hidden),
                expected: "whole rows",
            }),
        }
    }

    /// Returns the scales of the own rows and those of all rows, which have `own` and `all` bytes of numbers.
    pub(crate) fn operands(&self, own: usize, all: usize) -> Result<[(&'static str, Operand); 2]> {
        let of = |name, address, bytes: usize| {
            let count = self.scaling.scales(bytes / self.row_bytes(), self.hidden);
            Ok((name, Operand::new(name, address, count, self.scaling.scale_type())?))
        };
        Ok([of("scales", self.scales, own)?, of("all_scales", self.all_scales, all)?])
    }

    /// Refuses scales that overlap with each other, or with the numbers.
    pub(crate) fn check_buffers(&self, numbers: [Operand; 2], own: usize, all: usize) -> Result<()> {
        let [from, to] = self.operands(own, all)?;
        let [input, output] = numbers;
        let clashes = [(from, output), (to, output), (to, input), (to, from.1)];
        match clashes.iter().find(|((_, one), other)| one.overlaps(other)) {
            None => Ok(()),
            Some(&((which, one), _)) => Err(Error::InvalidPointer {
                which,
                address: one.address as usize,
                problem: "in memory that has another use in the call",
                element_size: self.scaling.scale_type().size(),
            }),
        }
    }
}
