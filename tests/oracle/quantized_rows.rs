//! Quantised rows (numbers of 8 and 4 bits with scales): expected results, from the formulas in `docs/fused.md`.

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

impl Becomes {
    /// Returns whether the format allows rows of this length.
    pub fn takes(self, hidden: usize) -> bool {
        self.1.bits() == 8 || hidden % 16 == 0
    }

    pub fn quantize(self, rows: &[f32], hidden: usize) -> QuantizedRows {
        let Self(dtype, scaling) = self;
        match scaling {
            Scaling::Nvfp4 | Scaling::Nvfp4Tiled => nvfp4(rows, hidden, scaling),
            _ => bytes(rows, hidden, dtype, scaling),
        }
    }

    pub fn at(self, numbers: u64, scales: u64, global: u64) -> RawQuantizedRows {
        let Self(dtype, scaling) = self;
        RawQuantizedRows { scaling, dtype, numbers, scales, global }
    }
}

fn bytes(rows: &[f32], hidden: usize, dtype: DType, scaling: Scaling) -> QuantizedRows {
    let each = match scaling {
        Scaling::PerGroup => 128,
        _ => hidden,
    };
    let (mut numbers, mut scales) = (Vec::new(), Vec::new());
    for group in rows.chunks(hidden).flat_map(|row| row.chunks(each)) {
        let scale = if scaling == Scaling::Given { GIVEN } else { scale_of(group, dtype) };
        scales.push(scale);
        for &value in group {
            let code = code_of(value * (1.0 / scale), dtype);
            check_by_formula(value, code, scale, dtype);
            numbers.push(code);
        }
    }
    if scaling == Scaling::Given {
        scales = vec![GIVEN];
    }
    let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let scales_before = if scaling == Scaling::Given { scales.clone() } else { poison(&scales) };
    QuantizedRows { numbers, scales, scales_before, global: None }
}

fn nvfp4(rows: &[f32], hidden: usize, scaling: Scaling) -> QuantizedRows {
    const PADDING: u8 = 0xA5;
    let blocks = hidden / 16;
    let mut numbers = Vec::new();
    let mut scales = vec![PADDING; scaling.scales(rows.len() / hidden.max(1), hidden)];
    let mut scales_before = scales.clone();
    for (number, block) in rows.chunks(16).enumerate() {
        let (row, column) = (number / blocks, number % blocks);
        let at = match scaling {
            Scaling::Nvfp4 => number,
            // An array of [tiles of 128 rows][tiles of 4 blocks][32][4][4].
            _ => {
                let tile = row / 128 * blocks.div_ceil(4) + column / 4;
                ((tile * 32 + row % 32) * 4 + row % 128 / 32) * 4 + column % 4
            }
        };
        let scale = scale_of_block(block);
        (scales[at], scales_before[at]) = (scale, !scale);
        let value = F8E4M3::from_bits(scale).to_f32();
        let inverse = if value == 0.0 { 0.0 } else { GLOBAL / value };
        let codes: Vec<u8> = block.iter().map(|element| e2m1(element * inverse)).collect();
        for (element, &code) in block.iter().zip(&codes) {
            check_block(*element, code, value);
        }
        numbers.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4));
    }
    QuantizedRows { numbers, scales, scales_before, global: Some(GLOBAL.to_le_bytes().into()) }
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
    let place = |mantissa: f64, least: f64| {
        let exponent = ((value / scale).abs().log2().floor()).max(least);
        2.0_f64.powf(exponent - mantissa)
    };
    let (number, place) = match dtype {
        DType::I8 => (f64::from(code as i8), 1.0),
        DType::F8E4M3 => (F8E4M3::from_bits(code).to_f64(), place(3.0, -6.0)),
        _ => (F8E5M2::from_bits(code).to_f64(), place(2.0, -14.0)),
    };
    // After two roundings in f32.
    let bound = place * scale / 2.0 + value.abs() * 2.0_f64.powi(-22);
    assert!((number * scale - value).abs() <= bound, "{value} as {number} times {scale}");
}
