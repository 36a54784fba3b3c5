//! What a fused allreduce may do with the rows of its sum: norms, and formats of quantised rows. A code is the position in the
//! table, and 1; 0 stands for none.

/// What a norm takes besides the rows, their length and a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameter {
    /// `epsilon: f32`, which is added before the square root.
    Epsilon,
    /// `unit_offset: bool`: the weight is 1 more than what stands in memory.
    UnitOffset,
}

/// A norm of rows.
#[derive(Debug)]
pub struct Norm {
    /// Its name: `rms`. The code's name is `FA_NORM_RMS`.
    pub name: &'static str,
    /// The variant of `Norm`, and of C's enum.
    pub variant: &'static str,
    /// One line of documentation.
    pub doc: &'static str,
    /// What it takes.
    pub parameters: &'static [Parameter],
    /// Whether a bias may be added.
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

/// Which elements of a row have a scale in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All of all rows: the scale is given.
    Given,
    /// Those of a row.
    Row,
    /// This number of elements in a row, or what is left at its end.
    Elements(usize),
}

/// A format of quantised rows: bits of a number, and scales.
#[derive(Debug)]
pub struct Scaling {
    /// Its name: `per_row`. The code's name is `FA_SCALE_PER_ROW`.
    pub name: &'static str,
    /// Other names.
    pub aliases: &'static [&'static str],
    /// The variant of `Scaling`, and of C's enum.
    pub variant: &'static str,
    /// Bits of a number: 8 or 4. A format of 4 bits has scales of one byte, and a global scale of all elements.
    pub bits: usize,
    /// Elements that have a scale in common.
    pub group: Group,
    /// Scales are in tiles of 128 rows and 4 groups, not row after row.
    pub is_tiled: bool,
    /// One line of documentation.
    pub doc: &'static str,
}

use Group::{Elements, Given, Row};

/// All formats.
#[rustfmt::skip]
pub const SCALINGS: [Scaling; 5] = [
    Scaling { name: "given", variant: "Given", aliases: &["per_tensor"], bits: 8, group: Given, is_tiled: false,
              doc: "8-bit numbers; all elements have one scale, a float that is given, the same on all ranks." },
    Scaling { name: "per_row", variant: "PerRow", aliases: &["per_token"], bits: 8, group: Row, is_tiled: false,
              doc: "8-bit numbers; each row has a scale, a float." },
    Scaling { name: "per_group", variant: "PerGroup", aliases: &["per_128"], bits: 8, group: Elements(128), is_tiled: false,
              doc: "8-bit numbers; each 128 elements of a row, and what is left at its end, have a scale, a float." },
    Scaling { name: "nvfp4", variant: "Nvfp4", aliases: &[], bits: 4, group: Elements(16), is_tiled: false,
              doc: "NVFP4: e2m1, two in a byte; each 16 elements of a row have a scale, an e4m3, row after row." },
    Scaling { name: "nvfp4_tiled", variant: "Nvfp4Tiled", aliases: &["nvfp4_128x4"], bits: 4, group: Elements(16), is_tiled: true,
              doc: "NVFP4 with scales in tiles of 128 rows and 4 blocks, as matrix products take them (cuBLAS: 1D block scaling \
                    factors layout; CUTLASS, TensorRT-LLM: 128x4)." },
];
