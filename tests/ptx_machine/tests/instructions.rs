//! Instructions one by one, against what the PTX ISA says, written down in other words.

use std::fmt::Write as _;

use fast_allreduce_ptx_machine::{Fault, Launch, LaunchError, Memory, Program, Range, Settings};

/// Three operands of a thread.
type Args = [u64; 3];

struct Anywhere(Vec<Range>);

impl Memory for Anywhere {
    fn find(&self, address: u64) -> Option<Range> {
        self.0.iter().copied().find(|range| address >= range.low && address - range.low < range.bytes)
    }
}

fn range_of<T>(items: &[T]) -> Range {
    Range { low: items.as_ptr() as u64, bytes: std::mem::size_of_val(items) as u64 }
}

/// A kernel in which a thread has its operands in %d4 to %d6, their halves in %r4 to %r6 and so on, and leaves %d7.
fn kernel(body: &str) -> String {
    let mut text = String::from(
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out)\n{\n\
         .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %d<16>; .reg .f64 %e<8>;\n\
         ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];\nmov.u32 %r0, %tid.x;\n\
         mul.wide.u32 %d2, %r0, 24; add.s64 %d3, %d0, %d2;\n",
    );
    for i in 0..3 {
        let n = i + 4;
        writeln!(
            text,
            "ld.global.u64 %d{n}, [%d3+{}]; cvt.u32.u64 %r{n}, %d{n}; cvt.u16.u64 %h{n}, %d{n}; setp.ne.u64 %p{n}, %d{n}, 0;\n\
             mov.b32 %f{n}, %r{n}; mov.b64 %e{n}, %d{n};",
            i * 8
        )
        .unwrap();
    }
    write!(text, "mov.u64 %d7, 0;\n{body}\n").unwrap();
    text += "mul.wide.u32 %d8, %r0, 8; add.s64 %d9, %d1, %d8; st.global.u64 [%d9], %d7; ret;\n}\n";
    text
}

fn launch(body: &str, args: &[Args], threads: u32) -> Result<Vec<u64>, LaunchError> {
    let program = Program::load(&kernel(body), false).unwrap_or_else(|error| panic!("{body}: {error}"));
    let mut results = vec![0u64; args.len()];
    let memory = Anywhere(vec![range_of(args), range_of(&results)]);
    for (first, part) in args.chunks(threads as usize).enumerate() {
        let at = [part.as_ptr() as u64, results[first * threads as usize..].as_mut_ptr() as u64];
        let params: Vec<u8> = at.iter().flat_map(|address| address.to_le_bytes()).collect();
        let block = [part.len() as u32, 1, 1];
        let settings = Settings { limit: std::time::Duration::from_secs(20), ..Settings::default() };
        program.launch(
            &[Launch { kernel: "k", grid: [1; 3], block, params: &params, memory: &memory }],
            settings,
        )?;
    }
    Ok(results)
}

/// Ends of ranges, powers of two, NaNs and the like; and any numbers.
fn interesting() -> Vec<u64> {
    let mut values = vec![0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF];
    values.extend([
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        i64::MAX as u64,
        i64::MIN as u64,
        u64::MAX,
        u64::MAX - 4,
    ]);
    values.extend([
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0x7F80_0001,
        0x0000_0001,
        0x0080_0000,
    ]);
    values.extend([1.0f64, -2.5, f64::INFINITY, f64::NAN, 1e-310, 65504.0, 65520.0].map(f64::to_bits));
    values.extend(
        [1.5f32, -2.5, 65504.0, 65520.0, 1e-8, 3.3e38, 0.1, 2147483648.0].map(|f| u64::from(f.to_bits())),
    );
    let mut random = 0x0123_4567_89AB_CDEF_u64;
    for _ in 0..40 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        values.push(random ^ random >> 29);
    }
    values
}

/// All pairs, with a third that differs.
fn operands() -> Vec<Args> {
    let values = interesting();
    let pairs = values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b)));
    pairs.enumerate().map(|(i, (a, b))| [a, b, values[(i * 7 + i / 31) % values.len()]]).collect()
}

fn check(body: &str, expected: impl Fn(Args) -> u64) {
    let args = operands();
    let results = launch(body, &args, 1024).unwrap_or_else(|error| panic!("{body}: {error}"));
    for (args, result) in args.iter().zip(results) {
        assert_eq!(result, expected(*args), "{body} of {args:x?}: {result:x}, not {:x}", expected(*args));
    }
}

fn word(f: impl Fn(u32, u32, u32) -> u32) -> impl Fn(Args) -> u64 {
    move |[a, b, c]| f(a as u32, b as u32, c as u32).into()
}

fn check_word(instruction: &str, f: impl Fn(u32, u32, u32) -> u32) {
    check(&format!("{instruction}; cvt.u64.u32 %d7, %r7;"), word(f));
}

#[test]
fn integers_of_32_bits() {
    check_word("add.s32 %r7, %r4, %r5", |a, b, _| a.wrapping_add(b));
    check_word("add.sat.s32 %r7, %r4, %r5", |a, b, _| (a as i32).saturating_add(b as i32) as u32);
    check_word("sub.u32 %r7, %r4, %r5", |a, b, _| a.wrapping_sub(b));
    check_word("mul.lo.s32 %r7, %r4, %r5", |a, b, _| a.wrapping_mul(b));
    check_word("mul.hi.u32 %r7, %r4, %r5", |a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    check_word("mul.hi.s32 %r7, %r4, %r5", |a, b, _| {
        ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
    });
    check_word("mad.lo.s32 %r7, %r4, %r5, %r6", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    check_word("div.u32 %r7, %r4, %r5", |a, b, _| a.checked_div(b).unwrap_or(u32::MAX));
    check_word("rem.u32 %r7, %r4, %r5", |a, b, _| a.checked_rem(b).unwrap_or(a));
    check_word("div.s32 %r7, %r4, %r5", |a, b, _| {
        if b == 0 {
            u32::MAX
        } else {
            (a as i32).wrapping_div(b as i32) as u32
        }
    });
    check_word(
        "rem.s32 %r7, %r4, %r5",
        |a, b, _| if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 },
    );
    check_word("min.s32 %r7, %r4, %r5", |a, b, _| (a as i32).min(b as i32) as u32);
    check_word("max.u32 %r7, %r4, %r5", |a, b, _| a.max(b));
    check_word("abs.s32 %r7, %r4", |a, _, _| (a as i32).wrapping_abs() as u32);
    check_word("neg.s32 %r7, %r4", |a, _, _| a.wrapping_neg());
    check_word("sad.u32 %r7, %r4, %r5, %r6", |a, b, c| a.abs_diff(b).wrapping_add(c));
    check_word("mul24.lo.u32 %r7, %r4, %r5", |a, b, _| (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF));
}

#[test]
fn bits() {
    check_word("shl.b32 %r7, %r4, %r5", |a, b, _| a.checked_shl(b).unwrap_or(0));
    check_word("shr.u32 %r7, %r4, %r5", |a, b, _| a.checked_shr(b).unwrap_or(0));
    check_word("shr.s32 %r7, %r4, %r5", |a, b, _| ((a as i32) >> b.min(31)) as u32);
    check_word("not.b32 %r7, %r4", |a, _, _| !a);
    check_word("cnot.b32 %r7, %r4", |a, _, _| u32::from(a == 0));
    check_word("xor.b32 %r7, %r4, %r5", |a, b, _| a ^ b);
    check_word("clz.b32 %r7, %r4", |a, _, _| a.leading_zeros());
}

#[test]
fn bits_of_64() {
    check("popc.b64 %r7, %d4; cvt.u64.u32 %d7, %r7;", |[a, ..]| a.count_ones().into());
    check("clz.b64 %r7, %d4; cvt.u64.u32 %d7, %r7;", |[a, ..]| a.leading_zeros().into());
    check("brev.b64 %d7, %d4;", |[a, ..]| a.reverse_bits());
    check("bfind.u64 %r7, %d4; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        a.checked_ilog2().unwrap_or(u32::MAX).into()
    });
    check("bfind.shiftamt.u32 %r7, %r4; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        (a as u32).checked_ilog2().map_or(u32::MAX, |top| 31 - top).into()
    });
    check("bfind.s32 %r7, %r4; cvt.u64.u32 %d7, %r7;", |[a, ..]| {
        let a = a as i32;
        (if a < 0 { !a as u32 } else { a as u32 }).checked_ilog2().unwrap_or(u32::MAX).into()
    });
    check("shl.b64 %d7, %d4, %r5;", |[a, b, _]| a.checked_shl(b as u32).unwrap_or(0));
    check("shr.s64 %d7, %d4, %r5;", |[a, b, _]| ((a as i64) >> (b as u32).min(63)) as u64);
    check("mul.hi.u64 %d7, %d4, %d5;", |[a, b, _]| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    check(
        "div.s64 %d7, %d4, %d5;",
        |[a, b, _]| {
            if b == 0 {
                u64::MAX
            } else {
                (a as i64).wrapping_div(b as i64) as u64
            }
        },
    );
    check("mad.wide.s32 %d7, %r4, %r5, %d6;", |[a, b, c]| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(c as i64) as u64
    });
    check("min.u64 %d7, %d4, %d5;", |[a, b, _]| a.min(b));
}

/// Bit by bit, as the ISA has it in its pseudocode.
#[test]
fn fields() {
    let extract = |a: u64, b: u64, c: u64, signed: bool| {
        let (at, length) = (b & 0xFF, c & 0xFF);
        let sign = if !signed || length == 0 { 0 } else { a >> (at + length - 1).min(31) & 1 };
        (0..32).fold(0, |d, i| d | if i < length && at + i <= 31 { a >> (at + i) & 1 } else { sign } << i)
    };
    let small = "and.b32 %r5, %r5, 63; and.b32 %r6, %r6, 63;";
    check(&format!("{small} bfe.u32 %r7, %r4, %r5, %r6; cvt.u64.u32 %d7, %r7;"), |[a, b, c]| {
        extract(a, b & 63, c & 63, false)
    });
    check(&format!("{small} bfe.s32 %r7, %r4, %r5, %r6; cvt.u64.u32 %d7, %r7;"), |[a, b, c]| {
        extract(a, b & 63, c & 63, true)
    });
    check("and.b32 %r6, %r6, 127; bfi.b64 %d7, %d4, %d5, %r6, 8;", |[a, b, c]| {
        let at = c & 127;
        (0..64).fold(0, |d, i| d | if i >= at && i < at + 8 { a >> (i - at) & 1 } else { b >> i & 1 } << i)
    });
    for table in [0x80u8, 0x96, 0xE8, 0xCA, 0x1B] {
        let by_bit = move |a: u32, b: u32, c: u32| {
            (0..32).fold(0, |d, i| {
                let row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
                d | (u32::from(table) >> row & 1) << i
            })
        };
        check_word(&format!("lop3.b32 %r7, %r4, %r5, %r6, {table}"), by_bit);
    }
    check_word("prmt.b32 %r7, %r4, %r5, %r6", |a, b, c| {
        let bytes: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
        u32::from_le_bytes(std::array::from_fn(|i| {
            let select = c >> (4 * i) & 15;
            let byte = bytes[select as usize & 7];
            if select & 8 != 0 {
                (byte as i8 >> 7) as u8
            } else {
                byte
            }
        }))
    });
    for (mode, bytes) in [
        ("f4e", [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]),
        ("b4e", [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]]),
        ("rc8", [[0; 4], [1; 4], [2; 4], [3; 4]]),
        ("ecl", [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3; 4]]),
        ("ecr", [[0; 4], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]),
        ("rc16", [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]]),
    ] {
        check_word(&format!("prmt.b32.{mode} %r7, %r4, %r5, %r6"), move |a, b, c| {
            let all: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
            u32::from_le_bytes(bytes[c as usize & 3].map(|which: usize| all[which]))
        });
    }
    let both = |a: u32, b: u32| u64::from(b) << 32 | u64::from(a);
    check_word("shf.l.wrap.b32 %r7, %r4, %r5, %r6", |a, b, c| (both(a, b) << (c & 31) >> 32) as u32);
    check_word("shf.r.clamp.b32 %r7, %r4, %r5, %r6", |a, b, c| (both(a, b) >> c.min(32)) as u32);
}

/// The NaN of f32 instructions.
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
    // Of a number and a NaN the number; -0 is below 0.
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
        // Zeros of both signs add up to 0.
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

/// The values of a 16-bit float without a sign, by their bits, up to the infinity.
fn halves(fraction: u32, bias: i32, infinity: u32) -> Vec<f64> {
    let value = |bits: u32| match (bits >> fraction, bits & ((1 << fraction) - 1)) {
        (0, rest) => f64::from(rest) * 2f64.powi(1 - bias - fraction as i32),
        (exponent, rest) => {
            f64::from(rest + (1 << fraction)) * 2f64.powi(exponent as i32 - bias - fraction as i32)
        }
    };
    (0..=infinity).map(value).collect()
}

/// The nearest of a list; of two the one whose number is even. What would be the next after the largest stands for infinity.
fn nearest(values: &[f64], value: f64) -> u64 {
    let (sign, value) = (u64::from(value.is_sign_negative()) << 15, value.abs());
    let above = values.partition_point(|&other| other < value).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let (up, down) = (values[above] - value, value - values[below]);
    let takes_up = above == below || up < down || (up == down && above % 2 == 0) || value >= values[above];
    sign | if takes_up { above } else { below } as u64
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
        // Sums and products are exact in f64, but for sums of bf16, of which the error is far below half a bit.
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

#[test]
fn moves_of_parts_and_predicates() {
    check("mov.b64 {%r7, %r8}, %d4; mov.b64 %d7, {%r8, %r7};", |[a, ..]| a.rotate_left(32));
    check("mov.b32 {_, %h7}, %r4; cvt.u64.u16 %d7, %h7;", |[a, ..]| (a as u32 >> 16).into());
    check("@%p5 mov.u64 %d7, %d4; @!%p5 mov.u64 %d7, %d6;", |[a, b, c]| if b != 0 { a } else { c });
    check(
        "xor.pred %p1, %p4, %p5; selp.b64 %d7, %d6, 0, %p1;",
        |[a, b, c]| if (a != 0) != (b != 0) { c } else { 0 },
    );
    check(".reg .b32 %x; ts: .branchtargets A, B, C; and.b32 %x, %r4, 1; brx.idx %x, ts;\nA: mov.u64 %d7, 5; bra C;\nB: mov.u64 %d7, 6;\nC:", |[a, ..]| 5 + (a & 1));
}

fn warp(body: &str) -> Vec<u64> {
    let args: Vec<Args> = (0..64).map(|i| [i * 3 + 1, i % 5, i]).collect();
    launch(body, &args, 64).unwrap_or_else(|error| panic!("{body}: {error}"))
}

#[test]
fn warps() {
    let lanes = || 0..64u64;
    let all = |f: &dyn Fn(u64) -> u64| lanes().map(f).collect::<Vec<_>>();
    let ballot = (0..32).filter(|lane| lane % 5 != 0).fold(0u64, |ballot, lane| ballot | 1 << lane);
    assert_eq!(warp("vote.sync.ballot.b32 %r7, %p5, -1; cvt.u64.u32 %d7, %r7;")[3], ballot);
    assert_eq!(warp("vote.sync.all.pred %p1, %p4, -1; selp.u64 %d7, 1, 0, %p1;"), vec![1; 64]);
    let down =
        "shfl.sync.down.b32 %r7|%p1, %r4, 4, 31, -1; cvt.u64.u32 %d7, %r7; @!%p1 add.s64 %d7, %d7, 1000;";
    assert_eq!(warp(down), all(&|i| if i % 32 < 28 { (i + 4) * 3 + 1 } else { i * 3 + 1001 }));
    assert_eq!(
        warp("shfl.sync.bfly.b32 %r7, %r4, 1, 31, -1; cvt.u64.u32 %d7, %r7;"),
        all(&|i| (i ^ 1) * 3 + 1)
    );
    assert_eq!(
        warp("shfl.sync.idx.b32 %r7, %r4, 9, 31, -1; cvt.u64.u32 %d7, %r7;"),
        all(&|i| (i / 32 * 32 + 9) * 3 + 1)
    );
    let sum = |first: u64| (first..first + 32).map(|i| i * 3 + 1).sum::<u64>();
    assert_eq!(warp("redux.sync.add.u32 %r7, %r4, -1; cvt.u64.u32 %d7, %r7;"), all(&|i| sum(i / 32 * 32)));
    let same =
        |i: u64| (0..32).filter(|j| (i / 32 * 32 + j) % 5 == i % 5).fold(0u64, |mask, j| mask | 1 << j);
    assert_eq!(warp("match.any.sync.b32 %r7, %r5, -1; cvt.u64.u32 %d7, %r7;"), all(&same));
    assert_eq!(warp("elect.sync %r7|%p1, -1; selp.u64 %d7, 1, 0, %p1;"), all(&|i| u64::from(i % 32 == 0)));
    assert_eq!(warp("mov.u32 %r7, %lanemask_lt; cvt.u64.u32 %d7, %r7;"), all(&|i| (1 << (i % 32)) - 1));
    assert_eq!(warp("bar.red.popc.u32 %r7, 0, %p5; cvt.u64.u32 %d7, %r7;"), vec![51; 64]);
    assert_eq!(
        warp("barrier.sync 3, 64; bar.red.or.pred %p1, 1, %p5; selp.u64 %d7, 1, 0, %p1;"),
        vec![1; 64]
    );
}

#[test]
fn shared_memory_and_atomics() {
    let shared = ".shared .align 8 .b8 s[512]; mov.u32 %r7, s; shl.b32 %r8, %r0, 3; add.u32 %r8, %r7, %r8;";
    let turned = format!("{shared} st.shared.u64 [%r8], %d4; bar.sync 0; sub.u32 %r8, 63, %r0; shl.b32 %r8, %r8, 3; add.u32 %r8, %r7, %r8; ld.shared.u64 %d7, [%r8];");
    assert_eq!(warp(&turned), (0..64).map(|i| (63 - i) * 3 + 1).collect::<Vec<u64>>());
    let generic = format!("{shared} cvt.u64.u32 %d10, %r8; cvta.shared.u64 %d10, %d10; st.u64 [%d10], %d4; isspacep.shared %p1, %d10; ld.u64 %d7, [%d10]; @!%p1 mov.u64 %d7, 0;");
    assert_eq!(warp(&generic), (0..64).map(|i| i * 3 + 1).collect::<Vec<u64>>());
    let count = ".shared .align 4 .b32 n; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [n], 0; bar.sync 0; atom.shared.add.u32 %r7, [n], 2; red.shared.max.u32 [n], 1; bar.sync 0; ld.shared.u32 %r7, [n]; cvt.u64.u32 %d7, %r7;";
    assert_eq!(warp(count), vec![128; 64]);
    let wrap = ".shared .align 4 .b32 n; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [n], 0; bar.sync 0; atom.shared.inc.u32 %r7, [n], 9; bar.sync 0; ld.shared.u32 %r7, [n]; cvt.u64.u32 %d7, %r7;";
    assert_eq!(warp(wrap), vec![4; 64]);
}

fn fault_of(body: &str) -> Fault {
    let args: Vec<Args> = (0..64).map(|i| [i, 0, 0]).collect();
    launch(body, &args, 64).expect_err(body).fault
}

#[test]
fn what_a_gpu_would_trap_on() {
    assert_eq!(fault_of("ld.global.v2.u64 {%d7, %d8}, [%d0+8];"), Fault::Misaligned);
    assert_eq!(fault_of("ld.global.u64 %d7, [%d0+-8];"), Fault::IllegalAddress);
    assert_eq!(fault_of("mov.u64 %d7, 16; st.u32 [%d7], %r4;"), Fault::IllegalAddress);
    assert_eq!(fault_of(".shared .b32 s[4]; ld.shared.u32 %r7, [s+4];"), Fault::UndefinedShared);
    assert_eq!(
        fault_of(".shared .b32 s[4]; mov.u32 %r7, 16; st.shared.u32 [%r7], %r4;"),
        Fault::IllegalAddress
    );
    assert_eq!(
        fault_of("setp.lt.u32 %p1, %r0, 7; @%p1 mov.u32 %r7, 1; cvt.u64.u32 %d7, %r7;"),
        Fault::UndefinedRegister
    );
    assert_eq!(fault_of("setp.lt.u32 %p1, %r0, 40; @%p1 bra A; bar.sync 0;\nA:"), Fault::Sync);
    assert_eq!(
        fault_of("setp.lt.u32 %p1, %r0, 7; @%p1 bra A; bar.sync 0; bra B;\nA: bar.sync 0;\nB:"),
        Fault::Sync
    );
    assert_eq!(fault_of("setp.eq.u32 %p1, %r0, 7; @%p1 exit; vote.sync.all.pred %p2, %p1, -1;"), Fault::Sync);
    assert_eq!(fault_of("trap;"), Fault::Trap);
    assert_eq!(fault_of("mov.u64 %d7, in; st.u32 [%d7], %r4;"), Fault::ReadOnly);
}

#[test]
fn a_kernel_that_never_ends() {
    let program = Program::load(&kernel("A: bra A;"), false).unwrap();
    let args = vec![[0u64; 3]; 32];
    let memory = Anywhere(vec![range_of(&args)]);
    let params: Vec<u8> = [args.as_ptr() as u64, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let settings = Settings { limit: std::time::Duration::from_millis(50), ..Settings::default() };
    let launch = Launch { kernel: "k", grid: [1; 3], block: [32, 1, 1], params: &params, memory: &memory };
    let error = program.launch(&[launch], settings).unwrap_err();
    assert_eq!(error.fault, Fault::Limit, "{error}");
    assert!(error.what.contains("threads 0 to 31 run or poll"), "{error}");
}

#[test]
fn what_is_not_known_is_an_error_with_its_line() {
    for (body, what) in [
        ("frobnicate.u32 %r7, %r4;", "frobnicate"),
        ("add.rz.f32 %f7, %f4, %f5;", "rz"),
        ("add.s32.hot %r7, %r4, %r5;", "hot"),
        ("ld.global.relaxed.u32 %r7, [%d0];", "relaxed"),
        ("add.s32 %r7, %d4, %r5;", "%d4"),
        ("add.s32 %r7, %r99, %r5;", "%r99"),
        ("bra NOWHERE;", "NOWHERE"),
        ("wgmma.fence.sync.aligned;", "wgmma"),
        ("ld.shared::cluster.u32 %r7, [%r4];", "cluster"),
        ("st.const.u32 [%d0], %r4;", "const"),
    ] {
        let text = kernel(&format!("\n{body}"));
        let error = Program::load(&text, false).err().unwrap_or_else(|| panic!("{body} was loaded"));
        assert!(error.what.contains(what), "{body}: {error}");
        assert!(text.lines().nth(error.line as usize - 1).unwrap().contains(body), "{body}: {error}");
    }
    let newer = kernel("").replace(".version 9.0", ".version 99.0");
    assert!(Program::load(&newer, false).err().unwrap().what.contains("newer"));
}
