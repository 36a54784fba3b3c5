//! Conversions between numbers and arithmetic on halves, in integers: exact, then rounded once.

mod half;

use crate::ir::{AtomOp, Cvt, Round};
use crate::types::Type;

pub(crate) use half::{float, float_code};

/// A binary floating-point format: bits of its fraction and of its exponent.
#[derive(Clone, Copy)]
struct Format {
    fraction: u32,
    exponent: u32,
}

impl Format {
    fn of(ty: Type) -> Self {
        match ty {
            Type::F16 => Self { fraction: 10, exponent: 5 },
            Type::Bf16 => Self { fraction: 7, exponent: 8 },
            Type::F32 => Self { fraction: 23, exponent: 8 },
            _ => Self { fraction: 52, exponent: 11 },
        }
    }

    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn sign(self) -> u64 {
        1 << (self.fraction + self.exponent)
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.fraction
    }

    /// Returns the NaN that instructions return.
    fn nan(self) -> u64 {
        match self.fraction {
            // GPUs keep as much of the NaN as they can; PTX leaves it open.
            52 => 0x7FF8_0000_0000_0000,
            _ => self.sign() - 1,
        }
    }
}

/// An exact number: `magnitude` * 2^`exponent`.
#[derive(Clone, Copy)]
enum Number {
    Nan,
    Infinite { negative: bool },
    Finite { negative: bool, magnitude: u128, exponent: i32 },
}

fn unpack(bits: u64, format: Format) -> Number {
    let negative = bits & format.sign() != 0;
    let fraction = bits & ((1 << format.fraction) - 1);
    let exponent = (bits >> format.fraction & ((1 << format.exponent) - 1)) as i32;
    let least = 1 - format.bias() - format.fraction as i32;
    match exponent {
        0 => Number::Finite { negative, magnitude: fraction.into(), exponent: least },
        e if e == (1 << format.exponent) - 1 && fraction != 0 => Number::Nan,
        e if e == (1 << format.exponent) - 1 => Number::Infinite { negative },
        e => Number::Finite {
            negative,
            magnitude: u128::from(fraction | 1 << format.fraction),
            exponent: least + e - 1,
        },
    }
}

/// Removes the lowest `drop` bits of `magnitude`, and rounds.
fn round(magnitude: u128, drop: u32, negative: bool, how: Round) -> u128 {
    if drop == 0 {
        return magnitude;
    }
    if drop > 127 {
        // `drop` exceeds the width: the value is less than half of the lowest remaining bit.
        let up = match how {
            Round::Rp => !negative,
            Round::Rm => negative,
            _ => false,
        };
        return u128::from(up && magnitude != 0);
    }
    let kept = magnitude >> drop;
    let rest = magnitude & ((1 << drop) - 1);
    let half = 1u128 << (drop - 1);
    let up = match how {
        Round::Rn => rest > half || (rest == half && kept & 1 != 0),
        Round::Rna => rest >= half,
        Round::Rz => false,
        Round::Rp => rest != 0 && !negative,
        Round::Rm => rest != 0 && negative,
    };
    kept + u128::from(up)
}

fn pack(negative: bool, magnitude: u128, exponent: i32, format: Format, how: Round) -> u64 {
    let sign = if negative { format.sign() } else { 0 };
    if magnitude == 0 {
        return sign;
    }
    let least = 1 - format.bias() - format.fraction as i32;
    let width = 128 - magnitude.leading_zeros() as i32;
    // Exponent of the lowest remaining bit.
    let lowest = (exponent + width - 1 - format.fraction as i32).max(least);
    let kept = if lowest > exponent {
        round(magnitude, (lowest - exponent) as u32, negative, how)
    } else {
        magnitude << (exponent - lowest)
    };
    // A carry out of the fraction increments the exponent.
    let bits = kept + (((lowest - least) as u128) << format.fraction);
    if bits < u128::from(format.infinity()) {
        return sign | bits as u64;
    }
    let to_infinity = match how {
        Round::Rn | Round::Rna => true,
        Round::Rz => false,
        Round::Rp => !negative,
        Round::Rm => negative,
    };
    sign | (format.infinity() - u64::from(!to_infinity))
}

fn pack_number(number: Number, format: Format, how: Round) -> u64 {
    match number {
        Number::Nan => format.nan(),
        Number::Infinite { negative } => format.infinity() | if negative { format.sign() } else { 0 },
        Number::Finite { negative, magnitude, exponent } => pack(negative, magnitude, exponent, format, how),
    }
}

const TYPES: [Type; 23] = [
    Type::Pred,
    Type::B8,
    Type::B16,
    Type::B32,
    Type::B64,
    Type::B128,
    Type::U8,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S8,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F16,
    Type::F16x2,
    Type::Bf16,
    Type::Bf16x2,
    Type::E4m3x2,
    Type::E5m2x2,
    Type::F32,
    Type::F64,
    Type::B32,
];
const ROUNDS: [Round; 5] = [Round::Rn, Round::Rz, Round::Rm, Round::Rp, Round::Rna];

fn index_of(ty: Type) -> u32 {
    TYPES.iter().position(|&other| other == ty).unwrap_or(0) as u32
}

/// Encodes a conversion for compiled code.
pub(crate) fn convert_code(how: &Cvt) -> u32 {
    let round =
        how.round.map_or(0, |round| ROUNDS.iter().position(|&other| other == round).unwrap_or(0)) as u32;
    let flags = [how.integral, how.ftz, how.sat, how.relu].into_iter().enumerate();
    let flags: u32 = flags.map(|(i, flag)| u32::from(flag) << i).sum();
    index_of(how.to) | index_of(how.from) << 5 | round << 10 | flags << 13
}

fn decode_convert(code: u32) -> Cvt {
    let flag = |i: u32| code >> (13 + i) & 1 != 0;
    Cvt {
        to: TYPES[(code & 31) as usize],
        from: TYPES[(code >> 5 & 31) as usize],
        round: Some(ROUNDS[(code >> 10 & 7) as usize]),
        integral: flag(0),
        ftz: flag(1),
        sat: flag(2),
        relu: flag(3),
    }
}

/// Converts the value in the low bits of `bits`, which are extended by the signedness of its type.
pub(crate) extern "C" fn convert(code: u32, bits: u64) -> u64 {
    let how = decode_convert(code);
    if how.to == Type::F32 && how.from == Type::F16 && code >> 13 == 0 {
        return f16_to_f32(bits as u16).into();
    }
    convert_exactly(&how, bits)
}

/// Converts without the fast path for frequent conversions.
pub(crate) fn convert_exactly(how: &Cvt, bits: u64) -> u64 {
    let round = how.round.unwrap_or(Round::Rn);
    let mut number = if how.from.is_float() {
        let bits = if how.ftz && how.from == Type::F32 { flush(bits, Type::F32) } else { bits };
        unpack(bits, Format::of(how.from))
    } else {
        let value = if how.from.is_signed() { i128::from(bits as i64) } else { i128::from(bits) };
        Number::Finite { negative: value < 0, magnitude: value.unsigned_abs(), exponent: 0 }
    };
    if how.integral {
        number = to_integral(number, round);
    }
    if how.to.is_f8_pair() {
        return to_f8(f32::from_bits(bits as u32), how.to);
    }
    if !how.to.is_float() {
        return to_integer(number, how, round);
    }
    let format = Format::of(how.to);
    let mut packed = pack_number(number, format, round);
    if how.ftz && how.to == Type::F32 {
        packed = flush(packed, Type::F32);
    }
    if how.relu && packed & format.sign() != 0 {
        packed = 0;
    }
    if how.sat {
        packed = saturate(packed, how.to);
    }
    packed
}

/// Converts to an 8-bit float: the nearest one, ties to even, at most the largest; a NaN becomes the one without a
/// sign.
fn to_f8(value: f32, pair: Type) -> u64 {
    let (fraction, bias, largest) = if pair == Type::E4m3x2 { (3, 7, 0x7E) } else { (2, 15, 0x7B) };
    let number = |code: u64| {
        let (exponent, rest) = ((code >> fraction) as i32, code & ((1 << fraction) - 1));
        let magnitude = if exponent == 0 { rest } else { rest | 1 << fraction };
        magnitude as f64 * 2f64.powi(exponent.max(1) - bias - fraction)
    };
    if value.is_nan() {
        return 0x7F;
    }
    let (sign, magnitude) = (u64::from(value.is_sign_negative()) << 7, f64::from(value.abs()));
    // The least code whose number is not below the value.
    let mut above = 0;
    while above < largest && number(above) < magnitude {
        above += 1;
    }
    let below = above.saturating_sub(1);
    let (up, down) = (number(above) - magnitude, magnitude - number(below));
    let takes_up = up < down || (up == down && above % 2 == 0);
    sign | if takes_up || above == below { above } else { below }
}

fn to_integral(number: Number, how: Round) -> Number {
    match number {
        Number::Finite { negative, magnitude, exponent } if exponent < 0 => Number::Finite {
            negative,
            magnitude: round(magnitude, exponent.unsigned_abs(), negative, how),
            exponent: 0,
        },
        other => other,
    }
}

/// Converts to an integer. Values out of range saturate; a NaN becomes 0.
fn to_integer(number: Number, how: &Cvt, round: Round) -> u64 {
    let bits = how.to.bits();
    let (low, high) = match how.to.is_signed() {
        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        false => (0, (1i128 << bits) - 1),
    };
    let value = match to_integral(number, round) {
        Number::Nan => 0,
        Number::Infinite { negative } => {
            if negative {
                low
            } else {
                high
            }
        }
        Number::Finite { negative, magnitude, exponent } => {
            let width = 128 - magnitude.leading_zeros() as i32;
            let large = if magnitude == 0 {
                0
            } else if width + exponent.max(0) > 100 {
                i128::MAX
            } else {
                (magnitude << exponent.max(0)) as i128
            };
            if negative {
                -large
            } else {
                large
            }
        }
    };
    let wraps = !how.sat && !how.from.is_float();
    (if wraps { value } else { value.clamp(low, high) }) as u64
}

fn flush(bits: u64, ty: Type) -> u64 {
    let format = Format::of(ty);
    if bits & format.infinity() == 0 {
        bits & format.sign()
    } else {
        bits
    }
}

fn saturate(bits: u64, ty: Type) -> u64 {
    let format = Format::of(ty);
    let one = (format.bias() as u64) << format.fraction;
    let is_nan = bits & !format.sign() > format.infinity();
    match bits {
        _ if is_nan || bits & format.sign() != 0 => 0,
        _ => bits.min(one),
    }
}

/// Converts exactly; a NaN becomes the NaN of f32 instructions.
fn f16_to_f32(bits: u16) -> u32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7FFF);
    match rest {
        0x0400..=0x7BFF => sign | ((rest << 13) + (112 << 23)),
        0x7C00 => sign | 0x7F80_0000,
        0x7C01.. => 0x7FFF_FFFF,
        // Subnormals are multiples of 2^-24.
        _ => sign | (rest as f32 / 16_777_216.0).to_bits(),
    }
}

/// Adds as GPUs do, NaNs included.
pub(crate) fn add_f32(a: u32, b: u32) -> u32 {
    let sum = f32::from_bits(a) + f32::from_bits(b);
    if sum.is_nan() {
        0x7FFF_FFFF
    } else {
        sum.to_bits()
    }
}

/// Adds each of the packed halves.
pub(crate) fn add_halves(ty: Type, a: u32, b: u32) -> u32 {
    float(float_code(crate::ir::FloatOp::Add, ty, false, false), a, b, 0)
}

/// Sums packed halves in f32, and rounds once.
pub(crate) fn sum_of_halves(ty: Type, packed: impl Iterator<Item = u32>) -> u32 {
    let format = Format::of(if ty == Type::F16x2 { Type::F16 } else { Type::Bf16 });
    let wide = Format::of(Type::F32);
    let mut sums = [None; 2];
    for bits in packed {
        for (sum, half) in sums.iter_mut().zip([bits & 0xFFFF, bits >> 16]) {
            let term = pack_number(unpack(half.into(), format), wide, Round::Rn) as u32;
            *sum = Some(sum.map_or(term, |sum| add_f32(sum, term)));
        }
    }
    let [low, high] =
        sums.map(|sum| pack_number(unpack(sum.unwrap_or(0).into(), wide), format, Round::Rn) as u32);
    low | high << 16
}

/// Encodes an atomic that the CPU has no instruction for.
pub(crate) fn atomic_code(op: AtomOp, ty: Type) -> u32 {
    match (op, ty) {
        (AtomOp::Inc, _) => 0,
        (AtomOp::Dec, _) => 1,
        (_, Type::F32) => 2,
        _ => 3,
    }
}

/// Performs an atomic.
///
/// # Safety
///
/// `address` has been checked: live, aligned memory of the operand's size.
pub(crate) unsafe extern "C" fn atomic(code: u32, address: u64, operand: u64) -> u64 {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    let order = Ordering::SeqCst;
    if code == 3 {
        // SAFETY: the caller vouches for the address.
        let word = unsafe { AtomicU64::from_ptr(address as *mut u64) };
        let add = |bits| Some((f64::from_bits(bits) + f64::from_bits(operand)).to_bits());
        return word.fetch_update(order, order, add).unwrap_or_else(|bits| bits);
    }
    // SAFETY: the caller vouches for the address.
    let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
    let limit = operand as u32;
    let next = |old: u32| {
        Some(match code {
            0 if old >= limit => 0,
            0 => old + 1,
            1 if old == 0 || old > limit => limit,
            1 => old - 1,
            _ => add_f32(old, limit),
        })
    };
    word.fetch_update(order, order, next).unwrap_or_else(|bits| bits).into()
}
