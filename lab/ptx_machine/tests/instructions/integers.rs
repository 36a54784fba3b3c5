//! Integers and bits.

use crate::run::{check, check_word};

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

/// Bit by bit, as in the pseudocode of the ISA.
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
