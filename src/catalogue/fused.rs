//! Norms of rows and formats of quantised rows: what their facts come to.

use std::fmt;
use std::str::FromStr;

use super::facts::{NormFacts, ScalingFacts};
use super::generated::{DType, Norm, Scaling, NORMS, NORM_NAMES, SCALINGS};
use crate::error::{Error, Result};

// Ranks compare codes of norms in three bits.
const _: () = {
    let mut i = 0;
    while i < NORMS.len() {
        assert!(NORMS[i].code < 8);
        i += 1;
    }
};

impl Norm {
    /// Its name: `"rms"`, ...; `"none"`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Whether a bias may be added after the weight.
    pub const fn takes_bias(self) -> bool {
        self.facts().takes_bias
    }

    const fn facts(self) -> &'static NormFacts {
        let mut i = 0;
        while NORMS[i].code != self.code() {
            i += 1;
        }
        &NORMS[i]
    }

    /// The norm of a code, for callers in other languages.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a code that there is not, and a unit offset of a norm that has none.
    pub fn of_code(code: u32, epsilon: f32, unit_offset: bool) -> Result<Self> {
        let invalid = |value, expected| Error::InvalidSetting { name: "norm", value, expected };
        let norm = Self::known(code, epsilon, unit_offset)
            .ok_or_else(|| invalid(format!("code {code}"), "the code of a norm"))?;
        match unit_offset && !norm.facts().takes_unit_offset {
            true => Err(invalid(format!("{} with a unit offset", norm.name()), "a norm that takes it")),
            false => Ok(norm),
        }
    }

    /// The norm of a name, as [`Norm::of_code`].
    ///
    /// # Errors
    ///
    /// As [`Norm::of_code`].
    pub fn of_name(name: &str, epsilon: f32, unit_offset: bool) -> Result<Self> {
        let norm = NORMS.iter().find(|norm| norm.name == name).ok_or_else(|| Error::InvalidSetting {
            name: "norm",
            value: name.to_owned(),
            expected: NORM_NAMES,
        })?;
        Self::of_code(norm.code, epsilon, unit_offset)
    }
}

impl Scaling {
    /// Its name: `"per_row"`, ...
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Bits of a number. Two numbers of 4 bits are in a byte, the first in its lower half.
    pub const fn bits(self) -> usize {
        self.facts().bits
    }

    /// Whether the scale is read; else scales are written.
    pub const fn is_given(self) -> bool {
        self.facts().is_given
    }

    /// Whether there is a global scale besides, an `f32` that is read: with numbers of 4 bits.
    pub const fn has_global(self) -> bool {
        self.bits() == 4
    }

    /// The type of the scales: `F32`, or bytes.
    pub const fn scale_type(self) -> DType {
        match self.bits() {
            4 => DType::U8,
            _ => DType::F32,
        }
    }

    /// Whether numbers are of that type: an 8-bit one, or bytes of two.
    pub const fn takes(self, dtype: DType) -> bool {
        match self.bits() {
            4 => matches!(dtype, DType::U8),
            _ => matches!(dtype, DType::I8 | DType::F8E4M3 | DType::F8E5M2),
        }
    }

    /// What a row's elements are a multiple of.
    pub(crate) const fn multiple(self) -> usize {
        match self.facts() {
            ScalingFacts { bits: 4, group: Some(group), .. } => *group,
            _ => 1,
        }
    }

    /// Bytes of the numbers that `count` elements become.
    pub const fn number_bytes(self, count: usize) -> usize {
        count / (8 / self.bits())
    }

    /// The scales that `rows` rows of `hidden` elements have.
    pub const fn scales(self, rows: usize, hidden: usize) -> usize {
        let &ScalingFacts { is_given, group, is_tiled, .. } = self.facts();
        let groups = match group {
            None => 1,
            Some(group) => hidden.div_ceil(group),
        };
        match (is_given, is_tiled) {
            (true, _) => 1,
            (_, false) => rows.saturating_mul(groups),
            (_, true) => rows.div_ceil(128).saturating_mul(groups.div_ceil(4)).saturating_mul(512),
        }
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// From [`Scaling::name`] or an alias.
impl FromStr for Scaling {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let is_named = |one: &Self| one.name() == name || one.facts().aliases.contains(&name);
        Self::ALL.into_iter().find(is_named).ok_or_else(|| Error::InvalidSetting {
            name: "scaling",
            value: name.to_owned(),
            expected: SCALINGS,
        })
    }
}
