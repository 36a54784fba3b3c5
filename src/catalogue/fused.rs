//! Methods of norms and of formats of quantised rows.

use std::fmt;
use std::str::FromStr;

use super::facts::{NormFacts, ScalingFacts};
use super::generated::{DType, Norm, Scaling, NORMS, NORM_NAMES, SCALINGS};
use crate::abi::{FaScales, FA_LAYOUT_128X4, FA_RULE_E4M3, FA_RULE_F32};
use crate::error::{Error, Result};

// The digest that ranks compare has three bits for the code of a norm.
const _: () = {
    let mut i = 0;
    while i < NORMS.len() {
        assert!(NORMS[i].code < 8);
        i += 1;
    }
};

impl Norm {
    /// Returns the name, for example `"rms"`; `"none"` for [`Norm::None`].
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns whether the norm takes a bias.
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

    /// Returns the norm with this code, for bindings of other languages.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an unknown code, or for a unit offset with a norm that does not take one.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::Norm;
    ///
    /// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: true };
    /// assert_eq!(Norm::of_code(norm.code(), 1e-5, true), Ok(norm));
    /// ```
    pub fn of_code(code: u32, epsilon: f32, unit_offset: bool) -> Result<Self> {
        let invalid = |value, expected| Error::InvalidSetting { name: "norm", value, expected };
        let norm = Self::known(code, epsilon, unit_offset)
            .ok_or_else(|| invalid(format!("code {code}"), "the code of a norm"))?;
        match unit_offset && !norm.facts().takes_unit_offset {
            true => Err(invalid(format!("{} with a unit offset", norm.name()), "a norm that takes one")),
            false => Ok(norm),
        }
    }

    /// Returns the norm with this name.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an unknown name, or for a unit offset with a norm that does not take one.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::Norm;
    ///
    /// assert_eq!(Norm::of_name("layer", 1e-5, false), Ok(Norm::Layer { epsilon: 1e-5 }));
    /// assert!(Norm::of_name("batch", 1e-5, false).is_err());
    /// ```
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
    /// Returns the name, for example `"per_row"`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the number of bits of a number: 8 or 4. A byte holds two 4-bit numbers, the first in its lower half.
    pub const fn bits(self) -> usize {
        self.facts().bits
    }

    /// Returns whether the scale is given, that is, read. Other formats write their scales.
    pub const fn is_given(self) -> bool {
        self.facts().is_given
    }

    /// Returns whether the format has a global scale in addition: an `f32` that is read.
    pub const fn has_global(self) -> bool {
        self.facts().rule == FA_RULE_E4M3
    }

    /// Returns the type of the scales: `F32`, or `U8` for scales of one byte.
    pub const fn scale_type(self) -> DType {
        match self.facts().rule {
            FA_RULE_F32 => DType::F32,
            _ => DType::U8,
        }
    }

    /// Returns the number of elements of a row that share a scale; `None`: all elements of a row, or of all rows.
    pub const fn group(self) -> Option<usize> {
        self.facts().group
    }

    /// Returns whether numbers can be of this type: an 8-bit type, or `U8` for formats of 4 bits.
    pub const fn takes(self, dtype: DType) -> bool {
        match self.bits() {
            4 => matches!(dtype, DType::U8),
            _ => matches!(dtype, DType::I8 | DType::F8E4M3 | DType::F8E5M2),
        }
    }

    /// Returns the number that the length of a row must be a multiple of.
    pub(crate) const fn multiple(self) -> usize {
        match *self.facts() {
            ScalingFacts { group: Some(group), rule, .. } if rule != FA_RULE_F32 => group,
            _ => 1,
        }
    }

    /// Returns the number of bytes of `count` quantised elements.
    pub const fn number_bytes(self, count: usize) -> usize {
        count / (8 / self.bits())
    }

    /// Returns the number of scales of `rows` rows of `hidden` elements.
    ///
    /// ```
    /// use fast_allreduce::Scaling;
    ///
    /// assert_eq!(Scaling::Given.scales(8, 4096), 1);
    /// assert_eq!(Scaling::PerRow.scales(8, 4096), 8);
    /// assert_eq!(Scaling::PerGroup.scales(8, 4096), 8 * 32);
    /// assert_eq!(Scaling::Nvfp4.scales(8, 4096), 8 * 256);
    /// ```
    pub const fn scales(self, rows: usize, hidden: usize) -> usize {
        let (&ScalingFacts { is_given, layout, .. }, groups) = (self.facts(), self.groups(hidden));
        if is_given {
            return 1;
        }
        match layout {
            FA_LAYOUT_128X4 => rows.div_ceil(128).saturating_mul(groups.div_ceil(4)).saturating_mul(512),
            _ => rows.saturating_mul(groups),
        }
    }

    /// Returns the number of groups of a row.
    const fn groups(self, hidden: usize) -> usize {
        match self.group() {
            None => 1,
            Some(group) => hidden.div_ceil(group),
        }
    }

    /// Returns the kernels' description of the scales of a message, which are at an address, for a launch that begins
    /// at a row.
    pub(crate) fn at(self, scales: u64, hidden: usize, first_row: usize) -> FaScales {
        let &ScalingFacts { group, rule, layout, .. } = self.facts();
        FaScales {
            scales,
            stride: 0,
            first_row: first_row as u64,
            group: group.unwrap_or(0) as u32,
            groups: self.groups(hidden) as u32,
            rule,
            layout,
        }
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Parses [`Scaling::name`] or an alias.
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
