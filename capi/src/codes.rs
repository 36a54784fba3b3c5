//! The codes of types, operations and formats, and what they mean.

use std::ffi::c_void;

use fast_allreduce::{DType, RawQuantizedRows, ReduceOp, ScaleLayout, Scaling, Transport};

use crate::catalogue;
use crate::status::{argument, Failure};

/// What an allreduce with quantised transport moves instead of elements.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum fast_allreduce_transport {
    /// 8-bit integers in groups of 32 with a scale.
    Int8 = 0,
    /// 8-bit floats e4m3 in such groups.
    F8E4M3 = 1,
}

/// Which elements of normalised rows have a scale in common.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum fast_allreduce_scaling {
    /// All, and it is given, the same on all ranks.
    Given = 1,
    /// Those of a row.
    PerRow = 2,
    /// Each 128 of a row, and what is left at its end.
    PerGroup = 3,
    /// NVFP4: each 16 of a row, whose scales are bytes, row after row.
    PerBlock = 4,
    /// The same with scales in tiles of 128 rows and 4 blocks, as matrix products of the format take them.
    PerTiledBlock = 5,
}

/// What normalised rows become: numbers of fewer bits, with scales.
#[repr(C)]
pub struct fast_allreduce_quantized {
    /// FAST_ALLREDUCE_DTYPE_I8, _F8E4M3 or _F8E5M2; _U8 of blocks, which have two 4-bit floats in a byte.
    pub dtype: u32,
    /// Which elements have a scale in common, a fast_allreduce_scaling.
    pub scaling: u32,
    /// The scales: a float that is given, or where the call writes one for each row or group, row after row; of blocks a byte each,
    /// 128 times 4 in a tile.
    pub scales: *mut c_void,
    /// Of blocks, by what their scales are multiplied: a positive number.
    pub global_scale: *const f32,
}

pub fn quantized(quantized: &fast_allreduce_quantized) -> Result<RawQuantizedRows, Failure> {
    const GIVEN: u32 = fast_allreduce_scaling::Given as u32;
    const PER_ROW: u32 = fast_allreduce_scaling::PerRow as u32;
    const PER_GROUP: u32 = fast_allreduce_scaling::PerGroup as u32;
    const PER_BLOCK: u32 = fast_allreduce_scaling::PerBlock as u32;
    const PER_TILED_BLOCK: u32 = fast_allreduce_scaling::PerTiledBlock as u32;
    let &fast_allreduce_quantized { dtype: code, scaling, scales, global_scale } = quantized;
    let (dtype, scales, global) = (dtype(code)?, scales as u64, global_scale as u64);
    let bytes = |scaling| Ok(RawQuantizedRows::Bytes { dtype, scaling, scales });
    let nvfp4 = |layout| match dtype {
        DType::U8 => Ok(RawQuantizedRows::Nvfp4 { scales, layout, global }),
        _ => Err(argument(format!("blocks of {dtype}: two elements are a FAST_ALLREDUCE_DTYPE_U8"))),
    };
    match scaling {
        GIVEN => bytes(Scaling::Given),
        PER_ROW => bytes(Scaling::PerRow),
        PER_GROUP => bytes(Scaling::PerGroup),
        PER_BLOCK => nvfp4(ScaleLayout::RowMajor),
        PER_TILED_BLOCK => nvfp4(ScaleLayout::Tiled),
        code => Err(argument(format!("{code} is no scaling"))),
    }
}

macro_rules! same_codes {
    ($ours:ident, $theirs:ident: $($name:ident),*) => {$(
        const _: () = assert!($ours::$name as u32 == $theirs::$name as u32);
    )*};
}

same_codes!(fast_allreduce_transport, Transport: Int8, F8E4M3);

/// The row of a code, or an error that lists the codes there are.
fn row<T>(what: &str, code: u32, of: fn(u32) -> Option<T>) -> Result<T, Failure> {
    of(code).ok_or_else(|| {
        let codes: Vec<_> =
            (0..=64).filter(|&code| of(code).is_some()).map(|code| code.to_string()).collect();
        argument(format!("{what} {code} is not one of {}", codes.join(", ")))
    })
}

pub fn dtype(code: u32) -> Result<DType, Failure> {
    row("dtype", code, catalogue::dtype_of)
}

pub fn op(code: u32) -> Result<ReduceOp, Failure> {
    row("op", code, catalogue::op_of)
}

pub fn transport(code: u32) -> Result<Transport, Failure> {
    row("transport", code, |code| Transport::ALL.get(code as usize).copied())
}
