//! What an allreduce may do with its sum, by address: a residual is added, and rows are normalised and quantised.

use super::operand::Operand;
use crate::abi::{FaFused, FaRowTurns, FA_MAX_ROW};
use crate::catalogue::{Algorithm, DType, Norm, Scaling};
use crate::error::{Error, Result};

/// What [`Collective::AllReduceFused`](super::Collective::AllReduceFused) does with a sum, by address. `docs/fused.md` has the
/// arithmetic, to the bit. The residual must hold the same on every rank, unless the plain sum is asked for. All memory is disjoint,
/// except that the residual's sum may be where the residual is, and rows where the input is.
///
/// ```
/// use fast_allreduce::{Norm, RawFused};
///
/// let mut residual = [0.0_f32; 8];
/// let residual = residual.as_mut_ptr() as u64;
/// // Adds the sum of the inputs to the residual, and does no more.
/// let fused = RawFused { residual, residual_out: residual, ..RawFused::default() };
/// assert_eq!(fused.norm, Norm::None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RawFused {
    /// Address of as many elements as the message has, which are added.
    pub residual: u64,
    /// Where the sum with the residual goes.
    pub residual_out: u64,
    /// Where the sum of the ranks' inputs alone goes, as [`Collective::AllReduce`](super::Collective::AllReduce) has it; 0: nowhere.
    pub sum: u64,
    /// What follows; [`Norm::None`]: the call ends with the residual.
    pub norm: Norm,
    /// Elements of a row.
    pub hidden: usize,
    /// Address of an element for each of a row, or 0: weights of 1.
    pub weight: u64,
    /// Address of an element for each of a row, or 0: nothing is added.
    pub bias: u64,
    /// Where normalised rows go, in the type of the call; 0: nowhere.
    pub rows: u64,
    /// What normalised rows are quantised to.
    pub quantized: Option<RawQuantizedRows>,
}

// Of the numbers in it, a NaN is refused.
impl Eq for RawFused {}

/// How rows are quantised, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawQuantizedRows {
    /// The format.
    pub scaling: Scaling,
    /// The type of the numbers: `I8`, `F8E4M3` or `F8E5M2`; `U8` of two numbers with 4 bits.
    pub dtype: DType,
    /// Where the numbers go.
    pub numbers: u64,
    /// Address of as many scales as [`Scaling::scales`] tells: read if they are given, else written.
    pub scales: u64,
    /// Address of the global scale, an `f32`, where the format has one.
    pub global: u64,
}

/// Fields of a digest: the first bit of each.
const WEIGHT: u32 = 17;
const BIAS: u32 = 18;
const UNIT_OFFSET: u32 = 19;
const SUM: u32 = 20;
const ROWS: u32 = 21;
const NORM: u32 = 22;
const SCALING: u32 = 25;
const NUMBERS: u32 = 28;
const EPSILON: u32 = 32;
// A row has at most 2^16 elements, codes of norms and formats have three bits, and 1 above the code of a type four.
const _: () = assert!(FA_MAX_ROW < 1 << WEIGHT && Scaling::ALL.len() < 8 && DType::ALL.len() < 16);

const fn field(digest: u64, first: u32, end: u32) -> u64 {
    digest >> first & ((1 << (end - first)) - 1)
}

impl RawFused {
    /// Elements of a row; `None` where it does not matter.
    pub(crate) fn row(&self) -> Option<usize> {
        (self.norm != Norm::None).then_some(self.hidden)
    }

    /// Whether the norm has no kernels of its own, as RMSNorm has.
    pub(crate) fn has_other_norm(&self) -> bool {
        !matches!(self.norm, Norm::None | Norm::Rms { .. })
    }

    /// The kernel that sums by an algorithm and goes on with that, where there is one.
    pub(crate) fn kernel(&self, algorithm: Algorithm) -> Option<u32> {
        match self.has_other_norm() {
            true => algorithm.other_norm_kernel(),
            false => algorithm.norm_kernel(),
        }
    }

    /// Where a launch stores its sums: the plain ones if they are asked for, else those with the residual.
    pub(crate) const fn output(&self) -> u64 {
        if self.sum == 0 {
            self.residual_out
        } else {
            self.sum
        }
    }

    /// The numbers that ranks have to agree on, in a word: it is no hash, so that errors can tell them.
    pub(crate) fn digest(&self) -> u64 {
        let sum = u64::from(self.sum != 0) << SUM;
        if self.norm == Norm::None {
            return sum;
        }
        let quantized = self.quantized.map_or(0, |rows| {
            u64::from(rows.scaling as u32) << SCALING | u64::from(rows.dtype as u32 + 1) << NUMBERS
        });
        let bit = |is_set: bool, first: u32| u64::from(is_set) << first;
        self.hidden as u64
            | bit(self.weight != 0, WEIGHT)
            | bit(self.bias != 0, BIAS)
            | bit(self.norm.unit_offset(), UNIT_OFFSET)
            | bit(self.rows != 0, ROWS)
            | u64::from(self.norm.code()) << NORM
            | u64::from(self.norm.epsilon().to_bits()) << EPSILON
            | quantized
            | sum
    }

    /// What a digest tells, in words.
    pub(crate) fn describe(digest: u64) -> String {
        let has = |first: u32| field(digest, first, first + 1) != 0;
        let sum = if has(SUM) { ", and the plain sum" } else { "" };
        let norm = Norm::of_code(field(digest, NORM, SCALING) as u32, 0.0, false).unwrap_or_default();
        if norm == Norm::None {
            return format!("no norm{sum}");
        }
        let weight = match (has(WEIGHT), has(UNIT_OFFSET)) {
            (false, _) => "no weight",
            (_, false) => "a weight",
            _ => "1 + weight",
        };
        let bias = if has(BIAS) { ", a bias" } else { "" };
        let (hidden, epsilon) = (field(digest, 0, WEIGHT), f32::from_bits((digest >> EPSILON) as u32));
        let find = |code: u64| Scaling::ALL.into_iter().find(|&scaling| scaling as u64 == code);
        let dtype = field(digest, NUMBERS, EPSILON).checked_sub(1);
        let dtype = dtype.and_then(|code| DType::ALL.into_iter().find(|&dtype| dtype as u64 == code));
        let quantized = match (find(field(digest, SCALING, NUMBERS)), dtype) {
            (Some(scaling), Some(dtype)) => {
                let also = if has(ROWS) { " and in the type" } else { "" };
                format!(", to {dtype} with {scaling} scales{also}")
            }
            _ => String::new(),
        };
        format!("{} norm, rows of {hidden}, epsilon {epsilon:?}, {weight}{bias}{quantized}{sum}", norm.name())
    }

    /// The operands of a launch for `count` elements from `done` on. Rows are whole blocks'.
    pub(crate) fn piece(&self, dtype: DType, done: usize, count: usize) -> FaFused {
        let &Self { residual, residual_out, sum, norm, weight, bias, rows, quantized, .. } = self;
        let shift = (done * dtype.size()) as u64;
        let at = |address: u64, bytes: u64| if address == 0 { 0 } else { address + bytes };
        let row = self.row().unwrap_or(1);
        FaFused {
            residual: residual + shift,
            residual_out: if sum == 0 { 0 } else { residual_out + shift },
            normed: at(rows, shift),
            numbers: quantized.map_or(0, |rows| rows.numbers + rows.scaling.number_bytes(done) as u64),
            weight,
            bias,
            scales: quantized.map_or(0, |rows| rows.scales),
            global_scale: quantized.map_or(0, |rows| rows.global),
            first_row: (done / row) as u64,
            row: row as u32,
            rows: self.row().map_or(0, |row| count / row) as u32,
            norm: norm.code(),
            unit_offset: u32::from(norm.unit_offset()),
            epsilon: norm.epsilon(),
            scaling: quantized.map_or(0, |rows| rows.scaling as u32),
            dtype: quantized.map_or(dtype, |rows| rows.dtype) as u32,
            team: 0,
            team_inverse: 0,
            block_packs: 0,
            chunks: 0,
            number_bits: quantized.map_or(0, |rows| rows.scaling.bits() as u32),
            turns: FaRowTurns { slice_rows: 0, divisor: 0, inverse: 0, by_slice: 0 },
        }
    }

    /// Refuses numbers that mean nothing, and messages that are not whole rows.
    pub(crate) fn check_arguments(&self, count: usize, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
            return refuse("element type", dtype.to_string(), "f16, bf16 or f32 where a residual is added");
        }
        let &Self { norm, hidden, weight, bias, rows, quantized, .. } = self;
        let has_rows = rows != 0 || quantized.is_some();
        if norm == Norm::None {
            return match has_rows || weight != 0 || bias != 0 {
                true => refuse(
                    "norm",
                    norm.name().to_owned(),
                    "a norm, where there are a weight, a bias or a place for rows",
                ),
                false => Ok(()),
            };
        }
        if !(1..=FA_MAX_ROW as usize).contains(&hidden) {
            return refuse("hidden", hidden.to_string(), "1 to 65536 elements of a row");
        }
        if count % hidden != 0 {
            return refuse("hidden", format!("{hidden} in a message of {count}"), "whole rows");
        }
        if !(norm.epsilon() >= 0.0 && norm.epsilon().is_finite()) {
            return refuse("epsilon", norm.epsilon().to_string(), "a number of at least 0");
        }
        if bias != 0 && !norm.takes_bias() {
            return refuse("bias", format!("one of the {} norm", norm.name()), "a norm that takes one");
        }
        if !has_rows && count != 0 {
            return refuse("rows", "nowhere".to_owned(), "a place for normalised rows");
        }
        let Some(RawQuantizedRows { scaling, dtype, .. }) = quantized else { return Ok(()) };
        if !scaling.takes(dtype) {
            let expected = "i8, f8e4m3 or f8e5m2, or u8 of two 4-bit numbers";
            return refuse("quantized type", format!("{dtype} with {scaling} scales"), expected);
        }
        match hidden % scaling.multiple() {
            0 => Ok(()),
            _ => refuse("hidden", hidden.to_string(), "a multiple of 16 where rows become nvfp4"),
        }
    }

    /// The memory that the call reads or writes besides the input.
    pub(crate) fn operands(&self, count: usize, dtype: DType) -> Result<[Use; 9]> {
        let &Self { residual, residual_out, sum, norm, hidden, weight, bias, rows, quantized } = self;
        let of = |name, address, count, dtype, is_written| {
            Ok(Use { name, operand: Operand::new(name, address, count, dtype)?, is_written })
        };
        // Of memory that there may be.
        let maybe = |name, address, elements, is_written| {
            let there = address != 0 && count != 0 && (norm != Norm::None || name == "sum");
            of(name, address, if there { elements } else { 0 }, dtype, is_written)
        };
        let unless = |there, elements| if there && count != 0 { elements } else { 0 };
        let (scaling, numbers) = (quantized.map(|rows| rows.scaling), quantized.map(|rows| rows.numbers));
        let bytes = scaling.map_or(0, |scaling| scaling.number_bytes(count));
        let scales = scaling.map_or(0, |scaling| scaling.scales(count / hidden.max(1), hidden));
        let scale_type = scaling.map_or(DType::F32, Scaling::scale_type);
        let is_given = scaling.is_some_and(Scaling::is_given);
        let has_global = scaling.is_some_and(Scaling::has_global);
        let [at, global] = quantized.map_or([0; 2], |rows| [rows.scales, rows.global]);
        Ok([
            of("residual", residual, count, dtype, false)?,
            of("residual_out", residual_out, count, dtype, true)?,
            maybe("rows", rows, count, true)?,
            of("numbers", numbers.unwrap_or(0), bytes, DType::U8, true)?,
            of("scales", at, unless(scaling.is_some(), scales), scale_type, !is_given)?,
            maybe("sum", sum, count, true)?,
            maybe("weight", weight, hidden, false)?,
            maybe("bias", bias, hidden, false)?,
            of("global scale", global, unless(has_global, 1), DType::F32, false)?,
        ])
    }

    /// Refuses memory that is written where it is also used otherwise, except in the places that the call permits.
    pub(crate) fn check_buffers(&self, input: &Operand, count: usize, dtype: DType) -> Result<()> {
        let operands = self.operands(count, dtype)?;
        let input = Use { name: "input", operand: *input, is_written: false };
        for (number, one) in operands.iter().enumerate() {
            for other in operands[..number].iter().chain([&input]) {
                let may_be_one = match (other.name, one.name) {
                    ("residual", "residual_out") | ("input", "rows") => true,
                    ("input", "residual_out") => self.sum == 0,
                    _ => false,
                };
                let is_one = may_be_one && one.operand.address == other.operand.address;
                let clashes = one.is_written || other.is_written || one.name == "residual";
                if clashes && !is_one && one.operand.overlaps(&other.operand) {
                    return Err(Error::InvalidPointer {
                        which: one.name,
                        address: one.operand.address as usize,
                        problem: "in memory that the call uses otherwise",
                        element_size: dtype.size(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Memory of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    pub name: &'static str,
    pub operand: Operand,
    is_written: bool,
}
