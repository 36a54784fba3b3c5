//! The parameter of a premultiplied sum.

use std::fmt;
use std::hash::{Hash, Hasher};

/// The factor of a premultiplied sum: see [`ReduceOp::PreMulSum`](crate::ReduceOp::PreMulSum). Compared by its bits.
///
/// ```
/// use fast_allreduce::{ReduceOp, Scale};
///
/// let scale = Scale::new(0.25);
/// assert_eq!((scale.get(), Scale::from(0.25)), (0.25, scale));
/// let weighted = ReduceOp::PreMulSum(scale); // Each rank may have another factor.
/// # let _ = weighted;
/// ```
#[derive(Clone, Copy, serde::Serialize, serde::Deserialize)]
pub struct Scale(f64);

impl Scale {
    /// The factor 1.
    pub(crate) const ONE: Self = Self(1.0);

    /// Creates a scale of `factor`.
    pub const fn new(factor: f64) -> Self {
        Self(factor)
    }

    /// Returns the factor.
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
