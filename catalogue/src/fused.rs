//! Norms and formats of quantised rows of fused allreduces. A code is the position in the table plus 1; 0 means none.

/// Parameter of a norm, in addition to the rows, their length and a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameter {
    /// `epsilon: f32`, added before the square root.
    Epsilon,
    /// `unit_offset: bool`: 1 is added to each weight in memory.
    UnitOffset,
}

/// Norm of rows.
#[derive(Debug)]
pub struct Norm {
    /// Name, for example `rms`. The constant of the code is `FA_NORM_RMS`.
    pub name: &'static str,
    /// Variant of `Norm` and of the C enum.
    pub variant: &'static str,
    /// Documentation.
    pub doc: &'static str,
    /// Parameters.
    pub parameters: &'static [Parameter],
    /// Whether it takes a bias.
    pub takes_bias: bool,
}

use Parameter::{Epsilon, UnitOffset};

/// All norms.
#[rustfmt::skip]
pub const NORMS: [Norm; 2] = [
    Norm { name: "rms", variant: "Rms", parameters: &[Epsilon, UnitOffset], takes_bias: false,
           doc: "RMSNorm: `x / sqrt(mean(x * x) + epsilon) * weight`." },
    Norm { name: "layer", variant: "Layer", parameters: &[Epsilon, UnitOffset], takes_bias: true,
           doc: "LayerNorm: `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias`." },
];

/// Elements that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All elements of all rows: the scale is given.
    Given,
    /// Elements of a row.
    Row,
    /// This number of elements of a row; the last group of a row may be shorter.
    Elements(usize),
}

/// How a scale is computed from the greatest magnitude of its elements, and its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A float: the greatest magnitude becomes the largest number. Or the scale is given.
    F32,
    /// An e4m3, with a global scale that is given.
    E4m3,
    /// An E8M0: the least power of two that lets the greatest magnitude not exceed the largest number.
    E8m0Up,
    /// An E8M0 by the rule of OCP's Microscaling Formats, by which the largest elements may saturate.
    E8m0Floor,
}

/// How the scales of a message are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    Rows,
    /// Column after column; the stride is the number of rows, rounded up to a multiple of 4. Of scales that are bytes,
    /// a column has words of four.
    Columns,
    /// Tiles of 128 rows and 4 groups.
    Tiles128x4,
    /// Tiles of 8 rows and 4 groups.
    Tiles8x4,
}

/// Format of quantised rows: bits of a number, and scales.
#[derive(Debug)]
pub struct Scaling {
    /// Name, for example `per_row`. The constant of the code is `FA_SCALE_PER_ROW`.
    pub name: &'static str,
    /// Other names.
    pub aliases: &'static [&'static str],
    /// Variant of `Scaling` and of the C enum.
    pub variant: &'static str,
    /// Bits of a number: 8 or 4.
    pub bits: usize,
    /// Elements that share a scale.
    pub group: Group,
    /// How scales are computed.
    pub rule: Rule,
    /// How scales are stored.
    pub layout: Layout,
    /// Documentation.
    pub doc: &'static str,
}

impl Rule {
    /// Returns the constant of `csrc/abi.h`.
    pub const fn constant(self) -> &'static str {
        match self {
            Self::F32 => "FA_RULE_F32",
            Self::E4m3 => "FA_RULE_E4M3",
            Self::E8m0Up => "FA_RULE_E8M0_UP",
            Self::E8m0Floor => "FA_RULE_E8M0_FLOOR",
        }
    }
}

impl Layout {
    /// Returns the constant of `csrc/abi.h`.
    pub const fn constant(self) -> &'static str {
        match self {
            Self::Rows => "FA_LAYOUT_ROWS",
            Self::Columns => "FA_LAYOUT_COLUMNS",
            Self::Tiles128x4 => "FA_LAYOUT_128X4",
            Self::Tiles8x4 => "FA_LAYOUT_8X4",
        }
    }
}

use Group::{Elements, Given, Row};
use Layout::{Columns, Rows, Tiles128x4, Tiles8x4};
use Rule::{E4m3, E8m0Floor, E8m0Up, F32};

/// All formats.
#[rustfmt::skip]
pub const SCALINGS: [Scaling; 14] = [
    Scaling { name: "given", variant: "Given", aliases: &["per_tensor"], bits: 8, group: Given, rule: F32, layout: Rows,
              doc: "8-bit numbers; one scale for all elements, an f32 that is given and equal on all ranks." },
    Scaling { name: "per_row", variant: "PerRow", aliases: &["per_token"], bits: 8, group: Row, rule: F32, layout: Rows,
              doc: "8-bit numbers; one f32 scale for each row." },
    Scaling { name: "per_group", variant: "PerGroup", aliases: &["per_128"], bits: 8, group: Elements(128), rule: F32,
              layout: Rows,
              doc: "8-bit numbers; one f32 scale for each 128 elements of a row; the last group may be shorter." },
    Scaling { name: "nvfp4", variant: "Nvfp4", aliases: &[], bits: 4, group: Elements(16), rule: E4m3, layout: Rows,
              doc: "NVFP4: e2m1 numbers, two in a byte; one e4m3 scale for each 16 elements of a row, row after row." },
    Scaling { name: "nvfp4_tiled", variant: "Nvfp4Tiled", aliases: &["nvfp4_128x4"], bits: 4, group: Elements(16),
              rule: E4m3, layout: Tiles128x4,
              doc: "NVFP4 with scales in tiles of 128 rows and 4 groups, as matrix products read them (cuBLAS: 1D \
                    block scaling factors layout; CUTLASS, TensorRT-LLM: 128x4)." },
    Scaling { name: "per_group_columns", variant: "PerGroupColumns", aliases: &["per_128_columns"], bits: 8,
              group: Elements(128), rule: F32, layout: Columns,
              doc: "`per_group` with scales column after column, aligned for the TMA (DeepGEMM on Hopper)." },
    Scaling { name: "per_group_ue8m0", variant: "PerGroupUe8m0", aliases: &["per_128_ue8m0"], bits: 8,
              group: Elements(128), rule: E8m0Up, layout: Columns,
              doc: "8-bit floats; one E8M0 scale, rounded up, for each 128 elements of a row; in words of four, \
                    column after column (DeepGEMM on Blackwell)." },
    Scaling { name: "mxfp8", variant: "Mxfp8", aliases: &[], bits: 8, group: Elements(32), rule: E8m0Floor,
              layout: Rows,
              doc: "MXFP8: 8-bit floats; one E8M0 scale, by OCP's rule, for each 32 elements of a row, in rows." },
    Scaling { name: "mxfp8_tiled", variant: "Mxfp8Tiled", aliases: &["mxfp8_128x4"], bits: 8, group: Elements(32),
              rule: E8m0Floor, layout: Tiles128x4, doc: "MXFP8 with scales in the tiles of `nvfp4_tiled`." },
    Scaling { name: "mxfp4", variant: "Mxfp4", aliases: &[], bits: 4, group: Elements(32), rule: E8m0Floor,
              layout: Rows,
              doc: "MXFP4: e2m1 numbers, two in a byte; one E8M0 scale, by OCP's rule, for each 32 elements of a row, \
                    in rows." },
    Scaling { name: "mxfp4_tiled", variant: "Mxfp4Tiled", aliases: &["mxfp4_128x4"], bits: 4, group: Elements(32),
              rule: E8m0Floor, layout: Tiles128x4, doc: "MXFP4 with scales in the tiles of `nvfp4_tiled`." },
    Scaling { name: "nvfp4_8x4", variant: "Nvfp4Tiled8x4", aliases: &[], bits: 4, group: Elements(16), rule: E4m3,
              layout: Tiles8x4,
              doc: "NVFP4 with scales in tiles of 8 rows and 4 groups, as TensorRT-LLM's matrix products of few rows \
                    read them." },
    Scaling { name: "mxfp8_8x4", variant: "Mxfp8Tiled8x4", aliases: &[], bits: 8, group: Elements(32),
              rule: E8m0Floor, layout: Tiles8x4, doc: "MXFP8 with scales in the tiles of `nvfp4_8x4`." },
    Scaling { name: "per_32_ue8m0", variant: "Per32Ue8m0", aliases: &[], bits: 8, group: Elements(32), rule: E8m0Up,
              layout: Columns, doc: "`per_group_ue8m0` with a scale for each 32 elements of a row." },
];
