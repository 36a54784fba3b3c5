//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use fast_allreduce::{DType, ReduceOp, Scaling};

/// Element types.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_dtype {
    /// IEEE binary16; sums accumulate in f32.
    F16 = 0,
    /// bfloat16; sums accumulate in f32.
    Bf16 = 1,
    /// float.
    F32 = 2,
    /// double.
    F64 = 3,
    /// int8_t.
    I8 = 4,
    /// uint8_t.
    U8 = 5,
    /// int32_t.
    I32 = 6,
    /// uint32_t.
    U32 = 7,
    /// int64_t.
    I64 = 8,
    /// uint64_t.
    U64 = 9,
    /// 8-bit float e4m3 of OCP's OFP8, without infinities; sums accumulate in f32.
    F8E4M3 = 10,
    /// 8-bit float e5m2 of OCP's OFP8; sums accumulate in f32.
    F8E5M2 = 11,
}

/// Reduction operations. Elements are combined in rank order.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_op {
    /// Sum. Integers wrap.
    Sum = 0,
    /// Product. Integers wrap.
    Prod = 1,
    /// IEEE 754-2019 minimum.
    Min = 2,
    /// IEEE 754-2019 maximum.
    Max = 3,
    /// Sum divided by the number of ranks; integers are rounded toward zero.
    Avg = 4,
    /// Bitwise and; integers only.
    Band = 5,
    /// Bitwise or; integers only.
    Bor = 6,
    /// Bitwise exclusive or; integers only.
    Bxor = 7,
}

/// Norms of rows.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_norm {
    /// No norm.
    None = 0,
    /// RMSNorm: `x / sqrt(mean(x * x) + epsilon) * weight`.
    Rms = 1,
    /// LayerNorm: `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias`.
    Layer = 2,
}

/// Formats of quantised rows.
#[repr(u32)]
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "names for the header")]
pub enum fast_allreduce_scaling {
    /// Rows are not quantised.
    None = 0,
    /// 8-bit numbers; one scale for all elements, an f32 that is given and equal on all ranks.
    Given = 1,
    /// 8-bit numbers; one f32 scale for each row.
    PerRow = 2,
    /// 8-bit numbers; one f32 scale for each 128 elements of a row; the last group may be shorter.
    PerGroup = 3,
    /// NVFP4: e2m1 numbers, two in a byte; one e4m3 scale for each 16 elements of a row, row after row.
    Nvfp4 = 4,
    /// NVFP4 with scales in tiles of 128 rows and 4 groups, as matrix products read them (cuBLAS: 1D block scaling
    /// factors layout; CUTLASS, TensorRT-LLM: 128x4).
    Nvfp4Tiled = 5,
    /// `per_group` with scales column after column, aligned for the TMA (DeepGEMM on Hopper).
    PerGroupColumns = 6,
    /// 8-bit floats; one E8M0 scale, rounded up, for each 128 elements of a row; in words of four, column after
    /// column (DeepGEMM on Blackwell).
    PerGroupUe8m0 = 7,
    /// MXFP8: 8-bit floats; one E8M0 scale, by OCP's rule, for each 32 elements of a row, in rows.
    Mxfp8 = 8,
    /// MXFP8 with scales in the tiles of `nvfp4_tiled`.
    Mxfp8Tiled = 9,
    /// MXFP4: e2m1 numbers, two in a byte; one E8M0 scale, by OCP's rule, for each 32 elements of a row, in rows.
    Mxfp4 = 10,
    /// MXFP4 with scales in the tiles of `nvfp4_tiled`.
    Mxfp4Tiled = 11,
    /// NVFP4 with scales in tiles of 8 rows and 4 groups, as TensorRT-LLM's matrix products of few rows read them.
    Nvfp4Tiled8x4 = 12,
    /// MXFP8 with scales in the tiles of `nvfp4_8x4`.
    Mxfp8Tiled8x4 = 13,
    /// `per_group_ue8m0` with a scale for each 32 elements of a row.
    Per32Ue8m0 = 14,
}

/// Returns the [`DType`] of a code.
pub fn dtype_of(code: u32) -> Option<DType> {
    match code {
        0 => Some(DType::F16),
        1 => Some(DType::Bf16),
        2 => Some(DType::F32),
        3 => Some(DType::F64),
        4 => Some(DType::I8),
        5 => Some(DType::U8),
        6 => Some(DType::I32),
        7 => Some(DType::U32),
        8 => Some(DType::I64),
        9 => Some(DType::U64),
        10 => Some(DType::F8E4M3),
        11 => Some(DType::F8E5M2),
        _ => None,
    }
}

/// Returns the [`ReduceOp`] of a code.
pub fn op_of(code: u32) -> Option<ReduceOp> {
    match code {
        0 => Some(ReduceOp::Sum),
        1 => Some(ReduceOp::Prod),
        2 => Some(ReduceOp::Min),
        3 => Some(ReduceOp::Max),
        4 => Some(ReduceOp::Avg),
        5 => Some(ReduceOp::BitAnd),
        6 => Some(ReduceOp::BitOr),
        7 => Some(ReduceOp::BitXor),
        _ => None,
    }
}

/// Returns the [`Scaling`] of a code.
pub fn scaling_of(code: u32) -> Option<Scaling> {
    match code {
        1 => Some(Scaling::Given),
        2 => Some(Scaling::PerRow),
        3 => Some(Scaling::PerGroup),
        4 => Some(Scaling::Nvfp4),
        5 => Some(Scaling::Nvfp4Tiled),
        6 => Some(Scaling::PerGroupColumns),
        7 => Some(Scaling::PerGroupUe8m0),
        8 => Some(Scaling::Mxfp8),
        9 => Some(Scaling::Mxfp8Tiled),
        10 => Some(Scaling::Mxfp4),
        11 => Some(Scaling::Mxfp4Tiled),
        12 => Some(Scaling::Nvfp4Tiled8x4),
        13 => Some(Scaling::Mxfp8Tiled8x4),
        14 => Some(Scaling::Per32Ue8m0),
        _ => None,
    }
}
