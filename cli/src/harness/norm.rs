//! The addition and RMSNorm of an unfused sequence, in Rust that the compiler vectorises.

use fast_allreduce::{Element, Norm};
use fast_allreduce_oracle::number::Number;
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

pub use crate::arguments::EPSILON;

/// The norm that is measured.
pub const NORM: Norm = Norm::Rms { epsilon: EPSILON, unit_offset: false };

/// A type that has the fused call.
pub trait Float: Number + Element {
    /// The relative error of rounding to the type, and its least positive number.
    const ROUNDING: (f64, f64) = match Self::FORMAT {
        Some(format) => (format.unit, format.least),
        None => (0.0, 0.0),
    };

    /// Converts to f32. Both slices have the same length.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds numbers to nearest, ties to even. Both slices have the same length.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// Converts to f32, like [`Float::widen`], with AVX2.
    ///
    /// # Safety
    ///
    /// The CPU has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_avx2(from: &[Self], to: &mut [f32]) {
        Self::widen(from, to);
    }

    /// Rounds, like [`Float::narrow`], with AVX2.
    ///
    /// # Safety
    ///
    /// The CPU has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn narrow_avx2(from: &[f32], to: &mut [Self]) {
        Self::narrow(from, to);
    }
}

impl Float for f32 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    // A call of `half` for each chunk would take three times as long as everything else.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_avx2(from: &[Self], to: &mut [f32]) {
        use std::arch::x86_64::{_mm256_cvtph_ps, _mm256_storeu_ps, _mm_loadu_si128};
        let whole = from.len() / 8 * 8;
        for (from, to) in from[..whole].chunks_exact(8).zip(to.chunks_exact_mut(8)) {
            // SAFETY: eight elements on each side; the caller's CPU has the instructions.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
            };
        }
        Self::widen(&from[whole..], &mut to[whole..]);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn narrow_avx2(from: &[f32], to: &mut [Self]) {
        use std::arch::x86_64::{_mm256_cvtps_ph, _mm256_loadu_ps, _mm_storeu_si128};
        const NEAREST: i32 = 0;
        let whole = from.len() / 8 * 8;
        for (from, to) in from[..whole].chunks_exact(8).zip(to.chunks_exact_mut(8)) {
            // SAFETY: eight elements on each side; the caller's CPU has the instructions.
            unsafe {
                let narrow = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(from.as_ptr()));
                _mm_storeu_si128(to.as_mut_ptr().cast(), narrow);
            }
        }
        Self::narrow(&from[whole..], &mut to[whole..]);
    }
}

// Written out, because the conversions of `half` are not vectorised.
impl Float for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        let wide = |from: &bf16| f32::from_bits(u32::from(from.to_bits()) << 16);
        to.iter_mut().zip(from).for_each(|(to, from)| *to = wide(from));
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        let rounded = |from: &f32| {
            let bits = from.to_bits();
            bf16::from_bits((bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
        };
        to.iter_mut().zip(from).for_each(|(to, from)| *to = rounded(from));
    }
}

/// Elements of a chunk. That many partial sums hide the latency of additions.
const LANES: usize = 64;

/// Returns the instructions that [`add_and_norm`] uses on this machine.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        return "AVX2";
    }
    "those that the program was compiled for"
}

#[cfg(target_arch = "x86_64")]
pub fn has_avx2() -> bool {
    // A program compiled for AVX-512 uses it here as well.
    !cfg!(target_feature = "avx512f") && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

/// Computes `residual += sum`, then normalises the rows of the residual and multiplies them by `weight`, which is a
/// row.
pub fn add_and_norm<T: Float>(sum: &[T], residual: &mut [T], output: &mut [T], weight: &[T]) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: this CPU has the instructions.
        return unsafe { add_and_norm_avx2(sum, residual, output, weight) };
    }
    add_and_norm_rows(sum, residual, output, weight, &(T::widen, T::narrow));
}

/// # Safety
///
/// The CPU has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn add_and_norm_avx2<T: Float>(sum: &[T], residual: &mut [T], output: &mut [T], weight: &[T]) {
    // SAFETY: guaranteed by the caller.
    let widen = |from: &[T], to: &mut [f32]| unsafe { T::widen_avx2(from, to) };
    // SAFETY: guaranteed by the caller.
    let narrow = |from: &[f32], to: &mut [T]| unsafe { T::narrow_avx2(from, to) };
    add_and_norm_rows(sum, residual, output, weight, &(widen, narrow));
}

/// Conversions to f32, and back.
type Conversions<W, N> = (W, N);

#[inline(always)]
fn add_and_norm_rows<T: Float>(
    sum: &[T],
    residual: &mut [T],
    output: &mut [T],
    weight: &[T],
    conversions: &Conversions<impl Fn(&[T], &mut [f32]), impl Fn(&[f32], &mut [T])>,
) {
    let hidden = weight.len();
    let rows = sum.chunks_exact(hidden).zip(residual.chunks_exact_mut(hidden));
    for ((sum, residual), output) in rows.zip(output.chunks_exact_mut(hidden)) {
        let mut squares = [0.0_f32; LANES];
        let mut chunks = residual.chunks_exact_mut(LANES);
        for (residual, sum) in (&mut chunks).zip(sum.chunks_exact(LANES)) {
            add_chunk(sum, residual, &mut squares, conversions);
        }
        let last = chunks.into_remainder();
        add_chunk(&sum[hidden - last.len()..], last, &mut squares, conversions);
        let scale = 1.0 / (squares.iter().sum::<f32>() / hidden as f32 + EPSILON).sqrt();

        let mut chunks = output.chunks_exact_mut(LANES);
        let from = residual.chunks_exact(LANES).zip(weight.chunks_exact(LANES));
        for (output, (residual, weight)) in (&mut chunks).zip(from) {
            scale_chunk(residual, weight, scale, output, conversions);
        }
        let last = chunks.into_remainder();
        let first = hidden - last.len();
        scale_chunk(&residual[first..], &weight[first..], scale, last, conversions);
    }
}

/// Adds up to [`LANES`] elements to the residual, and their squares to `squares`.
#[inline(always)]
fn add_chunk<T: Float>(
    sum: &[T],
    residual: &mut [T],
    squares: &mut [f32; LANES],
    (widen, narrow): &Conversions<impl Fn(&[T], &mut [f32]), impl Fn(&[f32], &mut [T])>,
) {
    // Missing elements stay 0.
    let (mut added, mut before) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    widen(sum, &mut added[..sum.len()]);
    widen(residual, &mut before[..sum.len()]);
    added.iter_mut().zip(&before).for_each(|(added, before)| *added += before);
    narrow(&added[..sum.len()], residual);
    widen(residual, &mut added[..sum.len()]);
    squares.iter_mut().zip(&added).for_each(|(square, x)| *square += x * x);
}

#[inline(always)]
fn scale_chunk<T: Float>(
    residual: &[T],
    weight: &[T],
    scale: f32,
    output: &mut [T],
    (widen, narrow): &Conversions<impl Fn(&[T], &mut [f32]), impl Fn(&[f32], &mut [T])>,
) {
    let (mut scaled, mut weights) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    widen(residual, &mut scaled[..residual.len()]);
    widen(weight, &mut weights[..residual.len()]);
    scaled.iter_mut().zip(&weights).for_each(|(x, weight)| *x = *x * scale * weight);
    narrow(&scaled[..residual.len()], output);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_normalised() {
        let (mut residual, mut output) = ([1.0_f32, -2.0, 3.0, 4.0], [f32::NAN; 4]);
        add_and_norm(&[2.0, -1.0, 0.0, -1.0], &mut residual, &mut output, &[1.0, 2.0, 0.5, 0.0]);
        assert_eq!(residual, [3.0, -3.0, 3.0, 3.0]);
        let one = 3.0 / (9.0 + EPSILON).sqrt();
        for (is, should_be) in output.iter().zip([one, -2.0 * one, 0.5 * one, 0.0]) {
            assert!((is - should_be).abs() < 1e-6, "{output:?}");
        }
    }

    fn there_and_back<T: Float>(value: T, factor: f32) -> (f32, T) {
        let (mut wide, mut narrow) = ([0.0], [value]);
        T::widen(&[value], &mut wide);
        T::narrow(&[wide[0] * factor], &mut narrow);
        (wide[0], narrow[0])
    }

    #[test]
    fn conversions_are_those_of_the_types() {
        for bits in (0..=u16::MAX).step_by(7).chain([0x8000, 0x0001, 0x3F80]) {
            let (brain, half) = (bf16::from_bits(bits), f16::from_bits(bits));
            if !brain.is_nan() {
                assert_eq!(there_and_back(brain, 1.0), (brain.to_f32(), brain));
                let between = brain.to_f32() * 1.003;
                assert_eq!(there_and_back(brain, 1.003).1, bf16::from_f32(between));
            }
            if !half.is_nan() {
                assert_eq!(there_and_back(half, 1.0), (half.to_f32(), half));
            }
        }
    }
}
