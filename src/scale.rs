//! The parameter of a premultiplied sum.

use std::fmt;
use std::hash::{Hash, Hasher};

/// What a rank multiplies its elements by. Two are equal if their bits are.
#[derive(Clone, Copy)]
pub struct Scale(f64);

impl Scale {
    /// No change.
    pub(crate) const ONE: Self = Self(1.0);

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
