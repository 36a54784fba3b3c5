//! The inverse of the normal distribution function.

/// The number that a standard normal variable exceeds with this probability, above 0 and at most 1/2.
///
/// Algorithm AS 241, PPND16 (Wichura, "The percentage points of the normal distribution", Applied Statistics 37, 1988),
/// for the upper half; its relative error is about 1e-16.
pub fn upper_quantile(tail: f64) -> f64 {
    let from_middle = 0.5 - tail;
    if from_middle <= 0.425 {
        let r = 0.180625 - from_middle * from_middle;
        return from_middle * ratio(&MIDDLE, r);
    }
    let r = (-tail.ln()).sqrt();
    if r <= 5.0 {
        ratio(&NEAR_TAIL, r - 1.6)
    } else {
        ratio(&FAR_TAIL, r - 5.0)
    }
}

/// Coefficients of two polynomials, from the constant on.
type Ratio = [[f64; 8]; 2];

fn ratio([numerator, denominator]: &Ratio, x: f64) -> f64 {
    let polynomial = |coefficients: &[f64; 8]| coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c);
    polynomial(numerator) / polynomial(denominator)
}

const MIDDLE: Ratio = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];

const NEAR_TAIL: Ratio = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        0.000_774_545_014_278_341_4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        0.000_547_593_808_499_534_5,
        1.050_750_071_644_416_9e-9,
    ],
];

const FAR_TAIL: Ratio = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        0.001_242_660_947_388_078_4,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_887_9,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        0.000_786_869_131_145_613_3,
        1.846_318_317_510_054_8e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The probability above `x`, by Simpson's rule: beyond x + 12 there is nothing left that a double could show.
    fn tail_above(x: f64) -> f64 {
        const STEPS: u32 = 20_000;
        let width = 12.0 / f64::from(STEPS);
        let density = |step: u32| {
            let at = x + f64::from(step) * width;
            (-at * at / 2.0).exp() / std::f64::consts::TAU.sqrt()
        };
        let weight = |step: u32| match step {
            0 | STEPS => 1.0,
            odd if odd % 2 == 1 => 4.0,
            _ => 2.0,
        };
        (0..=STEPS).map(|step| weight(step) * density(step)).sum::<f64>() * width / 3.0
    }

    #[test]
    fn known_quantiles() {
        assert_eq!(upper_quantile(0.5), 0.0);
        for (tail, quantile) in [
            (0.25, 0.674_489_750_196_081_7),
            (0.025, 1.959_963_984_540_054),
            (0.001, 3.090_232_306_167_813),
            (1e-9, 5.997_807_015_007_686_5),
        ] {
            assert!((upper_quantile(tail) - quantile).abs() < 4e-15 * quantile, "{tail}");
        }
    }

    #[test]
    fn it_is_the_inverse_of_the_integral() {
        for tail in [0.49, 0.3, 0.076, 0.074, 0.01, 1e-3, 1e-6, 2e-11, 1e-12, 1e-20] {
            let back = tail_above(upper_quantile(tail));
            assert!((back / tail - 1.0).abs() < 1e-11, "{tail} comes back as {back}");
        }
    }
}
