//! Floats, comparisons and conversions.

use crate::run::{check, check_word, launch, word, Args};

/// Returns the bits of a value; a NaN becomes the NaN of f32 instructions.
fn canonical(value: f32) -> u32 {
    if value.is_nan() {
        0x7FFF_FFFF
    } else {
        value.to_bits()
    }
}

fn check_f32(instruction: &str, f: impl Fn(f32, f32, f32) -> f32) {
    let body = format!("{instruction}; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;");
    check(&body, word(|a, b, c| canonical(f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)))));
}

#[test]
fn floats() {
    check_f32("add.rn.f32 %f7, %f4, %f5", |a, b, _| a + b);
    check_f32("sub.f32 %f7, %f4, %f5", |a, b, _| a - b);
    check_f32("mul.rn.f32 %f7, %f4, %f5", |a, b, _| a * b);
    check_f32("div.rn.f32 %f7, %f4, %f5", |a, b, _| a / b);
    check_f32("fma.rn.f32 %f7, %f4, %f5, %f6", f32::mul_add);
    check_f32("sqrt.rn.f32 %f7, %f4", |a, _, _| a.sqrt());
    // If one operand is a NaN, the result is the other; -0 is less than 0.
    check_f32("min.f32 %f7, %f4, %f5", |a, b, _| match () {
        _ if a.is_nan() => b,
        _ if b.is_nan() => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    });
    check_f32("max.NaN.f32 %f7, %f4, %f5", |a, b, _| match () {
        _ if a.is_nan() || b.is_nan() => f32::NAN,
        _ if a == b => {
            if a.is_sign_negative() {
                b
            } else {
                a
            }
        }
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    });
    check_word("neg.f32 %f7, %f4; mov.b32 %r7, %f7", |a, _, _| a ^ 0x8000_0000);
    check_word("add.ftz.f32 %f7, %f4, 0f00000000; mov.b32 %r7, %f7", |a, _, _| {
        let value = f32::from_bits(a);
        // The sum of zeros of both signs is +0.
        if value.is_subnormal() || value == 0.0 {
            0
        } else {
            canonical(value)
        }
    });
    check(
        "add.rn.f64 %e7, %e4, %e5; setp.num.f64 %p1, %e7, %e7; mov.b64 %d7, %e7; @!%p1 mov.u64 %d7, 1;",
        |[a, b, _]| {
            let sum = f64::from_bits(a) + f64::from_bits(b);
            if sum.is_nan() {
                1
            } else {
                sum.to_bits()
            }
        },
    );
}

#[test]
fn comparisons() {
    let float = |name: &str, f: fn(f32, f32) -> bool| {
        check(&format!("setp.{name}.f32 %p1, %f4, %f5; selp.u64 %d7, 1, 0, %p1;"), |[a, b, _]| {
            f(f32::from_bits(a as u32), f32::from_bits(b as u32)).into()
        });
    };
    float("eq", |a, b| a == b);
    float("ne", |a, b| a != b && !a.is_nan() && !b.is_nan());
    float("lt", |a, b| a < b);
    float("ge", |a, b| a >= b);
    float("equ", |a, b| a == b || a.is_nan() || b.is_nan());
    float("neu", |a, b| a != b);
    float("gtu", |a, b| a > b || a.is_nan() || b.is_nan());
    float("num", |a, b| !a.is_nan() && !b.is_nan());
    float("nan", |a, b| a.is_nan() || b.is_nan());
    check(
        "setp.lt.and.s32 %p1|%p2, %r4, %r5, !%p6; selp.u64 %d7, 2, 0, %p1; @%p2 add.s64 %d7, %d7, 1;",
        |[a, b, c]| {
            let (less, other) = ((a as i32) < (b as i32), c == 0);
            u64::from(less && other) * 2 + u64::from(!less && other)
        },
    );
    check("setp.hi.u32 %p1, %r4, %r5; selp.u64 %d7, 1, 0, %p1;", |[a, b, _]| u64::from(a as u32 > b as u32));
    check("slct.b64.s32 %d7, %d4, %d5, %r6;", |[a, b, c]| if c as i32 >= 0 { a } else { b });
    check("set.lt.u32.s32 %r7, %r4, %r5; cvt.u64.u32 %d7, %r7;", |[a, b, _]| {
        if (a as i32) < (b as i32) {
            0xFFFF_FFFF
        } else {
            0
        }
    });
}

#[test]
fn conversions_of_integers_and_floats() {
    check("cvt.s64.s8 %d7, %r4;", |[a, ..]| a as i8 as i64 as u64);
    check("cvt.u64.u16 %d7, %h4;", |[a, ..]| (a as u16).into());
    check("cvt.sat.u8.s32 %r7, %r4; cvt.u64.u32 %d7, %r7;", |[a, ..]| (a as i32).clamp(0, 255) as u64);
    check("cvt.rzi.s32.f32 %r7, %f4; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        (f32::from_bits(a as u32) as i32 as u32).into()
    });
    check("cvt.rni.u64.f64 %d7, %e4;", |[a, ..]| f64::from_bits(a).round_ties_even() as u64);
    check("cvt.rmi.s32.f32 %r7, %f4; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        (f32::from_bits(a as u32).floor() as i32 as u32).into()
    });
    check("cvt.rpi.f32.f32 %f7, %f4; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        canonical(f32::from_bits(a as u32).ceil()).into()
    });
    check("cvt.rn.f32.u32 %f7, %r4; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        (a as u32 as f32).to_bits().into()
    });
    check("cvt.rn.f32.s64 %f7, %d4; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        (a as i64 as f32).to_bits().into()
    });
    check("cvt.rn.f64.u64 %e7, %d4; mov.b64 %d7, %e7;", |[a, ..]| (a as f64).to_bits());
    check("cvt.rn.f32.f64 %f7, %e4; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        canonical(f64::from_bits(a) as f32).into()
    });
}

/// Returns the non-negative values of a 16-bit float, by their bits, up to infinity.
fn halves(fraction: u32, bias: i32, infinity: u32) -> Vec<f64> {
    let value = |bits: u32| match (bits >> fraction, bits & ((1 << fraction) - 1)) {
        (0, rest) => f64::from(rest) * 2f64.powi(1 - bias - fraction as i32),
        (exponent, rest) => {
            f64::from(rest + (1 << fraction)) * 2f64.powi(exponent as i32 - bias - fraction as i32)
        }
    };
    (0..=infinity).map(value).collect()
}

/// Returns the index of the nearest value in a list; of two, the even index. The value that would follow
/// the largest stands for infinity.
fn nearest(values: &[f64], value: f64) -> u64 {
    let (sign, value) = (u64::from(value.is_sign_negative()) << 15, value.abs());
    let above = values.partition_point(|&other| other < value).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let (up, down) = (values[above] - value, value - values[below]);
    let takes_up = above == below || up < down || (up == down && above % 2 == 0) || value >= values[above];
    sign | if takes_up { above } else { below } as u64
}

#[test]
fn conversions_to_8_bit_floats() {
    for (name, fraction, bias, largest) in [("e4m3x2", 3, 7, 448.0), ("e5m2x2", 2, 15, 57344.0)] {
        let mut values = halves(fraction, bias, 1 << 7);
        values.retain(|&value| value <= largest);
        let eight = |bits: u64| match f32::from_bits(bits as u32) {
            value if value.is_nan() => 0x7F,
            value => {
                let half = nearest(&values, value.into());
                half >> 8 & 0x80 | half & 0x7F
            }
        };
        let body = format!("cvt.rn.satfinite.{name}.f32 %h7, %f4, %f5; cvt.u64.u16 %d7, %h7;");
        check(&body, |[a, b, _]| eight(a) << 8 | eight(b));
        // Ties, and values near the largest.
        let near: Vec<Args> = values
            .windows(2)
            .flat_map(|pair| [pair[0], (pair[0] + pair[1]) / 2.0, pair[1] * 1.03])
            .flat_map(|value| [value as f32, -value as f32])
            .map(|value| [u64::from(value.to_bits()), u64::from((value * 1.5).to_bits()), 0])
            .collect();
        for (args, result) in near.iter().zip(launch(&body, &near, 1024).unwrap()) {
            assert_eq!(result, eight(args[0]) << 8 | eight(args[1]), "{name} {args:x?}");
        }
    }
}

#[test]
fn conversions_of_halves() {
    for (name, fraction, bias, infinity) in [("f16", 10, 15, 0x7C00), ("bf16", 7, 127, 0x7F80)] {
        let values = halves(fraction, bias, infinity);
        check(&format!("cvt.rn.{name}.f32 %h7, %f4; cvt.u64.u16 %d7, %h7;"), |[a, ..]| {
            let value = f32::from_bits(a as u32);
            if value.is_nan() {
                0x7FFF
            } else {
                nearest(&values, value.into())
            }
        });
        let all: Vec<Args> = (0..0x1_0000).map(|bits| [bits, 0, 0]).collect();
        let body = format!("cvt.f32.{name} %f7, %h4; mov.b32 %r7, %f7; cvt.u64.u32 %d7, %r7;");
        for (args, result) in all.iter().zip(launch(&body, &all, 1024).unwrap()) {
            let magnitude = (args[0] & 0x7FFF) as usize;
            let sign = if args[0] & 0x8000 != 0 { -1.0 } else { 1.0 };
            let expected = match magnitude {
                m if m == infinity as usize => f32::INFINITY.copysign(sign).to_bits(),
                m if m > infinity as usize => 0x7FFF_FFFF,
                m => (values[m] as f32 * sign).to_bits(),
            };
            assert_eq!(result, u64::from(expected), "{name} {args:x?}");
        }
        // Sums and products are exact in f64, except sums of bf16, whose error is far below half a bit.
        for (instruction, f) in [("add", (|a, b| a + b) as fn(f64, f64) -> f64), ("mul", |a, b| a * b)] {
            check(&format!("{instruction}.rn.{name} %h7, %h4, %h5; cvt.u64.u16 %d7, %h7;"), |[a, b, _]| {
                let wide = |bits: u64| {
                    let magnitude = (bits & 0x7FFF) as usize;
                    let value = match magnitude {
                        m if m == infinity as usize => f64::INFINITY,
                        m if m > infinity as usize => f64::NAN,
                        m => values[m],
                    };
                    if bits & 0x8000 != 0 {
                        -value
                    } else {
                        value
                    }
                };
                let result = f(wide(a), wide(b));
                if result.is_nan() {
                    0x7FFF
                } else {
                    nearest(&values, result)
                }
            });
        }
    }
    check("cvt.rn.f16x2.f32 %r7, %f4, %f5; cvt.u64.u32 %d7, %r7;", |[a, b, _]| {
        let values = halves(10, 15, 0x7C00);
        let half = |bits: u64| match f32::from_bits(bits as u32) {
            value if value.is_nan() => 0x7FFF,
            value => nearest(&values, value.into()),
        };
        half(a) << 16 | half(b)
    });
}
