//! Element types, operations, algorithms, kernels and settings: enums and facts that are generated from the tables of
//! the crate `catalogue/`, and their methods.

mod facts;
mod fused;
#[rustfmt::skip]
mod generated;
pub(crate) mod settings;

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
pub(crate) use facts::{KernelFacts, KernelFamily};
pub(crate) use generated::with_elements;
pub(crate) use generated::with_integers;
pub use generated::{Algorithm, CallKind, DType, Norm, PlannedCall, ReduceOp, Scaling};
pub(crate) use generated::{CapacityRule, Division, Extent, InPlace, ReadsInputs, SwapsStaging, Work};
#[cfg(feature = "cuda")]
pub(crate) use generated::{HOT_WORLDS, KERNELS};

use crate::error::{Error, Result};
use crate::scale::Scale;
use generated::BusFactor;

impl DType {
    /// Returns the size of an element in bytes.
    ///
    /// ```
    /// use fast_allreduce::DType;
    ///
    /// let dtype: DType = "bfloat16".parse()?;
    /// assert_eq!((dtype, dtype.name(), dtype.size(), dtype.is_float()), (DType::Bf16, "bf16", 2, true));
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[inline]
    pub const fn size(self) -> usize {
        self.facts().size
    }

    /// Returns whether the type is a floating-point type.
    #[inline]
    pub const fn is_float(self) -> bool {
        self.facts().is_float
    }

    /// Returns the name, for example `"f16"`, `"bf16"` or `"i8"`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns torch's name, for example `"float16"`, `"bfloat16"` or `"int8"`.
    pub const fn torch_name(self) -> &'static str {
        self.facts().torch
    }

    /// Returns DLPack's type code (`DLDataTypeCode`) and number of bits.
    pub const fn dlpack(self) -> (u8, u8) {
        (self.facts().dlpack, 8 * self.size() as u8)
    }

    /// Returns the value of `ncclDataType_t`, if NCCL has the type.
    pub const fn nccl(self) -> Option<i32> {
        self.facts().nccl
    }

    /// Returns the name of the type's kernels on GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) const fn kernels(self) -> &'static str {
        self.facts().kernels
    }

    /// Returns whether the hot set has kernels for the type.
    pub(crate) const fn is_hot(self) -> bool {
        self.facts().is_hot
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Parses [`DType::name`], or the name that nccl-tests, NumPy or torch uses.
impl FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|dtype| {
            let facts = dtype.facts();
            [facts.name, facts.nccl_tests, facts.numpy, facts.torch].contains(&name)
        });
        found.ok_or_else(|| invalid("element type", name, generated::DTYPES))
    }
}

impl ReduceOp {
    /// Refuses types that the operation is not defined for.
    #[inline]
    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        match self.is_of(dtype) {
            true => Ok(()),
            false => Err(self.refused(dtype)),
        }
    }

    #[cold]
    fn refused(self, dtype: DType) -> Error {
        let defined = if dtype.is_float() { generated::OPS_OF_FLOATS } else { generated::OPS_OF_INTEGERS };
        invalid("reduction operation", &format!("{} of {dtype}", self.name()), defined)
    }

    /// Returns the operation with this code. A premultiplied sum gets the scale 1.
    pub(crate) fn of_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }

    /// Returns the scale that a rank's elements are multiplied by before the sum.
    #[inline]
    pub(crate) const fn scale(self) -> Option<Scale> {
        match self {
            Self::PreMulSum(scale) => Some(scale),
            _ => None,
        }
    }
}

/// Writes the name; for a premultiplied sum also the scale: `premul_sum:0.5`.
impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scale() {
            None => f.pad(self.name()),
            Some(scale) => f.pad(&format!("{}:{}", self.name(), scale.get())),
        }
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, scale) = text.split_once(':').map_or((text, None), |(name, scale)| (name, Some(scale)));
        let op = Self::ALL.into_iter().find(|op| op.name() == name);
        let found = match (op, scale) {
            (Some(Self::PreMulSum(_)), Some(scale)) => {
                scale.parse().ok().map(|scale| Self::PreMulSum(Scale::new(scale)))
            }
            (Some(op), None) => Some(op).filter(|op| op.scale().is_none()),
            _ => None,
        };
        found.ok_or_else(|| invalid("reduction operation", text, generated::OPS))
    }
}

impl CallKind {
    /// Returns whether the call has one message, as an allreduce has, rather than a share for each rank.
    #[inline]
    pub const fn is_whole(self) -> bool {
        matches!(self.division(), Division::Whole) || matches!(self, Self::SendRecv)
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth between `world_size` ranks, as defined by nccl-tests
    /// (`doc/PERFORMANCE.md`, `gather.cu`, `scatter.cu` and `sendrecv.cu`).
    ///
    /// ```
    /// assert_eq!(fast_allreduce::CallKind::AllReduce.bus_factor(4), 1.5);
    /// ```
    pub fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self.bus() {
            BusFactor::TwiceOthers => 2.0 * (n - 1.0) / n,
            BusFactor::Others => (n - 1.0) / n,
            BusFactor::One => 1.0,
        }
    }
}

impl fmt::Display for PlannedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().chain(Self::NVLS).find(|algorithm| algorithm.name() == name);
        found.ok_or_else(|| invalid("algorithm", name, generated::ALGORITHMS))
    }
}

fn invalid(name: &'static str, value: &str, expected: &'static str) -> Error {
    Error::InvalidSetting { name, value: value.to_owned(), expected }
}

#[cfg(test)]
mod tests;
