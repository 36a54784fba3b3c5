//! Tests quantised rows of typed calls on the host, in every kind of format.

use fast_allreduce::{DType, Error, Fused, Norm, RawFused, Result, Scaling};

use crate::fused::rms;
use crate::host::Build;
use crate::suite::launch::threads;
use crate::suite::quantized_rows::Becomes;
use crate::suite::scenario::Setup;

/// Tests NaNs and infinities, zeros, values too large for a given scale, and rows that end with an incomplete group.
#[test]
fn quantized_typed_calls() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let call = |input: &[f32], hidden: usize, scaling, scales: &mut [f32]| {
            let (mut residual, mut output) = (vec![0.0; input.len()], vec![9_i8; input.len()]);
            let fused = rms(&mut residual, hidden, 0.0);
            let fused = match scaling {
                None => fused.quantized_by(&mut output, scales),
                Some(scaling) => fused.quantized(scaling, &mut output, scales),
            };
            communicator.all_reduce_fused(input, fused)?;
            Result::Ok(output)
        };
        let (per_row, per_group) = (Some(Scaling::PerRow), Some(Scaling::PerGroup));
        let mut scales = [7.0; 4];
        let rows = [0.5, -0.5, 0.0, 0.0, f32::NAN, 1.0, 1.0, f32::INFINITY];
        assert_eq!(
            call(&rows, 2, per_row, &mut scales).unwrap(),
            [127, -127, 0, 0, 0, 0, 0, 0],
            "rows of NaNs, and 0 next to an infinity"
        );
        // The scale of a row of zeros without an epsilon is also NaN.
        assert!(scales[0] == 1.0 / 127.0 && scales[1..].iter().all(|scale| scale.is_nan()), "{scales:?}");
        assert_eq!(call(&[0.0, 1.0, -4.0, 1.0], 4, None, &mut [0.01]).unwrap(), [0, 47, -128, 47]);
        let long: Vec<f32> = (0..300).map(|i| if i < 128 { 1.0 } else { 2.0 }).collect();
        let mut scales = [7.0; 3];
        let numbers = call(&long, 300, per_group, &mut scales).unwrap();
        assert!(numbers.iter().all(|&number| number == 127));
        assert!(scales[1] == scales[2] && (scales[1] / scales[0] - 2.0).abs() < 1e-6, "{scales:?}");
        let (mut residual, mut output) = ([0.0_f32; 4], [0.0_f32; 4]);
        let refused = |result: Result<()>, name: &str| {
            assert!(
                matches!(&result, Err(Error::InvalidSetting { name: is, .. }) if *is == name),
                "{result:?}"
            );
        };
        for (len, given) in [(1, false), (3, false), (0, true), (2, true)] {
            let scaling = if given { None } else { per_row };
            refused(call(&[1.0; 4], 2, scaling, &mut vec![1.0; len]).map(drop), "scales");
        }
        let of_floats = rms(&mut residual, 2, 0.0).quantized_by(&mut output, &[1.0]);
        refused(communicator.all_reduce_fused(&[1.0; 4], of_floats), "quantized type");
        for scaling in [Scaling::Given, Scaling::Nvfp4] {
            refused(call(&[1.0; 4], 2, Some(scaling), &mut [1.0; 4]).map(drop), "scaling");
        }
        communicator.all_reduce_fused(&[1.0; 4], Fused::on_host(&mut residual)).unwrap();
        assert_eq!(residual, [2.0; 4]);
    });
}

/// Tests NaNs and infinities, values that round to a scale of 0, saturation, and lengths that are refused.
#[test]
fn nvfp4_typed_calls() {
    threads(1, |rank| {
        let communicator = Setup::default().build(&rank);
        let call = |input: &[f32], hidden: usize, scales: &mut [u8], scaling, global: f32, bytes: usize| {
            let (mut residual, mut output) = (vec![0.0; input.len()], vec![9_u8; bytes]);
            let global = [global];
            let fused =
                rms(&mut residual, hidden, 0.0).quantized_blocks(scaling, &mut output, scales, &global);
            communicator.all_reduce_fused(input, fused)?;
            Result::Ok(output)
        };
        let rows = Scaling::Nvfp4;
        let one = |input: [f32; 16], global| {
            let mut scales = [9];
            let output = call(&input, 16, &mut scales, rows, global, 8).unwrap();
            (output, scales[0])
        };
        // The mean square is 18/16.
        let mut input = [0.0; 16];
        (input[0], input[1], input[15]) = (4.0, 1.0, -1.0);
        let normed = 4.0 / (18.0_f32 / 16.0).sqrt();
        // The largest element becomes 6, and a quarter of it 1.5.
        let (numbers, scale) = one(input, 6.0 / normed);
        assert_eq!((numbers, scale), (vec![0x37, 0, 0, 0, 0, 0, 0, 0xB0], 0x38));
        // Scales above the range of e4m3 saturate to 448, and scales below it become 0.
        let (numbers, scale) = one(input, 1e30);
        assert_eq!((numbers, scale), (vec![0x77, 0, 0, 0, 0, 0, 0, 0xF0], 0x7E));
        let (numbers, scale) = one(input, 1e-9);
        assert_eq!((numbers, scale), (vec![0, 0, 0, 0, 0, 0, 0, 0x80], 0));
        // In the normalised row, finite elements next to an infinity are 0, and the infinity becomes NaN.
        input[0] = f32::INFINITY;
        for input in [input, [f32::NAN; 16]] {
            let (numbers, scale) = one(input, 1.0);
            assert_eq!((numbers, scale), (vec![0x77; 8], 0x7F));
        }
        let long = [1.0; 160 * 48];
        let mut scales = vec![0xA5; Scaling::Nvfp4Tiled.scales(160, 48)];
        assert_eq!(scales.len(), 2 * 512);
        let numbers = call(&long, 48, &mut scales, Scaling::Nvfp4Tiled, 6.0, 160 * 24).unwrap();
        assert_eq!(numbers, vec![0x77; 160 * 24]);
        // Padding: one block in four, and all rows from 128 on except 32.
        assert_eq!(scales.iter().filter(|&&scale| scale == 0x38).count(), 160 * 3);
        assert_eq!((scales[3], scales[512 + 3], scales[512 + 4], scales[512 + 2]), (0xA5, 0xA5, 0xA5, 0x38));
        let refused = |result: Result<Vec<u8>>, name: &str| {
            assert!(
                matches!(&result, Err(Error::InvalidSetting { name: is, .. }) if *is == name),
                "{result:?}"
            );
        };
        refused(call(&[1.0; 48], 16, &mut [0; 2], rows, 1.0, 24), "scales");
        refused(call(&[1.0; 48], 16, &mut [0; 511], Scaling::Nvfp4Tiled, 1.0, 24), "scales");
        refused(call(&[1.0; 48], 24, &mut [0; 4], rows, 1.0, 24), "hidden");
        for bytes in [23, 25, 48] {
            let result = call(&[1.0; 48], 16, &mut [0; 3], rows, 1.0, bytes);
            assert!(matches!(result, Err(Error::LengthMismatch { .. })), "{result:?}");
        }
        assert_eq!(call(&[], 16, &mut [], rows, 1.0, 0).unwrap(), []);
    });
}

/// Tests E8M0 scales by both rules, for groups with given greatest magnitudes: numbers around the largest, zeros, the
/// least and the largest floats, infinities and NaNs. Rows of 1 and -1 become the weights with signs.
#[test]
fn e8m0_scales() {
    const NAN: u8 = 255;
    threads(1, |rank| {
        let communicator = Setup::default().build(&rank);
        // The first number of each group of `each` elements, the second, and the scale.
        let call = |becomes: Becomes, greatest: &[f32], each: usize| {
            let hidden = greatest.len() * each;
            let signs = [1.0_f32, -1.0].repeat(hidden / 2);
            let mut weight = vec![0.0; hidden];
            for (group, &greatest) in weight.chunks_mut(each).zip(greatest) {
                (group[0], group[1]) = (greatest, greatest / 4.0);
            }
            let (mut residual, mut numbers) = (vec![0.0_f32; hidden], vec![9_u8; hidden]);
            let mut scales = vec![9_u8; becomes.1.scales(1, hidden)];
            let at = residual.as_mut_ptr() as u64;
            let fused = RawFused {
                residual: at,
                residual_out: at,
                norm: Norm::Rms { epsilon: 0.0, unit_offset: false },
                hidden,
                weight: weight.as_ptr() as u64,
                quantized: Some(becomes.at(numbers.as_mut_ptr() as u64, scales.as_mut_ptr() as u64, 0)),
                ..RawFused::default()
            };
            // SAFETY: all memory has the elements of one row.
            unsafe {
                communicator.all_reduce_fused_raw(signs.as_ptr().cast(), hidden, DType::F32, &fused).unwrap();
            }
            let halves = becomes.0 == DType::U8;
            let of_group = |group: usize| {
                let at = group * each;
                match halves {
                    true => [numbers[at / 2] & 15, numbers[at / 2] >> 4],
                    false => [numbers[at], numbers[at + 1]],
                }
            };
            (0..greatest.len()).map(|group| (of_group(group), scales[group])).collect::<Vec<_>>()
        };
        let above = |value: f32| f32::from_bits(value.to_bits() + 1);
        let below = |value: f32| f32::from_bits(value.to_bits() - 1);
        let extremes = [0.0, f32::from_bits(1), f32::MAX, f32::INFINITY, f32::NAN];
        let with = |some: &[f32]| [some, &extremes[..]].concat();

        // OCP's rule: 448, and all up to 512, have a scale of 1; larger ones than 448 saturate.
        let values = with(&[448.0, above(448.0), below(512.0), 512.0, 1.0]);
        let expected = [
            ([0x7E, 0xEE], 127),
            ([0x7E, 0xEE], 127),
            ([0x7E, 0xF0], 127),
            ([0x78, 0xE8], 128),
            ([0x78, 0xE8], 119),
            ([0, 0x80], 0),
            ([0, 0x80], 0),
            ([0x7E, 0xF0], 246),
            ([0x7F, 0x7F], NAN),
            ([0x7F, 0x7F], NAN),
        ];
        assert_eq!(call(Becomes(DType::F8E4M3, Scaling::Mxfp8), &values, 32), expected);
        // e5m2 has numbers up to 1.75 x 2^15.
        let values = with(&[57344.0, 65536.0]);
        let expected = [([0x7B, 0xF3], 127), ([0x78, 0xF0], 128), ([0, 0x80], 0), ([0, 0x80], 0)];
        assert_eq!(call(Becomes(DType::F8E5M2, Scaling::Mxfp8), &values, 32)[..4], expected);
        // e2m1 has numbers up to 6, and no NaN.
        let values = with(&[6.0, below(8.0), 8.0]);
        let expected = [
            ([7, 0xB], 127),
            ([7, 0xC], 127),
            ([6, 0xA], 128),
            ([0, 8], 0),
            ([0, 8], 0),
            ([7, 0xC], 252),
            ([7, 7], NAN),
            ([7, 7], NAN),
        ];
        assert_eq!(call(Becomes(DType::U8, Scaling::Mxfp4), &values, 32), expected);
        // Rounded up: nothing saturates. The least scale is 2^-126.
        let values = with(&[448.0, above(448.0), 1.0]);
        let expected = [
            ([0x7E, 0xEE], 127),
            ([0x76, 0xE6], 128),
            ([0x78, 0xE8], 119),
            ([0, 0x80], 1),
            ([0, 0x80], 1),
            ([0x78, 0xE8], 247),
            ([0x7F, 0x7F], NAN),
            ([0x7F, 0x7F], NAN),
        ];
        assert_eq!(call(Becomes(DType::F8E4M3, Scaling::PerGroupUe8m0), &values[..4], 128), expected[..4]);
        assert_eq!(call(Becomes(DType::F8E4M3, Scaling::PerGroupUe8m0), &values[4..], 128), expected[4..]);
    });
}

/// Tests scales and lengths that formats with E8M0 scales refuse.
#[test]
fn e8m0_typed_calls() {
    threads(1, |rank| {
        let communicator = Setup::default().build(&rank);
        let call = |scaling, hidden: usize, scales: &mut [u8]| {
            let (mut residual, mut numbers) = ([0.0_f32; 96], [0_u8; 48]);
            let fused = rms(&mut residual, hidden, 0.0).quantized_e8m0(scaling, &mut numbers, scales);
            communicator.all_reduce_fused(&[1.0_f32, -1.0].repeat(48), fused)?;
            Result::Ok(numbers)
        };
        let mut scales = [0; 3];
        assert_eq!(call(Scaling::Mxfp4, 32, &mut scales), Ok([0xE6; 48]));
        assert_eq!(scales, [125; 3]);
        let refused = [
            (call(Scaling::Mxfp4, 32, &mut [0; 4]), "scales"),
            (call(Scaling::Mxfp4, 48, &mut [0; 4]), "hidden"),
            (call(Scaling::Nvfp4, 32, &mut [0; 6]), "scaling"),
            (call(Scaling::PerGroupColumns, 32, &mut [0; 3]), "scaling"),
        ];
        for (result, which) in refused {
            let is_named = matches!(&result, Err(Error::InvalidSetting { name, .. }) if *name == which);
            assert!(is_named, "{which}: {result:?}");
        }
        // Integers have no scales that are powers of two.
        let (mut residual, mut numbers, mut scales) = ([0.0_f32; 32], [0_i8; 32], [0]);
        let fused = rms(&mut residual, 32, 0.0).quantized_e8m0(Scaling::Mxfp8, &mut numbers, &mut scales);
        let refused = communicator.all_reduce_fused(&[1.0; 32], fused);
        assert!(matches!(refused, Err(Error::InvalidSetting { name: "quantized type", .. })), "{refused:?}");
    });
}
