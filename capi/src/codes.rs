//! Conversion of codes to types, operations and formats.

use fast_allreduce::{DType, Norm, ReduceOp, Scaling, Transport};

use crate::catalogue;
use crate::status::{argument, Failure};

/// Format in which an allreduce with quantised transport moves elements.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum fast_allreduce_transport {
    /// 8-bit integers, in groups of 32 with a scale.
    Int8 = 0,
    /// 8-bit floats e4m3, in groups of 32 with a scale.
    F8E4M3 = 1,
}

macro_rules! same_codes {
    ($ours:ident, $theirs:ident: $($name:ident),*) => {$(
        const _: () = assert!($ours::$name as u32 == $theirs::$name as u32);
    )*};
}

same_codes!(fast_allreduce_transport, Transport: Int8, F8E4M3);

/// Looks up a code. The error lists all valid codes.
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

/// Returns the code of a type or an operation, which `of` finds by its code; `u32::MAX` if it has none.
pub fn code_of<T: PartialEq>(value: &T, of: fn(u32) -> Option<T>) -> u32 {
    (0..=64).find(|&code| of(code).as_ref() == Some(value)).unwrap_or(u32::MAX)
}

pub fn scaling(code: u32) -> Result<Scaling, Failure> {
    row("scaling", code, catalogue::scaling_of)
}

/// Checks the code of a norm, and returns it.
pub fn norm(code: u32) -> Result<u32, Failure> {
    row("norm", code, |code| Norm::of_code(code, 0.0, false).ok().map(|_| code))
}

pub fn transport(code: u32) -> Result<Transport, Failure> {
    row("transport", code, |code| Transport::ALL.get(code as usize).copied())
}
