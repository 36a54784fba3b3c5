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
    Norm { name: "layer", variant: "Layer", parameters: &[Epsilon], takes_bias: true,
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
}

/// How the scales of a message are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    Rows,
    /// Tiles of 128 rows and 4 groups.
    Tiles128x4,
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
        }
    }
}

impl Layout {
    /// Returns the constant of `csrc/abi.h`.
    pub const fn constant(self) -> &'static str {
        match self {
            Self::Rows => "FA_LAYOUT_ROWS",
            Self::Tiles128x4 => "FA_LAYOUT_128X4",
        }
    }
}

use Group::{Elements, Given, Row};
use Layout::{Rows, Tiles128x4};
use Rule::{E4m3, F32};

/// All formats.
#[rustfmt::skip]
pub const SCALINGS: [Scaling; 5] = [
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
              doc: "NVFP4 with scales in tiles of 128 rows and 4 blocks, as matrix products read them (cuBLAS: 1D \
                    block scaling factors layout; CUTLASS, TensorRT-LLM: 128x4)." },
];
