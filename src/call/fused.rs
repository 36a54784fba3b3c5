//! Fused allreduces and reduce-scatters, by address: a residual is added to the sum, and rows are normalised and
//! quantised.

use serde::{Deserialize, Serialize};

use super::experts::{RawExperts, NO_EXPERTS};
use super::operand::Operand;
use crate::abi::{FaFused, FaRowTurns, FaScales, FA_MAX_ROW};
use crate::catalogue::{DType, Norm, Scaling};
use crate::error::{Error, Result};

/// Operations of [`Collective::AllReduceFused`](super::Collective::AllReduceFused) and
/// [`Collective::ReduceScatterFused`](super::Collective::ReduceScatterFused) on the sum, by address.
///
/// `docs/fused.md` defines the arithmetic, to the bit. In an allreduce the residual must be equal on all ranks, unless
/// `sum` is set. In a reduce-scatter, the residual and all results are those of the rank's own share.
///
/// All memory is disjoint, with two exceptions: `residual_out` may be equal to `residual`; and `rows`, or
/// `residual_out` without `sum`, to the input, unless that is experts' rows; in a reduce-scatter, to the rank's own
/// share of the input.
///
/// ```
/// use fast_allreduce::{Norm, RawFused};
///
/// let mut residual = [0.0_f32; 8];
/// let residual = residual.as_mut_ptr() as u64;
/// // Adds the sum of the inputs to the residual. There is no norm.
/// let fused = RawFused { residual, residual_out: residual, ..RawFused::default() };
/// assert_eq!(fused.norm, Norm::None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RawFused {
    /// Address of the residual: as many elements as the message, or the own share, has.
    pub residual: u64,
    /// Address of the output for the sum plus the residual.
    pub residual_out: u64,
    /// Address of the output for the plain sum, as by [`Collective::AllReduce`](super::Collective::AllReduce); 0 for
    /// none. A reduce-scatter has no such output.
    pub sum: u64,
    /// Norm of the rows. With [`Norm::None`] the call ends after the residual is added.
    pub norm: Norm,
    /// Number of elements of a row.
    pub hidden: usize,
    /// Address of the weights, one for each element of a row; 0 for weights of 1.
    pub weight: u64,
    /// Address of the biases, one for each element of a row; 0 for none.
    pub bias: u64,
    /// Address of the output for normalised rows, in the element type of the call; 0 for none.
    pub rows: u64,
    /// Quantisation of the normalised rows.
    pub quantized: Option<RawQuantizedRows>,
    /// Experts from whose rows the input is computed. A reduce-scatter refuses them.
    pub experts: Option<RawExperts>,
}

// The only float is `epsilon`, and calls with a NaN are refused.
impl Eq for RawFused {}

/// Quantisation of normalised rows, by address.
///
/// ```
/// use fast_allreduce::{DType, Norm, RawFused, RawQuantizedRows, Scaling};
///
/// let (rows, hidden) = (2, 64);
/// let mut numbers = vec![0_i8; rows * hidden];
/// let mut scales = vec![0.0_f32; Scaling::PerRow.scales(rows, hidden)];
/// let quantized = RawQuantizedRows {
///     scaling: Scaling::PerRow,
///     dtype: DType::I8,
///     numbers: numbers.as_mut_ptr() as u64,
///     scales: scales.as_mut_ptr() as u64,
///     global: 0,
/// };
/// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
/// let fused = RawFused { norm, hidden, quantized: Some(quantized), ..RawFused::default() };
/// # assert_eq!(scales.len(), 2);
/// # assert!(fused.quantized.is_some());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawQuantizedRows {
    /// Format.
    pub scaling: Scaling,
    /// Type of the numbers: `I8`, `F8E4M3` or `F8E5M2`; `U8` for two numbers of 4 bits in each byte.
    pub dtype: DType,
    /// Address of the output for the numbers.
    pub numbers: u64,
    /// Address of the scales; [`Scaling::scales`] returns how many. A given scale is read, other scales are written.
    pub scales: u64,
    /// Address of the global scale, an `f32` that is read, if the format has one.
    pub global: u64,
}

/// First bits of the fields of a digest.
const WEIGHT: u32 = 17;
const BIAS: u32 = 18;
const UNIT_OFFSET: u32 = 19;
const SUM: u32 = 20;
const ROWS: u32 = 21;
const NORM: u32 = 22;
const SCALING: u32 = 25;
const NUMBERS: u32 = 29;
const END: u32 = 31;
const EPSILON: u32 = 32;
const EXPERTS: u32 = 31;
// A row has at most 2^16 elements. The code of a norm has three bits, that of a format four, the index of a type two.
const _: () = assert!(FA_MAX_ROW < 1 << WEIGHT && Scaling::ALL.len() < 16 && NUMBER_TYPES.len() <= 4);

/// Types of numbers, by their index in a digest.
const NUMBER_TYPES: [DType; 4] = [DType::I8, DType::U8, DType::F8E4M3, DType::F8E5M2];

const fn field(digest: u64, first: u32, end: u32) -> u64 {
    digest >> first & ((1 << (end - first)) - 1)
}

/// Returns whether a number is finite and not negative. By its bits: a comparison may trap in the caller's
/// floating-point state.
pub(crate) fn is_epsilon(number: f32) -> bool {
    let (bits, negative_zero) = (number.to_bits(), 1 << 31);
    bits < f32::INFINITY.to_bits() || bits == negative_zero
}

impl RawFused {
    /// Returns the number of elements of a row; `None` without a norm.
    pub(crate) fn row(&self) -> Option<usize> {
        (self.norm != Norm::None).then_some(self.hidden)
    }

    /// Returns where a launch stores its sums: the plain sums if they are an output, else the sums plus the residual.
    pub(crate) const fn output(&self) -> u64 {
        if self.sum == 0 {
            self.residual_out
        } else {
            self.sum
        }
    }

    /// Encodes in one word the facts that ranks must agree on. It is not a hash, so that errors can decode it.
    pub(crate) fn digest(&self) -> u64 {
        let sum = u64::from(self.sum != 0) << SUM;
        if self.norm == Norm::None {
            return sum;
        }
        let quantized = self.quantized.map_or(0, |rows| {
            // Other types have been refused.
            let dtype = NUMBER_TYPES.iter().position(|&dtype| dtype == rows.dtype).unwrap_or(0);
            u64::from(rows.scaling as u32) << SCALING | (dtype as u64) << NUMBERS
        });
        let bit = |is_set: bool, first: u32| u64::from(is_set) << first;
        self.hidden as u64
            | bit(self.weight != 0, WEIGHT)
            | bit(self.bias != 0, BIAS)
            | bit(self.norm.unit_offset(), UNIT_OFFSET)
            // Without quantised rows there are always rows, even if their address is null as a share has none.
            | bit(self.rows != 0 || self.quantized.is_none(), ROWS)
            | u64::from(self.norm.code()) << NORM
            | u64::from(self.norm.epsilon().to_bits()) << EPSILON
            | bit(self.experts.is_some(), EXPERTS)
            | quantized
            | sum
    }

    /// Refuses experts that do not exist.
    ///
    /// # Safety
    ///
    /// `Call::check` has passed, and the table of experts, if there is one, is valid for reads.
    pub(crate) unsafe fn check_experts(&self, count: usize) -> Result<()> {
        match self.experts {
            // SAFETY: the caller's obligation.
            Some(experts) => unsafe { experts.check_table(count / self.hidden.max(1)) },
            None => Ok(()),
        }
    }

    /// Describes a digest.
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
        let scaling = field(digest, SCALING, NUMBERS);
        let quantized =
            Scaling::ALL.into_iter().find(|&one| one as u64 == scaling).map_or(String::new(), |scaling| {
                let dtype = NUMBER_TYPES[field(digest, NUMBERS, END) as usize];
                let also = if has(ROWS) { " and in the type" } else { "" };
                format!(", to {dtype} with {scaling} scales{also}")
            });
        let experts = if has(EXPERTS) { ", from experts' rows" } else { "" };
        format!(
            "{} norm, rows of {hidden}, epsilon {epsilon:e}, {weight}{bias}{quantized}{sum}{experts}",
            norm.name()
        )
    }

    /// Returns the operands of a launch for `count` elements from `done` on, of a message of `whole`. Each row belongs
    /// to one block; `set_teams` changes that.
    pub(crate) fn piece(&self, dtype: DType, done: usize, count: usize, whole: usize) -> FaFused {
        let &Self { residual, residual_out, sum, norm, weight, bias, rows, quantized, experts, .. } = self;
        let shift = (done * dtype.size()) as u64;
        let at = |address: u64, bytes: u64| if address == 0 { 0 } else { address + bytes };
        let row = self.row().unwrap_or(1);
        let none = FaScales { scales: 0, stride: 0, first_row: 0, group: 0, groups: 0, rule: 0, layout: 0 };
        FaFused {
            residual: residual + shift,
            residual_out: if sum == 0 { 0 } else { residual_out + shift },
            normed: at(rows, shift),
            numbers: quantized.map_or(0, |rows| rows.numbers + rows.scaling.number_bytes(done) as u64),
            weight,
            bias,
            global_scale: quantized.map_or(0, |rows| rows.global),
            scales: quantized
                .map_or(none, |rows| rows.scaling.at(rows.scales, (whole / row, row), done / row)),
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
            total: row as u32,
            checked: 0,
            experts: experts.map_or(NO_EXPERTS, |experts| experts.piece(done / row, row * dtype.size())),
        }
    }

    /// Checks the values, and that the message is whole rows.
    pub(crate) fn check_arguments(&self, count: usize, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
            return refuse("element type", dtype.to_string(), "f16, bf16 or f32 where a residual is added");
        }
        let &Self { norm, hidden, weight, bias, rows, quantized, .. } = self;
        let has_rows = rows != 0 || quantized.is_some();
        if norm == Norm::None {
            if self.experts.is_some() {
                return refuse(
                    "norm",
                    norm.name().to_owned(),
                    "a norm, if the input is computed from experts' rows",
                );
            }
            return match has_rows || weight != 0 || bias != 0 {
                true => refuse(
                    "norm",
                    norm.name().to_owned(),
                    "a norm, if there is a weight, a bias or an output for rows",
                ),
                false => Ok(()),
            };
        }
        if !(1..=FA_MAX_ROW as usize).contains(&hidden) {
            return refuse("hidden", hidden.to_string(), "1 to 65536 elements of a row");
        }
        self.check_rows(count)?;
        if !is_epsilon(norm.epsilon()) {
            return refuse("epsilon", norm.epsilon().to_string(), "a number of at least 0");
        }
        if bias != 0 && !norm.takes_bias() {
            return refuse("bias", format!("a bias for the {} norm", norm.name()), "a norm that has a bias");
        }
        if !has_rows && count != 0 {
            return refuse("rows", "none".to_owned(), "an output for normalised rows");
        }
        if let Some(experts) = self.experts {
            experts.check(count / hidden, dtype)?;
        }
        quantized
            .map_or(Ok(()), |RawQuantizedRows { scaling, dtype, .. }| check_format(scaling, dtype, hidden))
    }

    /// Checks that a message or a share is whole rows.
    pub(crate) fn check_rows(&self, count: usize) -> Result<()> {
        match self.row() {
            Some(hidden) if count % hidden != 0 => Err(Error::InvalidSetting {
                name: "hidden",
                value: format!("{hidden} in a message of {count}"),
                expected: "whole rows",
            }),
            _ => Ok(()),
        }
    }

    /// Returns the memory that the call reads or writes in addition to the input. `count` is that of the message, or of
    /// the own share.
    pub(crate) fn operands(&self, count: usize, dtype: DType) -> Result<[FusedOperand; 12]> {
        let &Self { residual, residual_out, sum, norm, hidden, weight, bias, rows, quantized, experts } =
            self;
        let of = |name, address, count, dtype, is_written| {
            Ok(FusedOperand { name, operand: Operand::new(name, address, count, dtype)?, is_written })
        };
        // For optional memory.
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
        let entries = experts.map_or(0, |experts| experts.entries(count / hidden.max(1)));
        let RawExperts { table, weights, weights_dtype, shared, .. } = experts.unwrap_or_default();
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
            of("expert_table", table, entries, DType::I32, false)?,
            of("expert_weights", weights, unless(weights != 0, entries), weights_dtype, false)?,
            of("shared_expert", shared, unless(shared != 0, count), dtype, false)?,
        ])
    }

    /// Refuses memory that is written and has another use in the call, except where the call permits it: results may
    /// replace the part of the input at the address `own`.
    pub(crate) fn check_buffers(&self, input: &Operand, own: u64, count: usize, dtype: DType) -> Result<()> {
        let operands = self.operands(count, dtype)?;
        let input = FusedOperand { name: "input", operand: *input, is_written: false };
        for (number, one) in operands.iter().enumerate() {
            for other in operands[..number].iter().chain([&input]) {
                let may_coincide = match (other.name, one.name) {
                    ("residual", "residual_out") => true,
                    ("input", "rows") => self.experts.is_none(),
                    ("input", "residual_out") => self.sum == 0 && self.experts.is_none(),
                    _ => false,
                };
                let place = if other.name == "input" { own } else { other.operand.address };
                let coincide = may_coincide && one.operand.address == place;
                let clashes = one.is_written || other.is_written || one.name == "residual";
                if clashes && !coincide && one.operand.overlaps(&other.operand) {
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
}

/// Refuses numbers of a type, or rows of a length, that a format does not have.
pub(super) fn check_format(scaling: Scaling, dtype: DType, hidden: usize) -> Result<()> {
    let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
    if !scaling.takes(dtype) {
        let expected = "an 8-bit float, or i8 where scales are floats; u8 for 4-bit formats";
        return refuse("quantized type", format!("{dtype} with {scaling} scales"), expected);
    }
    match hidden % scaling.multiple() {
        0 => Ok(()),
        _ => {
            let value = format!("{hidden}, not a multiple of {} as in {scaling}", scaling.multiple());
            refuse("hidden", value, "rows of whole groups where scales are bytes")
        }
    }
}

/// Memory of a fused call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedOperand {
    pub name: &'static str,
    pub operand: Operand,
    pub is_written: bool,
}
