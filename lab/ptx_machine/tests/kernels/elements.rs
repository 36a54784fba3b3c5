//! Element types, and their exact sums.

use crate::abi::*;

#[derive(Clone, Copy)]
pub struct Element {
    /// Name in kernels.
    pub name: &'static str,
    pub code: FaDtype,
    pub bytes: usize,
    /// Inputs are integers from -most to most, which the type represents exactly.
    most: i64,
    /// Returns the sum of inputs in the type, rounded once.
    bits: fn(i64) -> u64,
}

pub const F16: Element =
    Element { name: "f16", code: FA_F16, bytes: 2, most: 2047, bits: |sum| rounded(sum, 10, 15) };
pub const BF16: Element =
    Element { name: "bf16", code: FA_BF16, bytes: 2, most: 255, bits: |sum| rounded(sum, 7, 127) };
pub const F32: Element =
    Element { name: "f32", code: FA_F32, bytes: 4, most: 1 << 20, bits: |sum| (sum as f32).to_bits().into() };
pub const U8: Element =
    Element { name: "integers", code: FA_U8, bytes: 1, most: 15, bits: |sum| sum as u8 as u64 };
pub const I64: Element =
    Element { name: "integers", code: FA_I64, bytes: 8, most: 1 << 60, bits: |sum| sum as u64 };

/// Converts to a 16-bit float, given the bits of its fraction and the bias of its exponent: to nearest,
/// ties to even.
fn rounded(value: i64, fraction: u32, bias: u32) -> u64 {
    let magnitude = value.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let top = magnitude.ilog2();
    // Fraction and the bit above it, times a power of two.
    let kept = if top <= fraction {
        magnitude << (fraction - top)
    } else {
        let drop = top - fraction;
        let (kept, rest, half) = (magnitude >> drop, magnitude & ((1 << drop) - 1), 1 << (drop - 1));
        kept + u64::from(rest > half || (rest == half && kept & 1 != 0))
    };
    // A carry into the exponent is correct here.
    u64::from(value < 0) << 15 | ((u64::from(top + bias) << fraction) + kept - (1 << fraction))
}

impl Element {
    /// Returns the bytes of a number that the type represents exactly.
    pub fn number(&self, value: i64) -> Vec<u8> {
        (self.bits)(value).to_le_bytes()[..self.bytes].into()
    }

    /// Returns a value that is scattered over the range.
    fn value(&self, rank: usize, turn: usize, i: usize) -> i64 {
        let mixed = ((i * 31 + rank * 17 + turn * 5 + 1) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let value = (mixed % (2 * self.most as u64 + 1)) as i64 - self.most;
        // Unsigned values would wrap around otherwise, and so would their sums.
        if self.name.starts_with('u') {
            value.abs()
        } else {
            value
        }
    }

    fn collect(&self, values: impl Iterator<Item = i64>) -> Vec<u8> {
        values.flat_map(|value| (self.bits)(value).to_le_bytes().into_iter().take(self.bytes)).collect()
    }

    pub fn input(&self, rank: usize, turn: usize, count: usize) -> Vec<u8> {
        self.collect((0..count).map(|i| self.value(rank, turn, i)))
    }

    pub fn sums(&self, ranks: usize, turn: usize, count: usize) -> Vec<u8> {
        self.collect((0..count).map(|i| (0..ranks).map(|rank| self.value(rank, turn, i)).sum()))
    }
}
