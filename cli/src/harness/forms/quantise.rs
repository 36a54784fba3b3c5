//! Quantisation of rows as a separate step, in Rust that the compiler vectorises: the formulas and layouts of
//! `docs/quantized-rows.md`.

use fast_allreduce::{DType, Scaling};

use super::steps::{run, Step};
use crate::harness::norm::Float;

/// The scale of formats with a given one, and the global scale of NVFP4.
pub const GIVEN: f32 = 0.0625;
pub static GLOBAL: f32 = 3.7;

/// A float format of numbers: bits of the mantissa, exponent of the least normal number, largest number.
struct Format<const MANTISSA: u32, const LEAST: i32, const LARGEST: u32>;
type E4m3 = Format<3, -6, 448>;
type E2m1 = Format<1, 0, 6>;

impl<const MANTISSA: u32, const LEAST: i32, const LARGEST: u32> Format<MANTISSA, LEAST, LARGEST> {
    /// Rounds the magnitude of a number that is not a NaN to nearest, ties to even, and saturates.
    #[inline(always)]
    fn magnitude(x: f32) -> u32 {
        let shift = 23 - MANTISSA;
        let bits = (x.to_bits() & 0x7FFF_FFFF).min((LARGEST as f32).to_bits());
        let least = (127 + LEAST) as u32;
        let normal = ((bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift)
            .wrapping_sub((least - 1) << MANTISSA);
        // The last place of this number is the least number of the format.
        let magic = f32::from_bits((least + shift) << 23);
        let subnormal = (f32::from_bits(bits) + magic).to_bits() - magic.to_bits();
        if bits < least << 23 {
            subnormal
        } else {
            normal
        }
    }
}

/// How a scale follows from the greatest magnitude of its group.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Given,
    Float,
    E4m3,
    PowerAbove,
    PowerOfOcp,
}

fn rule_of(scaling: Scaling) -> Rule {
    match scaling {
        Scaling::Given => Rule::Given,
        Scaling::PerGroupUe8m0 | Scaling::Per32Ue8m0 => Rule::PowerAbove,
        _ if scaling.has_global() => Rule::E4m3,
        _ if scaling.scale_type() == DType::F32 => Rule::Float,
        _ => Rule::PowerOfOcp,
    }
}

/// Returns the bits of a scale, and the factor of the elements.
#[inline(always)]
fn scale_of(rule: Rule, greatest: f32, largest: f32) -> (u32, f32) {
    let power = |code: u32| (code, f32::from_bits((254 - code) << 23));
    match rule {
        Rule::Given => (0, 1.0 / GIVEN),
        Rule::Float => {
            let scale = (greatest / largest).max(f32::MIN_POSITIVE);
            (scale.to_bits(), 1.0 / scale)
        }
        Rule::E4m3 => {
            let code = E4m3::magnitude(greatest * (1.0 / 6.0) * GLOBAL);
            let value = match code >> 3 {
                0 => code as f32 * 2.0_f32.powi(-9),
                _ => f32::from_bits((code << 20) + (120 << 23)),
            };
            (code, if value == 0.0 { 0.0 } else { GLOBAL / value })
        }
        Rule::PowerAbove => power(((greatest / largest).max(f32::MIN_POSITIVE).to_bits() + 0x7F_FFFF) >> 23),
        Rule::PowerOfOcp => power((greatest.to_bits() >> 23).saturating_sub((largest.to_bits() >> 23) - 127)),
    }
}

/// Returns the index of the scale of a group, of `groups` in each of `rows` rows.
#[inline(always)]
fn place(scaling: Scaling, (row, group): (usize, usize), (rows, groups): (usize, usize)) -> usize {
    let (fours, stride) = (groups.div_ceil(4), rows.next_multiple_of(4));
    match scaling {
        Scaling::PerGroupColumns => group * stride + row,
        Scaling::PerGroupUe8m0 | Scaling::Per32Ue8m0 => (group / 4 * stride + row) * 4 + group % 4,
        Scaling::Nvfp4Tiled | Scaling::Mxfp8Tiled | Scaling::Mxfp4Tiled => {
            (row / 128 * fours + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
        }
        Scaling::Nvfp4Tiled8x4 | Scaling::Mxfp8Tiled8x4 => {
            (row / 8 * fours + group / 4) * 32 + row % 8 * 4 + group % 4
        }
        _ => row * groups + group,
    }
}

/// Returns whether the scales of ranks with `own_rows` rows each, one after the other, are those of all rows.
pub fn is_concatenation(scaling: Scaling, own_rows: usize) -> bool {
    match scaling {
        Scaling::PerGroupColumns | Scaling::PerGroupUe8m0 | Scaling::Per32Ue8m0 => false,
        Scaling::Nvfp4Tiled | Scaling::Mxfp8Tiled | Scaling::Mxfp4Tiled => own_rows % 128 == 0,
        Scaling::Nvfp4Tiled8x4 | Scaling::Mxfp8Tiled8x4 => own_rows % 8 == 0,
        _ => true,
    }
}

/// The scales of a message of `rows` rows of `hidden` elements, in words of four bytes.
#[derive(Clone, Copy)]
pub struct Words {
    pub scaling: Scaling,
    pub rows: usize,
    pub hidden: usize,
}

impl Words {
    /// Returns the number of words of a row.
    pub fn of_row(self) -> usize {
        let groups = self.hidden.div_ceil(self.scaling.group().unwrap_or(self.hidden));
        (groups * self.scaling.scale_type().size()).div_ceil(4)
    }

    /// Calls `body` with each row, the byte of the scales at which its first word is, and the distance to the next.
    fn for_each(self, mut body: impl FnMut(usize, usize, usize)) {
        let size = self.scaling.scale_type().size();
        let groups = self.of_row() * 4 / size;
        let at =
            |row: usize, word: usize| place(self.scaling, (row, word * 4 / size), (self.rows, groups)) * size;
        let step = at(0, 1) - at(0, 0);
        (0..self.rows).for_each(|row| body(row, at(row, 0), step));
    }

    /// Copies scales to rows of words.
    pub fn pack(self, scales: &[u8], packed: &mut [u8]) {
        let bytes = 4 * self.of_row();
        self.for_each(|row, at, step| {
            let words = packed[row * bytes..][..bytes].chunks_exact_mut(4);
            words.zip((at..).step_by(step)).for_each(|(to, at)| to.copy_from_slice(&scales[at..at + 4]));
        });
    }

    /// Copies rows of words to scales.
    pub fn unpack(self, packed: &[u8], scales: &mut [u8]) {
        let bytes = 4 * self.of_row();
        self.for_each(|row, at, step| {
            let words = packed[row * bytes..][..bytes].chunks_exact(4);
            words.zip((at..).step_by(step)).for_each(|(from, at)| scales[at..at + 4].copy_from_slice(from));
        });
    }
}

struct Quantise<'a, T> {
    from: &'a [T],
    shape: (usize, usize),
    scaling: Scaling,
    numbers: &'a mut [u8],
    scales: &'a mut [u8],
}

/// Quantises rows, whose shape is (rows, elements of a row), to e4m3 or e2m1.
pub fn quantise<T: Float>(
    from: &[T],
    shape: (usize, usize),
    scaling: Scaling,
    numbers: &mut [u8],
    scales: &mut [u8],
) {
    run(Quantise { from, shape, scaling, numbers, scales });
}

impl<T: Float> Step<T> for Quantise<'_, T> {
    #[inline(always)]
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), _: &impl Fn(&[f32], &mut [T])) {
        let Self { from, shape: (rows, hidden), scaling, numbers, scales } = self;
        let (rule, halves) = (rule_of(scaling), scaling.bits() == 4);
        let (group, largest) = (scaling.group().unwrap_or(hidden), if halves { 6.0 } else { 448.0 });
        let (groups, size) = (hidden.div_ceil(group), scaling.scale_type().size());
        let (mut wide, mut codes) = (vec![0.0_f32; hidden], vec![0_u8; hidden]);
        let bytes = numbers.chunks_exact_mut(scaling.number_bytes(hidden));
        for ((row, from), bytes) in from.chunks_exact(hidden).enumerate().zip(bytes) {
            widen(from, &mut wide);
            for (number, elements) in wide.chunks(group).enumerate() {
                let greatest = match rule {
                    Rule::Given => 0,
                    _ => elements.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7FFF_FFFF)),
                };
                let (bits, factor) = scale_of(rule, f32::from_bits(greatest), largest);
                if rule != Rule::Given {
                    let at = place(scaling, (row, number), (rows, groups)) * size;
                    scales[at..at + size].copy_from_slice(&bits.to_le_bytes()[..size]);
                }
                let codes = &mut codes[number * group..][..elements.len()];
                if halves {
                    let code = |x: f32| E2m1::magnitude(x) | x.to_bits() >> 31 << 3;
                    codes.iter_mut().zip(elements).for_each(|(to, x)| *to = code(x * factor) as u8);
                } else {
                    let code = |x: f32| E4m3::magnitude(x) | x.to_bits() >> 31 << 7;
                    codes.iter_mut().zip(elements).for_each(|(to, x)| *to = code(x * factor) as u8);
                }
            }
            if rule == Rule::PowerAbove {
                // The rest of the row's last word.
                for number in groups..groups.next_multiple_of(4) {
                    scales[place(scaling, (row, number), (rows, groups))] = 0;
                }
            }
            match halves {
                true => bytes
                    .iter_mut()
                    .zip(codes.chunks_exact(2))
                    .for_each(|(to, two)| *to = two[0] | two[1] << 4),
                false => bytes.copy_from_slice(&codes),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::inputs::Inputs;
    use fast_allreduce::ReduceOp;
    use fast_allreduce_oracle::quantized_rows::Becomes;

    /// The bits are those of the reference in every format, except bytes that a format does not write.
    #[test]
    fn numbers_and_scales_are_those_of_the_formats() {
        for (number, scaling) in Scaling::ALL.into_iter().enumerate() {
            let (rows, hidden) = (9, 640);
            let inputs = Inputs::new(7, number as u64, 1, ReduceOp::Sum);
            // From subnormal numbers to saturated ones.
            let from: Vec<f32> = (0..rows * hidden)
                .map(|i| inputs.value::<f32>(0, i) * 2.0_f32.powi((i / 128 % 40) as i32 - 30))
                .collect();
            let dtype = if scaling.bits() == 4 { DType::U8 } else { DType::F8E4M3 };
            let expected = Becomes(dtype, scaling).quantize(&from, hidden);
            let mut numbers = vec![0; scaling.number_bytes(from.len())];
            let mut scales = expected.scales_before.clone();
            quantise(&from, (rows, hidden), scaling, &mut numbers, &mut scales);
            assert!(numbers == expected.numbers && scales == expected.scales, "{scaling}");
        }
    }
}
