//! Reduction operations.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::abi;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// How the ranks' elements are combined, always in rank order.
///
/// | op | floats | integers |
/// |---|---|---|
/// | `Sum` | from +0 in the accumulator type, rounded once | wraps |
/// | `Prod` | from 1, likewise | wraps |
/// | `Min`, `Max` | IEEE 754-2019 minimum and maximum: a NaN wins, -0 is below +0 | |
/// | `Avg` | the sum divided by the world size, then rounded once | the exact sum, divided toward zero |
/// | `BitAnd`, `BitOr`, `BitXor` | refused | bit by bit |
/// | `PreMulSum` | the sum of each rank's elements times its own [`Scale`] | refused |
///
/// Floats of 8 and 16 bits accumulate in f32 and round to nearest even. Nothing saturates: what rounds beyond the largest number is
/// infinite, or NaN in [`DType::F8E4M3`], which has no infinity. A result that is NaN has the sign bit clear and all other bits
/// set, on every device and rank.
///
/// A premultiplied sum is NCCL's (`ncclRedOpCreatePreMulSum`): the product is computed in the accumulator type, with the scale
/// rounded to it, and rounded to the element type; the products are then summed as by `Sum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Average.
    Avg,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Sum of what each rank has times its own scale. Ranks need not have the same.
    PreMulSum(Scale),
}

/// What a rank multiplies its elements by. Two are equal if their bits are.
#[derive(Clone, Copy)]
pub struct Scale(f64);

impl Scale {
    /// That factor.
    pub const fn new(factor: f64) -> Self {
        Self(factor)
    }

    /// The factor.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl PartialEq for Scale {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Scale {}

impl Hash for Scale {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Debug for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<f64> for Scale {
    fn from(factor: f64) -> Self {
        Self(factor)
    }
}

impl ReduceOp {
    /// Those that every element type has, in the order of their codes.
    pub const ARITHMETIC: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// Those that integers have besides, in the order of their codes.
    pub const BITWISE: [Self; 3] = [Self::BitAnd, Self::BitOr, Self::BitXor];

    /// The name that the field uses: `"sum"`, `"prod"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
            Self::PreMulSum(_) => "premul_sum",
        }
    }

    /// Whether elements of a type have it.
    pub const fn is_of(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Prod | Self::Min | Self::Max | Self::Avg => true,
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
            Self::PreMulSum(_) => dtype.is_float(),
        }
    }

    /// Refuses what a type does not have.
    #[inline]
    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        match self.is_of(dtype) {
            true => Ok(()),
            false => Err(self.refused(dtype)),
        }
    }

    #[cold]
    fn refused(self, dtype: DType) -> Error {
        Error::InvalidSetting {
            name: "reduction operation",
            value: format!("{} of {dtype}", self.name()),
            expected: match dtype.is_float() {
                true => "sum, prod, min, max, avg or premul_sum of floats",
                false => "sum, prod, min, max, avg, band, bor or bxor of integers",
            },
        }
    }

    /// As kernels have it. Ranks compare it; a scale is each rank's own.
    #[inline]
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Sum => abi::FA_SUM,
            Self::Prod => abi::FA_PROD,
            Self::Min => abi::FA_MIN,
            Self::Max => abi::FA_MAX,
            Self::Avg => abi::FA_AVG,
            Self::BitAnd => abi::FA_BAND,
            Self::BitOr => abi::FA_BOR,
            Self::BitXor => abi::FA_BXOR,
            Self::PreMulSum(_) => abi::FA_PREMUL_SUM,
        }
    }

    /// That of a code, with a scale of 1 where there is one.
    pub(crate) fn of_code(code: u32) -> Option<Self> {
        Self::all().find(|op| op.code() == code)
    }

    /// The factor that a rank's elements are multiplied by first.
    #[inline]
    pub(crate) const fn scale(self) -> Option<Scale> {
        match self {
            Self::PreMulSum(scale) => Some(scale),
            _ => None,
        }
    }

    /// All, in the order of their codes, with a scale of 1.
    pub(crate) fn all() -> impl Iterator<Item = Self> + Clone {
        Self::ARITHMETIC.into_iter().chain(Self::BITWISE).chain([Self::PreMulSum(Scale::new(1.0))])
    }
}

/// The name; of a premultiplied sum with the scale: `premul_sum:0.5`.
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
        let found = match text.split_once(':') {
            None => Self::all().find(|op| op.name() == text && op.scale().is_none()),
            Some(("premul_sum", scale)) => scale.parse().ok().map(|scale| Self::PreMulSum(Scale::new(scale))),
            Some(_) => None,
        };
        found.ok_or_else(|| Error::InvalidSetting {
            name: "reduction operation",
            value: text.to_owned(),
            expected: "one of sum, prod, min, max, avg, band, bor, bxor, or premul_sum:SCALE",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        for op in ReduceOp::all().chain([ReduceOp::PreMulSum((-0.1).into())]) {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        for name in ["", "Sum", " sum", "mean", "premul_sum", "premul_sum:", "premul_sum:half", "sum:2"] {
            let error = name.parse::<ReduceOp>().unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("prod"), "{error}");
        }
    }

    #[test]
    fn the_error_names_all() {
        let error = "none".parse::<ReduceOp>().unwrap_err().to_string();
        assert!(ReduceOp::all().all(|op| error.contains(op.name())), "{error}");
    }

    #[test]
    fn codes_are_those_of_the_kernels() {
        assert!(ReduceOp::all().zip(0..).all(|(op, code)| op.code() == code));
        assert!(ReduceOp::all().all(|op| ReduceOp::of_code(op.code()) == Some(op)));
        assert_eq!(ReduceOp::of_code(9), None);
    }

    #[test]
    fn what_a_type_lacks_is_refused_with_what_it_has() {
        for dtype in DType::ALL {
            for op in ReduceOp::all().filter(|op| !op.is_of(dtype)) {
                let error = op.check(dtype).unwrap_err().to_string();
                assert!(error.contains(dtype.name()) && error.contains(op.name()), "{error}");
                assert!(ReduceOp::all().filter(|op| op.is_of(dtype)).all(|op| error.contains(op.name())));
            }
        }
    }
}
