//! Methods of norms and of formats of quantised rows.

use std::fmt;
use std::str::FromStr;

use super::facts::{NormFacts, ScalingFacts};
use super::generated::{DType, Norm, Scaling, NORMS, NORM_NAMES, SCALINGS};
use crate::abi::{
    FaScales, FA_LAYOUT_128X4, FA_LAYOUT_8X4, FA_LAYOUT_COLUMNS, FA_LAYOUT_ROWS, FA_RULE_E4M3, FA_RULE_F32,
};
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
    /// let norm = Norm::Layer { epsilon: 1e-5, unit_offset: false };
    /// assert_eq!(Norm::of_name("layer", 1e-5, false), Ok(norm));
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

    /// Returns whether numbers can be of this type: an 8-bit float, or `I8` where scales are floats; `U8` for formats
    /// of 4 bits.
    pub const fn takes(self, dtype: DType) -> bool {
        match dtype {
            DType::U8 => self.bits() == 4,
            DType::I8 => self.bits() == 8 && matches!(self.scale_type(), DType::F32),
            DType::F8E4M3 | DType::F8E5M2 => self.bits() == 8,
            _ => false,
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
    /// // Columns of 7 rows begin at multiples of 8; 6 groups take two words of 4 bytes.
    /// assert_eq!(Scaling::PerGroupColumns.scales(7, 768), 5 * 8 + 7);
    /// assert_eq!(Scaling::PerGroupUe8m0.scales(7, 768), (8 + 7) * 4);
    /// ```
    pub const fn scales(self, rows: usize, hidden: usize) -> usize {
        let (facts, groups) = (self.facts(), self.groups(hidden));
        let fours = groups.div_ceil(4);
        match facts.layout {
            _ if facts.is_given => 1,
            FA_LAYOUT_ROWS => rows.saturating_mul(groups),
            FA_LAYOUT_128X4 => rows.div_ceil(128).saturating_mul(fours).saturating_mul(512),
            FA_LAYOUT_8X4 => rows.div_ceil(8).saturating_mul(fours).saturating_mul(32),
            // The last column ends with the last row.
            FA_LAYOUT_COLUMNS if rows == 0 || groups == 0 => 0,
            FA_LAYOUT_COLUMNS => {
                let (columns, each) = if facts.rule == FA_RULE_F32 { (groups, 1) } else { (fours, 4) };
                let before = (columns - 1).saturating_mul(self.scale_stride(rows));
                before.saturating_add(rows).saturating_mul(each)
            }
            _ => panic!("a layout without a size"),
        }
    }

    /// Returns the distance from a column of scales to the next, in floats, or in words of four bytes; 0 for layouts
    /// without columns.
    ///
    /// ```
    /// use fast_allreduce::Scaling;
    ///
    /// assert_eq!(Scaling::PerGroupColumns.scale_stride(7), 8);
    /// assert_eq!(Scaling::PerGroup.scale_stride(7), 0);
    /// ```
    pub const fn scale_stride(self, rows: usize) -> usize {
        match self.facts().layout {
            FA_LAYOUT_COLUMNS => rows.div_ceil(4).saturating_mul(4),
            _ => 0,
        }
    }

    /// Returns the number of groups of a row.
    pub(crate) const fn groups(self, hidden: usize) -> usize {
        match self.group() {
            None => 1,
            Some(group) => hidden.div_ceil(group),
        }
    }

    /// Returns the kernels' description of the scales of a message of `rows` rows, which are at an address, for a
    /// launch that begins at `first_row`.
    pub(crate) fn at(self, scales: u64, (rows, hidden): (usize, usize), first_row: usize) -> FaScales {
        let &ScalingFacts { group, rule, layout, .. } = self.facts();
        FaScales {
            scales,
            stride: self.scale_stride(rows) as u64,
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
