//! Rows as 8-bit numbers with scales: what is expected, from the formulas in `docs/fused.md`.

use fast_allreduce::{DType, Scaling};

use super::ofp8::Ofp8;

/// Rows as bytes: of the numbers, and of the scales.
pub struct Quantised {
    pub numbers: Vec<u8>,
    pub scales: Vec<u8>,
}

/// The scale that calls are given.
const GIVEN: f32 = 0.0625;

pub fn quantise(rows: &[f32], hidden: usize, dtype: DType, scaling: Scaling) -> Quantised {
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
    Quantised { numbers, scales: scales.iter().flat_map(|scale| scale.to_le_bytes()).collect() }
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
    match Ofp8::of(dtype) {
        // Of a NaN, 0.
        None => value.round_ties_even().clamp(-128.0, 127.0) as i8 as u8,
        Some(format) => format.round(f64::from(value.clamp(-largest(dtype), largest(dtype)))) as u8,
    }
}

/// The number times the scale is off by at most half of the format's last place there, unless it has been saturated.
fn check_by_formula(value: f32, code: u8, scale: f32, dtype: DType) {
    let (value, scale) = (f64::from(value), f64::from(scale));
    let in_range = value.abs() <= f64::from(largest(dtype)) * scale;
    if !in_range || !scale.is_finite() {
        return;
    }
    let (number, place) = match Ofp8::of(dtype) {
        None => (f64::from(code as i8), 1.0),
        Some(format) => {
            let (mantissa, least) = if dtype == DType::F8E4M3 { (3, -6) } else { (2, -14) };
            let exponent = ((value / scale).abs().log2().floor()).max(f64::from(least));
            (format.number(code.into()), 2.0_f64.powf(exponent - f64::from(mantissa)))
        }
    };
    // Two roundings in f32 come before.
    let bound = place * scale / 2.0 + value.abs() * 2.0_f64.powi(-22);
    assert!((number * scale - value).abs() <= bound, "{value} as {number} times {scale}");
}
