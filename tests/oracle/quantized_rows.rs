//! Quantised rows (numbers of 8 and 4 bits with scales): expected results, from the formulas in
//! `docs/quantized-rows.md`.

use fast_allreduce::{DType, RawQuantizedRows, Scaling};

use crate::message::poison;
use crate::number::{e4m3, e5m2, F8E4M3, F8E5M2};

/// Format of quantised rows, and the type of their numbers.
#[derive(Debug, Clone, Copy)]
pub struct Becomes(pub DType, pub Scaling);

/// Quantised rows as bytes: the numbers; the scales, as they are before the call and after it; the scale that the call
/// reads.
pub struct QuantizedRows {
    pub numbers: Vec<u8>,
    pub scales: Vec<u8>,
    pub scales_before: Vec<u8>,
    pub global: Option<Vec<u8>>,
}

/// The scale that is passed to calls.
const GIVEN: f32 = 0.0625;
/// The scale that is passed to calls with NVFP4: most blocks of normalised rows get a normal scale, some do not.
const GLOBAL: f32 = 3.7;

/// What a byte has that a call does not write.
const PADDING: u8 = 0xA5;

/// How a scale follows from its elements.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Given,
    Float,
    E4m3,
    /// The least power of two by which no element saturates.
    PowerAbove,
    /// The largest power of two in the greatest magnitude, divided by the largest in the type of the numbers.
    PowerOfOcp,
}

/// The order of scales in memory.
#[derive(Clone, Copy)]
enum Order {
    Rows,
    /// Columns of floats.
    Columns,
    /// Columns of words, each with the bytes of four groups.
    Words,
    /// Tiles of this number of rows, a multiple of 32 or less, and 4 groups.
    Tiles(usize),
}

/// Returns the elements that share a scale (0: a row, or all), the rule, and the order of the scales.
fn format_of(scaling: Scaling) -> (usize, Rule, Order) {
    match scaling {
        Scaling::Given => (0, Rule::Given, Order::Rows),
        Scaling::PerRow => (0, Rule::Float, Order::Rows),
        Scaling::PerGroup => (128, Rule::Float, Order::Rows),
        Scaling::PerGroupColumns => (128, Rule::Float, Order::Columns),
        Scaling::PerGroupUe8m0 => (128, Rule::PowerAbove, Order::Words),
        Scaling::Per32Ue8m0 => (32, Rule::PowerAbove, Order::Words),
        Scaling::Nvfp4 => (16, Rule::E4m3, Order::Rows),
        Scaling::Nvfp4Tiled => (16, Rule::E4m3, Order::Tiles(128)),
        Scaling::Nvfp4Tiled8x4 => (16, Rule::E4m3, Order::Tiles(8)),
        Scaling::Mxfp8 | Scaling::Mxfp4 => (32, Rule::PowerOfOcp, Order::Rows),
        Scaling::Mxfp8Tiled | Scaling::Mxfp4Tiled => (32, Rule::PowerOfOcp, Order::Tiles(128)),
        Scaling::Mxfp8Tiled8x4 => (32, Rule::PowerOfOcp, Order::Tiles(8)),
        other => unreachable!("a format that the oracle does not know: {other:?}"),
    }
}

impl Order {
    /// Returns the index of the scale of a group, of `groups` in each of `rows` rows.
    fn index(self, (row, group): (usize, usize), (rows, groups): (usize, usize)) -> usize {
        let stride = rows.next_multiple_of(4);
        match self {
            Self::Rows => row * groups + group,
            Self::Columns => group * stride + row,
            // An array of [words of a row][rows][4].
            Self::Words => (group / 4 * stride + row) * 4 + group % 4,
            // An array of [tiles of rows][tiles of 4 groups][32 or 8][4 or 1][4].
            Self::Tiles(of) => {
                let (lanes, tile) = (of.min(32), row / of * groups.div_ceil(4) + group / 4);
                ((tile * lanes + row % lanes) * (of / lanes) + row % of / lanes) * 4 + group % 4
            }
        }
    }

    /// Returns the number of scales with all padding.
    fn len(self, rows: usize, groups: usize) -> usize {
        match self {
            _ if rows * groups == 0 => 0,
            Self::Rows => rows * groups,
            Self::Columns => self.index((rows - 1, groups - 1), (rows, groups)) + 1,
            Self::Words => (self.index((rows - 1, groups - 1), (rows, groups)) / 4 + 1) * 4,
            Self::Tiles(of) => rows.div_ceil(of) * groups.div_ceil(4) * 4 * of,
        }
    }
}

impl Becomes {
    /// Returns whether the format allows rows of this length.
    pub fn takes(self, hidden: usize) -> bool {
        let (group, rule, _) = format_of(self.1);
        matches!(rule, Rule::Given | Rule::Float) || hidden % group == 0
    }

    pub fn quantize(self, rows: &[f32], hidden: usize) -> QuantizedRows {
        let Self(dtype, scaling) = self;
        let (group, rule, order) = format_of(scaling);
        let each = if group == 0 { hidden } else { group };
        let shape = (rows.len() / hidden.max(1), hidden.div_ceil(each.max(1)));
        let size = if matches!(rule, Rule::Given | Rule::Float) { 4 } else { 1 };
        let given = rule == Rule::Given;
        let len = if given { 1 } else { order.len(shape.0, shape.1) };
        assert_eq!(scaling.scales(shape.0, hidden), len, "{scaling:?} of {shape:?} groups");
        let mut scales = vec![PADDING; len * size];
        let mut scales_before = scales.clone();
        let mut codes = Vec::new();
        for (number, elements) in rows.chunks(hidden).flat_map(|row| row.chunks(each)).enumerate() {
            let scale = Scale::of(elements, dtype, rule);
            codes.extend(elements.iter().map(|&element| code_of(element * scale.factor, dtype)));
            for (&element, &code) in elements.iter().zip(&codes[codes.len() - elements.len()..]) {
                match rule {
                    Rule::Given | Rule::Float => check_by_formula(element, code, scale.value, dtype),
                    Rule::E4m3 => check_block(element, code, scale.value),
                    Rule::PowerAbove | Rule::PowerOfOcp => check_power(element, code, scale.value, dtype),
                }
            }
            if given {
                continue;
            }
            let at = order.index((number / shape.1, number % shape.1), shape) * size;
            scales[at..at + size].copy_from_slice(&scale.bytes[..size]);
            scales_before[at..at + size].copy_from_slice(&poison(&scale.bytes[..size]));
            if matches!(order, Order::Words) && (number + 1) % shape.1 == 0 {
                scales[at + 1..(at + 1).next_multiple_of(4)].fill(0);
            }
        }
        if given {
            scales = GIVEN.to_le_bytes().into();
            scales_before.clone_from(&scales);
        }
        let numbers = match dtype {
            DType::U8 => codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect(),
            _ => codes,
        };
        let global = (rule == Rule::E4m3).then(|| GLOBAL.to_le_bytes().into());
        QuantizedRows { numbers, scales, scales_before, global }
    }

    pub fn at(self, numbers: u64, scales: u64, global: u64) -> RawQuantizedRows {
        let Self(dtype, scaling) = self;
        RawQuantizedRows { scaling, dtype, numbers, scales, global }
    }
}

/// A scale in its type (in the first bytes), its value, and the factor of elements.
struct Scale {
    bytes: [u8; 4],
    value: f32,
    factor: f32,
}

impl Scale {
    fn of(elements: &[f32], dtype: DType, rule: Rule) -> Self {
        let float = |value: f32| Self { bytes: value.to_le_bytes(), value, factor: 1.0 / value };
        let power = |exponent: Option<i32>| match exponent {
            None => Self { bytes: [255, 0, 0, 0], value: f32::NAN, factor: f32::NAN },
            Some(exponent) => Self {
                bytes: [u8::try_from(exponent + 127).unwrap(), 0, 0, 0],
                value: 2.0_f64.powi(exponent) as f32,
                factor: 2.0_f64.powi(-exponent) as f32,
            },
        };
        match rule {
            Rule::Given => float(GIVEN),
            Rule::Float => float(scale_of(elements, dtype)),
            Rule::E4m3 => {
                let code = scale_of_block(elements);
                let value = F8E4M3::from_bits(code).to_f32();
                let factor = if value == 0.0 { 0.0 } else { GLOBAL / value };
                Self { bytes: [code, 0, 0, 0], value, factor }
            }
            Rule::PowerAbove => power(power_above(scale_of(elements, dtype))),
            Rule::PowerOfOcp => power(power_of_ocp(elements, dtype)),
        }
    }
}

/// Returns the exponent of the least power of two that is not below a value.
fn power_above(value: f32) -> Option<i32> {
    value.is_finite().then(|| (-126..).find(|&e| 2.0_f64.powi(e) >= f64::from(value)).unwrap())
}

/// Returns the exponent of the largest power of two that is not above the greatest magnitude, less that of the type's
/// largest number; at least -127.
fn power_of_ocp(elements: &[f32], dtype: DType) -> Option<i32> {
    let greatest = elements.iter().fold(0.0_f32, |greatest, element| greatest.max(element.abs()));
    if elements.iter().any(|element| !element.is_finite()) {
        return None;
    }
    let below =
        |value: f32| (-150..).take_while(|&e| 2.0_f64.powi(e) <= f64::from(value)).last().unwrap_or(-150);
    Some((below(greatest) - below(largest(dtype))).max(-127))
}

fn scale_of_block(block: &[f32]) -> u8 {
    if block.iter().any(|value| value.is_nan()) {
        return 0x7F;
    }
    let greatest = block.iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
    e4m3((greatest * (1.0 / 6.0_f32) * GLOBAL).min(448.0)).to_bits()
}

/// Magnitudes of the 4-bit floats of the OCP Microscaling Formats Specification 1.0.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Rounds to nearest, ties to the even code; NaN becomes 6.
fn e2m1(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let distance = |code: u8| (E2M1[usize::from(code)] - value.abs().min(6.0)).abs();
    let nearest = (1..8_u8).fold(0, |nearest, code| match distance(code).total_cmp(&distance(nearest)) {
        std::cmp::Ordering::Less => code,
        std::cmp::Ordering::Equal if code % 2 == 0 => code,
        _ => nearest,
    });
    u8::from(value.is_sign_negative()) << 3 | nearest
}

/// Asserts that number x scale / global scale is off by at most half of the distance between numbers at that value,
/// except where it saturates. The block's largest number may be off by the error of its scale: a sixteenth, or half of
/// the least e4m3.
fn check_block(element: f32, code: u8, scale: f32) {
    let (element, scale, global) = (f64::from(element), f64::from(scale), f64::from(GLOBAL));
    let ideal = (element * global / scale).abs();
    if scale.is_nan() || scale == 0.0 || !ideal.is_finite() {
        let half = 2.0_f64.powi(-10);
        assert!(
            scale != 0.0 || element.is_nan() || element.abs() * global / 6.0 <= half * 1.001,
            "{element}"
        );
        return;
    }
    let number = f64::from(E2M1[usize::from(code & 7)]);
    assert!((code & 8 != 0) == element.is_sign_negative(), "{element} as {code}");
    let gap = if ideal < 2.0 {
        0.5
    } else if ideal < 4.0 {
        1.0
    } else {
        2.0
    };
    let is_saturated = ideal > 6.0 && number == 6.0;
    assert!(
        is_saturated || (ideal - number).abs() <= gap / 2.0 * 1.000_001,
        "{element} as {code} by {scale}"
    );
    assert!(
        scale >= 448.0 || ideal <= 6.0 * (1.0 + 1.0 / 16.0) || scale < 2.0_f64.powi(-6),
        "{element} by {scale}"
    );
}

fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::U8 => 6.0,
        DType::I8 => 127.0,
        DType::F8E4M3 => 448.0,
        _ => 57344.0,
    }
}

fn scale_of(group: &[f32], dtype: DType) -> f32 {
    if group.iter().any(|value| value.is_nan()) {
        return f32::from_bits(0x7FFF_FFFF);
    }
    let greatest = group.iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
    (greatest / largest(dtype)).max(f32::MIN_POSITIVE)
}

fn code_of(value: f32, dtype: DType) -> u8 {
    let saturated = value.clamp(-largest(dtype), largest(dtype));
    match dtype {
        DType::U8 => e2m1(value),
        // NaN becomes 0.
        DType::I8 => value.round_ties_even().clamp(-128.0, 127.0) as i8 as u8,
        DType::F8E4M3 => e4m3(saturated).to_bits(),
        _ => e5m2(saturated).to_bits(),
    }
}

/// Asserts that number x scale is off by at most half of the format's last place at that value, unless it saturates.
fn check_by_formula(value: f32, code: u8, scale: f32, dtype: DType) {
    let (value, scale) = (f64::from(value), f64::from(scale));
    let in_range = value.abs() <= f64::from(largest(dtype)) * scale;
    if !in_range || !scale.is_finite() {
        return;
    }
    let (number, place) = number_of(code, value / scale, dtype);
    // After two roundings in f32.
    let bound = place * scale / 2.0 + value.abs() * 2.0_f64.powi(-22);
    assert!((number * scale - value).abs() <= bound, "{value} as {number} times {scale}");
}

/// Returns the value of a number, and the unit in the last place of its type at a value near it.
fn number_of(code: u8, near: f64, dtype: DType) -> (f64, f64) {
    let place = |mantissa: f64, least: f64| 2.0_f64.powf(near.abs().log2().floor().max(least) - mantissa);
    match dtype {
        DType::U8 => {
            let magnitude = f64::from(E2M1[usize::from(code & 7)]);
            (if code & 8 == 0 { magnitude } else { -magnitude }, place(1.0, 0.0))
        }
        DType::I8 => (f64::from(code as i8), 1.0),
        DType::F8E4M3 => (F8E4M3::from_bits(code).to_f64(), place(3.0, -6.0)),
        _ => (F8E5M2::from_bits(code).to_f64(), place(2.0, -14.0)),
    }
}

/// Asserts that number x scale is off by at most half of the type's last place at that value, or is the largest number
/// of a magnitude that rounds to more. Scaling by a power of two has no error.
fn check_power(value: f32, code: u8, scale: f32, dtype: DType) {
    let (value, scale) = (f64::from(value), f64::from(scale));
    if scale.is_nan() {
        return;
    }
    let (ideal, largest) = (value / scale, f64::from(largest(dtype)));
    let (number, place) = number_of(code, ideal, dtype);
    let is_saturated = ideal.abs() > largest && number == largest.copysign(ideal);
    assert!(is_saturated || (number - ideal).abs() <= place / 2.0, "{value} as {number} times {scale}");
    assert!(ideal.abs() < 2.0 * largest, "{value} by {scale}");
}
