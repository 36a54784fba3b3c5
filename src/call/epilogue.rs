//! What may be done with the sum of an allreduce, as values: a residual is added, and rows are normalised.

use super::operand::Operand;
use crate::abi::{FaRmsNorm, FA_MAX_ROW};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The RMSNorm of rows: `x / sqrt(mean(x²) + epsilon) · weight`, of the elements `x` of each row. The documentation of the
/// arithmetic, to the bit, is in `docs/fused.md`.
///
/// `W` is what weights are in: a slice on the host, cudarc's slices and views on a GPU.
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
pub struct RmsNorm<'a, W: ?Sized> {
    pub(crate) hidden: usize,
    pub(crate) epsilon: f32,
    pub(crate) weight: Option<&'a W>,
    pub(crate) unit_offset: bool,
}

impl<W: ?Sized> Clone for RmsNorm<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W: ?Sized> Copy for RmsNorm<'_, W> {}

impl<'a, W: ?Sized> RmsNorm<'a, W> {
    /// Of rows of `hidden` elements, with weights of 1.
    pub const fn new(hidden: usize, epsilon: f32) -> Self {
        Self { hidden, epsilon, weight: None, unit_offset: false }
    }

    /// Multiplies element i of each row by `weight[i]`.
    pub const fn weight(mut self, weight: &'a W) -> Self {
        self.weight = Some(weight);
        self
    }

    /// Multiplies by `1 + weight[i]` instead, as Gemma's layers do. Without weights it is of no effect.
    pub const fn unit_offset(mut self, enabled: bool) -> Self {
        self.unit_offset = enabled;
        self
    }

    /// The same with its operands by address.
    pub(crate) fn at(&self, weight: u64, output: u64) -> RawRmsNorm {
        let &Self { hidden, epsilon, unit_offset, .. } = self;
        RawRmsNorm { hidden, epsilon, weight, unit_offset, output }
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
/// hold the same on every rank; it may be where the output of the call is, else it is disjoint from that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    /// Address of as many elements as the message has, which are added.
    pub residual: u64,
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
}

const WEIGHT: u64 = 1 << 20;
const UNIT_OFFSET: u64 = 1 << 21;

impl Epilogue {
    /// Elements of a row; `None` where it does not matter.
    pub(crate) fn row(&self) -> Option<usize> {
        self.norm.map(|norm| norm.hidden)
    }

    /// The numbers that ranks have to agree on, in a word: it is no hash, so that errors can tell them.
    pub(crate) fn digest(&self) -> u64 {
        self.norm.map_or(0, |RawRmsNorm { hidden, epsilon, weight, unit_offset, .. }| {
            let weight = if weight == 0 { 0 } else { WEIGHT };
            let unit_offset = if unit_offset { UNIT_OFFSET } else { 0 };
            u64::from(epsilon.to_bits()) << 32 | unit_offset | weight | hidden as u64
        })
    }

    /// What a digest tells, in words.
    pub(crate) fn describe(digest: u64) -> String {
        let weight = match (digest & WEIGHT, digest & UNIT_OFFSET) {
            (0, _) => "no weight",
            (_, 0) => "a weight",
            _ => "1 + weight",
        };
        let (hidden, epsilon) = (digest & (WEIGHT - 1), f32::from_bits((digest >> 32) as u32));
        format!("rows of {hidden}, epsilon {epsilon:?}, {weight}")
    }

    /// As kernels take it, for `count` elements from `done` on.
    pub(crate) fn piece(&self, dtype: DType, done: usize, count: usize) -> FaRmsNorm {
        let shift = (done * dtype.size()) as u64;
        let residual = self.residual + shift;
        match self.norm {
            None => {
                FaRmsNorm { residual, normed: 0, weight: 0, row: 1, rows: 0, unit_offset: 0, epsilon: 0.0 }
            }
            Some(RawRmsNorm { hidden, epsilon, weight, unit_offset, output }) => FaRmsNorm {
                residual,
                normed: output + shift,
                weight,
                row: hidden as u32,
                rows: (count / hidden) as u32,
                unit_offset: u32::from(unit_offset),
                epsilon,
            },
        }
    }

    /// Refuses numbers that mean nothing, and messages that are not whole rows.
    pub(crate) fn check_arguments(&self, count: usize, dtype: DType) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
            return refuse("element type", dtype.to_string(), "f16, bf16 or f32 where a residual is added");
        }
        let Some(RawRmsNorm { hidden, epsilon, .. }) = self.norm else {
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
        Ok(())
    }

    /// Its operands that the call reads or writes besides input and output.
    pub(crate) fn operands(&self, count: usize, dtype: DType) -> Result<Vec<(&'static str, Operand)>> {
        let mut operands = vec![("residual", Operand::new("residual", self.residual, count, dtype)?)];
        if let Some(RawRmsNorm { hidden, weight, output, .. }) = self.norm {
            operands.push(("normalised", Operand::new("normalised", output, count, dtype)?));
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
        let residual = operands[0].1;
        let normed = operands.get(1).map_or(NOWHERE, |&(_, operand)| operand);
        for (which, operand) in operands {
            // What it may not overlap, and what it may only where both begin.
            let (apart, same) = match which {
                "residual" => ([*input, NOWHERE], *output),
                "normalised" => ([*output, residual], *input),
                _ => ([*output, normed], NOWHERE),
            };
            let is_split = operand.overlaps(&same) && operand.address != same.address;
            if is_split || apart.iter().any(|other| operand.overlaps(other)) {
                return Err(Error::InvalidPointer {
                    which,
                    address: operand.address as usize,
                    problem: "in memory that the call uses otherwise",
                    element_size: dtype.size(),
                });
            }
        }
        Ok(())
    }
}

const NOWHERE: Operand = Operand { address: 0, bytes: 0 };
