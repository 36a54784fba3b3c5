//! Arithmetic on single and packed halves: computed in f64, then rounded once.

use super::{flush, index_of, pack_number, saturate, unpack, Format, TYPES};
use crate::ir::{FloatOp, Round};
use crate::types::Type;

/// Encodes an instruction on halves for compiled code.
pub(crate) fn float_code(op: FloatOp, ty: Type, ftz: bool, sat: bool) -> u32 {
    let (number, nan) = match op {
        FloatOp::Add => (0, false),
        FloatOp::Sub => (1, false),
        FloatOp::Mul => (2, false),
        FloatOp::Fma => (3, false),
        FloatOp::Min { nan } => (4, nan),
        FloatOp::Max { nan } => (5, nan),
        FloatOp::Neg => (6, false),
        FloatOp::Abs => (7, false),
        // The decoder rejects these operations on halves.
        FloatOp::Div | FloatOp::Sqrt | FloatOp::Rcp | FloatOp::Rsqrt | FloatOp::Copysign => (8, false),
    };
    number | u32::from(nan) << 4 | u32::from(ftz) << 5 | u32::from(sat) << 6 | index_of(ty) << 8
}

/// Computes an instruction on each of the packed halves.
pub(crate) extern "C" fn float(code: u32, a: u32, b: u32, c: u32) -> u32 {
    let ty = TYPES[(code >> 8 & 31) as usize];
    let (one, packed) = match ty {
        Type::F16x2 => (Type::F16, true),
        Type::Bf16x2 => (Type::Bf16, true),
        other => (other, false),
    };
    let low = half(code, one, a & 0xFFFF, b & 0xFFFF, c & 0xFFFF);
    if packed {
        low | half(code, one, a >> 16, b >> 16, c >> 16) << 16
    } else {
        low
    }
}

fn half(code: u32, ty: Type, a: u32, b: u32, c: u32) -> u32 {
    let format = Format::of(ty);
    let (ftz, sat, nan_wins) = (code >> 5 & 1 != 0, code >> 6 & 1 != 0, code >> 4 & 1 != 0);
    let input = |bits: u32| if ftz { flush(bits.into(), ty) } else { bits.into() };
    let (a, b, c) = (input(a), input(b), input(c));
    // f64 represents every half exactly.
    let wide =
        |bits: u64| f64::from_bits(pack_number(unpack(bits, format), Format::of(Type::F64), Round::Rn));
    let (x, y, z) = (wide(a), wide(b), wide(c));
    let is_nan = |bits: u64| bits & !format.sign() > format.infinity();
    let narrow = |value: f64| pack_number(unpack(value.to_bits(), Format::of(Type::F64)), format, Round::Rn);
    // -0 is less than 0.
    let key = |bits: u64| {
        if bits & format.sign() != 0 {
            -((bits & !format.sign()) as i64) - 1
        } else {
            bits as i64
        }
    };
    let mut result = match code & 15 {
        // 53 bits are more than twice the bits of a half plus two, so rounding twice equals rounding once.
        0 => narrow(x + y),
        1 => narrow(x - y),
        2 => narrow(x * y),
        3 => narrow(multiply_add(x, y, z)),
        4 | 5 if is_nan(a) || is_nan(b) => match () {
            _ if nan_wins || (is_nan(a) && is_nan(b)) => format.nan(),
            _ if is_nan(a) => b,
            _ => a,
        },
        4 => {
            if key(a) < key(b) {
                a
            } else {
                b
            }
        }
        5 => {
            if key(a) > key(b) {
                a
            } else {
                b
            }
        }
        6 => return (a ^ format.sign()) as u32,
        7 => return (a & !format.sign()) as u32,
        _ => format.nan(),
    };
    if is_nan(result) {
        result = format.nan();
    }
    if ftz {
        result = flush(result, ty);
    }
    (if sat { saturate(result, ty) } else { result }) as u32
}

/// Computes x * y + z. The product is exact. If the sum is inexact, its last bit is set, so that a second
/// rounding is correct.
fn multiply_add(x: f64, y: f64, z: f64) -> f64 {
    let product = x * y;
    let sum = product + z;
    if !sum.is_finite() {
        return sum;
    }
    let of_z = sum - product;
    let error = (product - (sum - of_z)) + (z - of_z);
    if error == 0.0 || sum.to_bits() & 1 != 0 {
        return sum;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}
