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

/// Format of quantised rows: bits of a number, and scales.
#[derive(Debug)]
pub struct Scaling {
    /// Name, for example `per_row`. The constant of the code is `FA_SCALE_PER_ROW`.
    pub name: &'static str,
    /// Other names.
    pub aliases: &'static [&'static str],
    /// Variant of `Scaling` and of the C enum.
    pub variant: &'static str,
    /// Bits of a number: 8 or 4. A format of 4 bits has scales of one byte, and a global scale of all elements.
    pub bits: usize,
    /// Elements that share a scale.
    pub group: Group,
    /// Whether scales are stored in tiles of 128 rows and 4 groups, instead of row after row.
    pub is_tiled: bool,
    /// Documentation.
    pub doc: &'static str,
}

use Group::{Elements, Given, Row};

/// All formats.
#[rustfmt::skip]
pub const SCALINGS: [Scaling; 5] = [
    Scaling { name: "given", variant: "Given", aliases: &["per_tensor"], bits: 8, group: Given, is_tiled: false,
              doc: "8-bit numbers; one scale for all elements, an f32 that is given and equal on all ranks." },
    Scaling { name: "per_row", variant: "PerRow", aliases: &["per_token"], bits: 8, group: Row, is_tiled: false,
              doc: "8-bit numbers; one f32 scale for each row." },
    Scaling { name: "per_group", variant: "PerGroup", aliases: &["per_128"], bits: 8, group: Elements(128),
              is_tiled: false,
              doc: "8-bit numbers; one f32 scale for each 128 elements of a row; the last group may be shorter." },
    Scaling { name: "nvfp4", variant: "Nvfp4", aliases: &[], bits: 4, group: Elements(16), is_tiled: false,
              doc: "NVFP4: e2m1 numbers, two in a byte; one e4m3 scale for each 16 elements of a row, row after row." },
    Scaling { name: "nvfp4_tiled", variant: "Nvfp4Tiled", aliases: &["nvfp4_128x4"], bits: 4, group: Elements(16),
              is_tiled: true,
              doc: "NVFP4 with scales in tiles of 128 rows and 4 blocks, as matrix products read them (cuBLAS: 1D \
                    block scaling factors layout; CUTLASS, TensorRT-LLM: 128x4)." },
];
