//! Whether results must have the bits of additions in rank order.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// In which order the ranks' elements are added up: [`Builder::order`](crate::Builder::order).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Order {
    /// Rank order, by every direct [`Algorithm`](crate::Algorithm): the same bits on every rank, in every run, on every device. The
    /// plan takes direct algorithms only. [`Builder::algorithm`](crate::Builder::algorithm) may still name another one.
    #[default]
    Fixed,
    /// Any order: the plan may also take ring, halving-doubling and in-switch reductions (NVLS), where it expects them to be faster.
    /// All ranks still have the same bits. Sums of floats may have other bits than by the direct algorithms, and by an in-switch
    /// reduction other bits in another run, as far as the order of additions matters.
    Any,
}

impl Order {
    const ALL: [Self; 2] = [Self::Fixed, Self::Any];

    /// `"fixed"`, `"any"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Any => "any",
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Order {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|order| order.name() == name).ok_or_else(|| Error::InvalidSetting {
            name: "order",
            value: name.to_owned(),
            expected: "fixed or any",
        })
    }
}
