//! Conversion of candle's element types to fast-allreduce's.

use candle_core::Result;
use fast_allreduce as far;

/// Returns the type of candle's storage, if it can be reduced.
pub(crate) fn reducible(dtype: candle_core::DType, op: &str) -> Result<far::DType> {
    Ok(match dtype {
        candle_core::DType::U8 => far::DType::U8,
        candle_core::DType::U32 => far::DType::U32,
        candle_core::DType::I32 => far::DType::I32,
        candle_core::DType::I64 => far::DType::I64,
        candle_core::DType::BF16 => far::DType::Bf16,
        candle_core::DType::F16 => far::DType::F16,
        candle_core::DType::F32 => far::DType::F32,
        candle_core::DType::F64 => far::DType::F64,
        candle_core::DType::F8E4M3 => far::DType::F8E4M3,
        dtype => candle_core::bail!(
            "{op}: {dtype:?} cannot be reduced: U8, U32, I32, I64, F8E4M3, BF16, F16, F32 and F64 can; convert it with \
             to_dtype"
        ),
    })
}

/// Returns the type in which elements are moved, and their number in one of candle's elements: bytes for types that
/// cannot be reduced.
pub(crate) fn movable(dtype: candle_core::DType, op: &str) -> Result<(far::DType, usize)> {
    match (reducible(dtype, op), dtype) {
        (Ok(reducible), _) => Ok((reducible, 1)),
        (Err(_), candle_core::DType::I16) => Ok((far::DType::U8, dtype.size_in_bytes())),
        (Err(_), dtype) => candle_core::bail!(
            "{op}: {dtype:?} cannot be moved: candle keeps it packed, without a layout of its own"
        ),
    }
}
