//! Reduction operations.

use crate::abi;

/// How the ranks' elements are combined, always in rank order.
///
/// | op | floats | integers |
/// |---|---|---|
/// | `Sum` | from +0 in the accumulator type, rounded once | wraps |
/// | `Prod` | from 1, likewise | wraps |
/// | `Min`, `Max` | IEEE 754-2019 minimum and maximum: a NaN wins, -0 is below +0 | |
/// | `Avg` | the sum divided by the world size, then rounded once | the exact sum, divided toward zero |
///
/// Floats of 8 and 16 bits accumulate in f32 and round to nearest even. Nothing saturates: what rounds beyond the largest number is
/// infinite, or NaN in [`DType::F8E4M3`](crate::DType::F8E4M3), which has no infinity. A result that is NaN has the sign bit clear
/// and all other bits set, on every device and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum.
    Sum = abi::FA_SUM,
    /// Product.
    Prod = abi::FA_PROD,
    /// Minimum.
    Min = abi::FA_MIN,
    /// Maximum.
    Max = abi::FA_MAX,
    /// Average.
    Avg = abi::FA_AVG,
}

impl ReduceOp {
    /// All operations, in the order of their codes.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// The name that the field uses: `"sum"`, `"prod"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for ReduceOp {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| crate::Error::InvalidSetting {
            name: "reduction operation",
            value: name.to_owned(),
            expected: "one of sum, prod, min, max, avg",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        for op in ReduceOp::ALL {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        for name in ["", "Sum", " sum", "mean"] {
            let error = name.parse::<ReduceOp>().unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("prod"), "{error}");
        }
    }

    #[test]
    fn the_error_names_all() {
        let error = "none".parse::<ReduceOp>().unwrap_err().to_string();
        assert!(ReduceOp::ALL.into_iter().all(|op| error.contains(op.name())), "{error}");
    }
}
