//! What may be done with the sum of an allreduce, as values: a residual is added, and rows are normalised.

use super::operand::Operand;
use crate::abi::{self, FaRmsNorm, FA_MAX_ROW, FA_SCALED_BLOCK, FA_SCALED_GROUP};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// Nothing is normalised, and rows are whole blocks'.
const NO_ROWS: FaRmsNorm = FaRmsNorm {
    residual: 0,
    residual_out: 0,
    normed: 0,
    weight: 0,
    scales: 0,
    global_scale: 0,
    first_row: 0,
    row: 1,
    rows: 0,
    unit_offset: 0,
    epsilon: 0.0,
    scaling: abi::FA_NOT_SCALED,
    dtype: 0,
    team: 0,
    team_inverse: 0,
    share: 0,
    chunks: 0,
    turns: abi::FaRowTurns { slice_rows: 0, divisor: 0, inverse: 0, by_slice: 0 },
};

/// The RMSNorm of rows: `x / sqrt(mean(x²) + epsilon) · weight`, of the elements `x` of each row. The documentation of the
/// arithmetic, to the bit, is in `docs/fused.md`.
///
/// `W` is what weights are in: a slice or a `Vec` on the host, cudarc's slices and views on a GPU; [`NoWeight`] where there are none.
///
/// ```
/// use fast_allreduce::RmsNorm;
///
/// let weight = vec![1.0_f32; 4096];
/// let norm = RmsNorm::new(4096, 1e-5).weight(&weight[..]);
/// # let _ = norm;
/// ```
#[derive(Debug)]
#[must_use]
pub struct RmsNorm<'a, W: ?Sized = NoWeight> {
    pub(crate) hidden: usize,
    pub(crate) epsilon: f32,
    pub(crate) weight: Option<&'a W>,
    pub(crate) unit_offset: bool,
}

/// The weights of an [`RmsNorm`] that has none.
#[derive(Debug, Clone, Copy)]
pub enum NoWeight {}

impl<T> AsRef<[T]> for NoWeight {
    fn as_ref(&self) -> &[T] {
        match *self {}
    }
}

impl<W: ?Sized> Clone for RmsNorm<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W: ?Sized> Copy for RmsNorm<'_, W> {}

impl RmsNorm<'static> {
    /// Of rows of `hidden` elements, with weights of 1.
    pub const fn new(hidden: usize, epsilon: f32) -> Self {
        Self { hidden, epsilon, weight: None, unit_offset: false }
    }
}

impl<W: ?Sized> RmsNorm<'_, W> {
    /// Multiplies element i of each row by `weight[i]`.
    pub const fn weight<V: ?Sized>(self, weight: &V) -> RmsNorm<'_, V> {
        self.optional_weight(Some(weight))
    }

    /// As [`RmsNorm::weight`] where there are weights, for a program that learns that when it runs; else as it was made, with weights
    /// of 1.
    pub const fn optional_weight<V: ?Sized>(self, weight: Option<&V>) -> RmsNorm<'_, V> {
        let Self { hidden, epsilon, unit_offset, .. } = self;
        RmsNorm { hidden, epsilon, weight, unit_offset }
    }

    /// Multiplies by `1 + weight[i]` instead, as Gemma's layers do. Without weights it is of no effect.
    pub const fn unit_offset(mut self, enabled: bool) -> Self {
        self.unit_offset = enabled;
        self
    }

    /// The same with its operands by address.
    pub(crate) fn at(&self, weight: u64, output: u64) -> RawRmsNorm {
        let &Self { hidden, epsilon, unit_offset, .. } = self;
        RawRmsNorm { hidden, epsilon, weight, unit_offset, output, quantized: None }
    }

    /// Refuses weights that are not as many as a row's elements.
    pub(crate) fn check_weight(&self, len: Option<usize>) -> Result<()> {
        match len {
            Some(len) if len != self.hidden => Err(Error::InvalidSetting {
                name: "weight",
                value: format!("{len} elements for rows of {}", self.hidden),
                expected: "one for each element of a row",
            }),
            _ => Ok(()),
        }
    }
}

/// What [`Collective::AllReduceEpilogue`](super::Collective::AllReduceEpilogue) does with a sum, by address. The residual must
/// hold the same on every rank. It may be where its sum goes, else it is disjoint from that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    /// Address of as many elements as the message has, which are added.
    pub residual: u64,
    /// Where the sum with the residual goes; 0: to the output of the call, which else has the sum of the ranks' inputs alone, as
    /// [`Collective::AllReduce`](super::Collective::AllReduce) has it.
    pub residual_out: u64,
    /// What follows; `None`: the call ends with the residual.
    pub norm: Option<RawRmsNorm>,
}

// Of the numbers in it, a NaN is refused.
impl Eq for Epilogue {}

/// The operands of an [`RmsNorm`] by address.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RawRmsNorm {
    /// Elements of a row.
    pub hidden: usize,
    /// What is added to the mean of the squares.
    pub epsilon: f32,
    /// Address of an element for each of a row, or 0: weights of 1.
    pub weight: u64,
    /// Whether 1 is added to each weight.
    pub unit_offset: bool,
    /// Where normalised rows go, apart from all else but the input.
    pub output: u64,
    /// What they are made: numbers of fewer bits with scales, apart from the input as well; `None`: of the call's type.
    pub quantized: Option<RawQuantizedRows>,
}

/// Scales by which rows are made 8-bit numbers: the element of a row is about its number times the scale. `S` is what they are
/// in: a slice of `f32` on the host, cudarc's slices and views on a GPU. `docs/fused.md` has the formulas.
#[derive(Debug)]
pub enum Scales<'a, S: ?Sized> {
    /// One scale for all, which is given, and the same on all ranks: the first of these.
    Given(&'a S),
    /// One for each row, which the call writes.
    PerRow(&'a mut S),
    /// One for each 128 elements of a row, or what is left at its end, row after row, which the call writes.
    PerGroup(&'a mut S),
}

/// Which elements have a scale in common; see [`Scales`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Scaling {
    /// All of them, and it is given.
    Given = abi::FA_SCALE_GIVEN,
    /// Those of a row.
    PerRow = abi::FA_SCALE_OF_ROW,
    /// Those of a group of 128 in a row.
    PerGroup = abi::FA_SCALE_OF_GROUP,
}

impl Scaling {
    /// The scales that `rows` rows of `hidden` elements have.
    pub const fn count(self, rows: usize, hidden: usize) -> usize {
        match self {
            Self::Given => 1,
            Self::PerRow => rows,
            Self::PerGroup => rows.saturating_mul(hidden.div_ceil(FA_SCALED_GROUP as usize)),
        }
    }
}

/// Scales by which rows are made NVFP4: 4-bit floats (e2m1), two in a byte, each 16 of a row with a scale of their own that is an
/// e4m3, and all with one more. An element is about its number times the scale of its block, divided by the global one.
/// `docs/fused.md` has the formulas.
///
/// `B` is what the blocks' scales are in, `G` the global one: a slice of `u8` and an `f32` on the host, cudarc's slices and views
/// on a GPU.
#[derive(Debug)]
pub struct Nvfp4Scales<'a, B: ?Sized, G: ?Sized> {
    /// As many bytes as [`ScaleLayout::count`] tells, which the call writes.
    pub blocks: &'a mut B,
    /// Their order.
    pub layout: ScaleLayout,
    /// By which scales are multiplied before they become e4m3: a positive number, the same on all ranks; `448 * 6 / greatest`, where
    /// that is the greatest magnitude that is expected.
    pub global: &'a G,
}

/// The order of the scales of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum ScaleLayout {
    /// Row after row.
    RowMajor = abi::FA_SCALE_OF_BLOCK,
    /// In tiles of 128 rows and 4 blocks, as matrix products of the format take them: cuBLAS's *1D block scaling factors layout*,
    /// CUTLASS's and TensorRT-LLM's *128x4*. What of the last tiles is of no row or block is left as it was.
    Tiled = abi::FA_SCALE_OF_TILED_BLOCK,
}

impl ScaleLayout {
    /// The bytes of scales that `rows` rows of `hidden` elements have.
    pub const fn count(self, rows: usize, hidden: usize) -> usize {
        let blocks = hidden / FA_SCALED_BLOCK as usize;
        match self {
            Self::RowMajor => rows.saturating_mul(blocks),
            Self::Tiled => rows.div_ceil(128).saturating_mul(blocks.div_ceil(4)).saturating_mul(512),
        }
    }
}

/// How rows are made numbers of fewer bits, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RawQuantizedRows {
    /// A byte for each element.
    Bytes {
        /// What they become: `I8`, `F8E4M3` or `F8E5M2`.
        dtype: DType,
        /// Which elements have a scale in common.
        scaling: Scaling,
        /// Address of as many `f32` as [`Scaling::count`] tells: read if they are given, else written.
        scales: u64,
    },
    /// A byte for two elements, the first in its lower half, in rows of a multiple of 16.
    Nvfp4 {
        /// Address of as many bytes as [`ScaleLayout::count`] tells, which are written.
        scales: u64,
        /// Their order.
        layout: ScaleLayout,
        /// Address of the global scale, an `f32`.
        global: u64,
    },
}

impl RawQuantizedRows {
    /// Refuses another number of scales than rows have.
    pub(crate) fn check_scales(&self, len: usize, count: usize, hidden: usize) -> Result<()> {
        let needed = self.scales_of(count, hidden);
        let expected = match self {
            Self::Bytes { .. } => "one that is given, or one for each row or each group of 128 in it",
            Self::Nvfp4 { .. } => {
                "one for each 16 elements of a row, or whole tiles of 128 rows and 4 such blocks"
            }
        };
        match len == needed {
            true => Ok(()),
            false => {
                let value = format!("{len} for {count} elements in rows of {hidden}");
                Err(Error::InvalidSetting { name: "scales", value, expected })
            }
        }
    }

    fn scales_of(&self, count: usize, hidden: usize) -> usize {
        let rows = count.checked_div(hidden).unwrap_or(0);
        match self {
            Self::Bytes { scaling, .. } => scaling.count(rows, hidden),
            Self::Nvfp4 { layout, .. } => layout.count(rows, hidden),
        }
    }

    /// The bytes that so many elements become.
    pub(crate) const fn bytes(&self, count: usize) -> usize {
        match self {
            Self::Bytes { .. } => count,
            Self::Nvfp4 { .. } => count / 2,
        }
    }
}

const WEIGHT: u64 = 1 << 20;
const UNIT_OFFSET: u64 = 1 << 21;
const PLAIN_SUM: u64 = 1 << 28;
/// Where the scaling is, and 1 above the type that rows become. Of NVFP4 that is its own number, and the scaling its layout.
const SCALING: u32 = 22;
const BECOMES: u32 = 24;
const NVFP4: u64 = 15;
// The field has four bits, and the greatest code of a type above 0 is not NVFP4's number.
const _: () = assert!((DType::ALL.len() as u64) < NVFP4);

impl Epilogue {
    /// Elements of a row; `None` where it does not matter.
    pub(crate) fn row(&self) -> Option<usize> {
        self.norm.map(|norm| norm.hidden)
    }

    /// The numbers that ranks have to agree on, in a word: it is no hash, so that errors can tell them.
    pub(crate) fn digest(&self) -> u64 {
        let plain_sum = if self.residual_out == 0 { 0 } else { PLAIN_SUM };
        let norm =
            self.norm.map_or(0, |RawRmsNorm { hidden, epsilon, weight, unit_offset, quantized, .. }| {
                let quantized = quantized.map_or(0, |rows| match rows {
                    RawQuantizedRows::Bytes { dtype, scaling, .. } => {
                        u64::from(dtype as u32 + 1) << BECOMES | u64::from(scaling as u32) << SCALING
                    }
                    RawQuantizedRows::Nvfp4 { layout, .. } => {
                        NVFP4 << BECOMES | u64::from(layout == ScaleLayout::Tiled) << SCALING
                    }
                });
                let weight = if weight == 0 { 0 } else { WEIGHT };
                let unit_offset = if unit_offset { UNIT_OFFSET } else { 0 };
                u64::from(epsilon.to_bits()) << 32 | quantized | unit_offset | weight | hidden as u64
            });
        norm | plain_sum
    }

    /// What a digest tells, in words.
    pub(crate) fn describe(digest: u64) -> String {
        let plain_sum = if digest & PLAIN_SUM == 0 { "" } else { ", and the plain sum" };
        if digest & !PLAIN_SUM == 0 {
            return format!("no norm{plain_sum}");
        }
        let weight = match (digest & WEIGHT, digest & UNIT_OFFSET) {
            (0, _) => "no weight",
            (_, 0) => "a weight",
            _ => "1 + weight",
        };
        let (hidden, epsilon) = (digest & (WEIGHT - 1), f32::from_bits((digest >> 32) as u32));
        let scaling = match (digest >> SCALING) as u32 & 3 {
            abi::FA_SCALE_GIVEN => "a scale",
            abi::FA_SCALE_OF_ROW => "a scale for each row",
            _ => "a scale for each 128",
        };
        let becomes = digest >> BECOMES & 0xF;
        let quantized = match (becomes, becomes.checked_sub(1).and_then(|code| DType::ALL.get(code as usize)))
        {
            (NVFP4, _) if digest >> SCALING & 3 == 0 => ", to nvfp4 with scales row after row".to_owned(),
            (NVFP4, _) => ", to nvfp4 with scales in tiles".to_owned(),
            (_, Some(dtype)) => format!(", to {dtype} with {scaling}"),
            (_, None) => String::new(),
        };
        format!("rows of {hidden}, epsilon {epsilon:?}, {weight}{quantized}{plain_sum}")
    }

    /// As kernels take it, rows being whole blocks', for `count` elements from `done` on.
    pub(crate) fn piece(&self, dtype: DType, done: usize, count: usize) -> FaRmsNorm {
        let shift = (done * dtype.size()) as u64;
        let residual = self.residual + shift;
        let residual_out = if self.residual_out == 0 { 0 } else { self.residual_out + shift };
        match self.norm {
            None => FaRmsNorm { residual, residual_out, dtype: dtype as u32, ..NO_ROWS },
            Some(norm) => {
                let RawRmsNorm { hidden, epsilon, weight, unit_offset, output, quantized } = norm;
                let (becomes, scaling, scales, global_scale) = match quantized {
                    None => (dtype, abi::FA_NOT_SCALED, 0, 0),
                    Some(RawQuantizedRows::Bytes { dtype, scaling, scales }) => {
                        (dtype, scaling as u32, scales, 0)
                    }
                    Some(RawQuantizedRows::Nvfp4 { scales, layout, global }) => {
                        (DType::U8, layout as u32, scales, global)
                    }
                };
                let before = quantized.map_or(done * dtype.size(), |rows| rows.bytes(done));
                FaRmsNorm {
                    residual,
                    residual_out,
                    normed: output + before as u64,
                    weight,
                    scales,
                    global_scale,
                    first_row: (done / hidden) as u64,
                    row: hidden as u32,
                    rows: (count / hidden) as u32,
                    unit_offset: u32::from(unit_offset),
                    epsilon,
                    scaling,
                    dtype: becomes as u32,
                    ..NO_ROWS
                }
            }
        }
    }

    /// Refuses numbers that mean nothing, and messages that are not whole rows.
    pub(crate) fn check_arguments(&self, count: usize, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
            return refuse("element type", dtype.to_string(), "f16, bf16 or f32 where a residual is added");
        }
        let Some(RawRmsNorm { hidden, epsilon, quantized, .. }) = self.norm else {
            return Ok(());
        };
        if !(1..=FA_MAX_ROW as usize).contains(&hidden) {
            return refuse("hidden", hidden.to_string(), "1 to 65536 elements of a row");
        }
        if count % hidden != 0 {
            return refuse("hidden", format!("{hidden} in a message of {count}"), "whole rows");
        }
        if !(epsilon >= 0.0 && epsilon.is_finite()) {
            return refuse("epsilon", epsilon.to_string(), "a number of at least 0");
        }
        match quantized {
            Some(RawQuantizedRows::Bytes { dtype, .. })
                if !matches!(dtype, DType::I8 | DType::F8E4M3 | DType::F8E5M2) =>
            {
                refuse("quantised type", dtype.to_string(), "i8, f8e4m3 or f8e5m2")
            }
            Some(RawQuantizedRows::Nvfp4 { .. }) if hidden % FA_SCALED_BLOCK as usize != 0 => {
                refuse("hidden", hidden.to_string(), "a multiple of 16 where rows become nvfp4")
            }
            _ => Ok(()),
        }
    }

    /// Its operands that the call reads or writes besides input and output: the residual first, then where that goes if that is
    /// not the output.
    pub(crate) fn operands(&self, count: usize, dtype: DType) -> Result<Vec<(&'static str, Operand)>> {
        let mut operands = vec![("residual", Operand::new("residual", self.residual, count, dtype)?)];
        if self.residual_out != 0 {
            operands.push((RESIDUAL_OUT, Operand::new(RESIDUAL_OUT, self.residual_out, count, dtype)?));
        }
        if let Some(RawRmsNorm { hidden, weight, output, quantized, .. }) = self.norm {
            let (elements, becomes) = quantized.map_or((count, dtype), |rows| (rows.bytes(count), DType::U8));
            operands.push(("normalised", Operand::new("normalised", output, elements, becomes)?));
            let needed = quantized.map_or(0, |rows| rows.scales_of(count, hidden));
            let mut push = |which, address, count, dtype| -> Result<()> {
                operands.push((which, Operand::new(which, address, count, dtype)?));
                Ok(())
            };
            match quantized.filter(|_| count != 0) {
                None => {}
                Some(RawQuantizedRows::Bytes { scaling: Scaling::Given, scales, .. }) => {
                    push("given scale", scales, needed, DType::F32)?;
                }
                Some(RawQuantizedRows::Bytes { scales, .. }) => push("scales", scales, needed, DType::F32)?,
                Some(RawQuantizedRows::Nvfp4 { scales, global, .. }) => {
                    push("scales", scales, needed, DType::U8)?;
                    push("given scale", global, 1, DType::F32)?;
                }
            }
            if weight != 0 && count != 0 {
                operands.push(("weight", Operand::new("weight", weight, hidden, dtype)?));
            }
        }
        Ok(operands)
    }

    /// Refuses memory that is written where it is also read, but for the places that the call permits.
    pub(crate) fn check_buffers(
        &self,
        input: &Operand,
        output: &Operand,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let operands = self.operands(count, dtype)?;
        let find = |name| operands.iter().find(|(which, _)| *which == name).map(|&(_, operand)| operand);
        let get = |name| find(name).unwrap_or(NOWHERE);
        let (residual, normed, scales) = (get("residual"), get("normalised"), get("scales"));
        // Where the residual goes, and the plain sum if it is asked for.
        let (residual_out, sum) = find(RESIDUAL_OUT).map_or((*output, NOWHERE), |out| (out, *output));
        let is_quantized = self.norm.is_some_and(|norm| norm.quantized.is_some());
        // The plain sum is written before all of the others are read.
        let sum_overlaps = [*input, residual, residual_out, normed].iter().any(|other| sum.overlaps(other));
        if sum_overlaps {
            return Err(in_use("plain sum", &sum, dtype));
        }
        for &(which, operand) in &operands {
            // What it may not overlap, and what it may only where both begin.
            let (apart, same) = match which {
                "residual" => ([*input, NOWHERE, NOWHERE, NOWHERE, sum], residual_out),
                RESIDUAL_OUT => ([*input, NOWHERE, NOWHERE, NOWHERE, sum], residual),
                "normalised" if is_quantized => ([residual_out, residual, *input, NOWHERE, sum], NOWHERE),
                "normalised" => ([residual_out, residual, NOWHERE, NOWHERE, sum], *input),
                "scales" => ([residual_out, normed, residual, *input, sum], NOWHERE),
                _ => ([residual_out, normed, scales, NOWHERE, sum], NOWHERE),
            };
            let is_split = operand.overlaps(&same) && operand.address != same.address;
            if is_split || apart.iter().any(|other| operand.overlaps(other)) {
                return Err(in_use(which, &operand, dtype));
            }
        }
        Ok(())
    }
}

const RESIDUAL_OUT: &str = "residual's sum";

fn in_use(which: &'static str, operand: &Operand, dtype: DType) -> Error {
    Error::InvalidPointer {
        which,
        address: operand.address as usize,
        problem: "in memory that the call uses otherwise",
        element_size: dtype.size(),
    }
}

const NOWHERE: Operand = Operand { address: 0, bytes: 0 };
