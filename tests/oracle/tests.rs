//! Tests of the oracle, by hand-computed results. Not in its files: they would compile all of it again, optimised.

use fast_allreduce::{DType, ReduceOp};
use fast_allreduce_oracle::number::{bf16, e4m3, e5m2, f16, Number, F8E4M3, F8E5M2};
use fast_allreduce_oracle::oracle::check;
use fast_allreduce_oracle::order::Order;
use ReduceOp::{Avg, Max, Min, Prod, Sum};

#[test]
fn integers_wrap_and_average_toward_zero() {
    assert_eq!(u8::reduce(Sum, &[200, 100]), 44);
    assert_eq!(i8::reduce(Prod, &[100, 3]), 44);
    assert_eq!(i8::reduce(Avg, &[-128, -128, -127]), -127);
    assert_eq!(i64::reduce(Avg, &[-7, 0]), -3);
    assert_eq!(u64::reduce(Avg, &[u64::MAX; 16]), u64::MAX);
    assert_eq!(u64::reduce(Prod, &[u64::MAX, u64::MAX]), 1);
    assert_eq!(i64::reduce(Min, &[3, i64::MIN, 2]), i64::MIN);
    assert_eq!(i32::reduce(Max, &[-3, -2]), -2);
    assert_eq!(u8::reduce(ReduceOp::BitAnd, &[0b1101, 0b1011]), 0b1001);
    assert_eq!(i8::reduce(ReduceOp::BitOr, &[-128, 1]), -127);
    assert_eq!(u64::reduce(ReduceOp::BitXor, &[u64::MAX, 1, 1]), u64::MAX);
}

#[test]
fn halves_accumulate_in_f32_and_round_once() {
    // In f16, 2048 + 1 rounds to 2048 at each step.
    let ones = [2048.0, 1.0, 1.0].map(f16::from_f32);
    assert_eq!(f16::reduce(Sum, &ones).to_f32(), 2050.0);
    let ones = [256.0, 1.0, 1.0].map(bf16::from_f32);
    assert_eq!(bf16::reduce(Sum, &ones).to_f32(), 258.0);
    // 1 + 2^-11 is halfway between two halves, and 2^-23 tips it.
    let tipped = [1.0, 0.000_488_28, 0.000_000_12].map(f16::from_f32);
    assert_eq!(f16::reduce(Sum, &tipped).to_bits(), 0x3c01);
    assert_eq!(f16::reduce(Avg, &[1.0, 2.0].map(f16::from_f32)).to_f32(), 1.5);
    assert_eq!(f16::reduce(Sum, &[f16::MAX; 2]), f16::INFINITY);
}

#[test]
fn floats_add_in_rank_order_from_positive_zero() {
    assert_eq!(f32::reduce(Sum, &[-0.0, -0.0]).to_bits(), 0);
    let (forth, back) = ([1e8f32, 1.0, -1e8], [-1e8f32, 1e8, 1.0]);
    assert_eq!((f32::reduce(Sum, &forth), f32::reduce(Sum, &back)), (0.0, 1.0));
}

#[test]
fn minimum_and_maximum_know_zeros_and_nan() {
    for values in [[0.0f64, -0.0], [-0.0, 0.0]] {
        assert!(f64::reduce(Min, &values).is_sign_negative());
        assert!(f64::reduce(Max, &values).is_sign_positive());
    }
    for values in [[-f32::NAN, 1.0], [1.0, f32::NAN]] {
        assert_eq!(f32::reduce(Min, &values).to_bits(), 0x7fff_ffff);
        assert_eq!(f32::reduce(Max, &values).to_bits(), 0x7fff_ffff);
    }
    assert_eq!(bf16::reduce(Sum, &[bf16::INFINITY, bf16::NEG_INFINITY]).to_bits(), 0x7fff);
}

/// Tests every number, the midpoints between numbers and their neighbours, and values around overflow.
fn rounds<T: Number>(finite: u8, next: f32, round: fn(f32) -> T) {
    let number = |code: u8| T::of_bits(code.into()).to_f64() as f32;
    let is = |value: f32, code: u8| {
        assert_eq!(round(value).bits(), code.into(), "{value:e}");
        let negative = if code == 0x7F { code } else { code | 0x80 };
        assert_eq!(round(-value).bits(), negative.into(), "-{value:e}");
    };
    let (before, after) =
        (|value: f32| f32::from_bits(value.to_bits() - 1), |value: f32| f32::from_bits(value.to_bits() + 1));
    for code in 0..=finite {
        let above = if code == finite { next } else { number(code + 1) };
        assert!(number(code) < above && number(code | 0x80).to_bits() == (-number(code)).to_bits());
        let middle = (number(code) + above) / 2.0;
        is(number(code), code);
        is(before(middle), code);
        is(middle, code + (code & 1));
        is(after(middle), code + 1);
    }
    is(f32::MAX, finite + 1);
    is(f32::INFINITY, finite + 1);
    is(f32::NAN, 0x7F);
}

#[test]
fn every_8_bit_float_and_every_middle() {
    assert_eq!(F8E4M3::from_bits(0x7E).to_f32(), 448.0);
    assert_eq!(F8E4M3::from_bits(1).to_f32(), 2f32.powi(-9));
    assert_eq!(F8E4M3::from_bits(0x38).to_f32(), 1.0);
    assert_eq!(F8E5M2::from_bits(0x7B).to_f32(), 57344.0);
    assert_eq!(F8E5M2::from_bits(1).to_f32(), 2f32.powi(-16));
    assert_eq!(F8E5M2::from_bits(0x3C).to_f32(), 1.0);
    assert_eq!(F8E5M2::from_bits(0xFC).to_f32(), f32::NEG_INFINITY);
    assert!([0x7F, 0xFF].iter().all(|&code| F8E4M3::from_bits(code).to_f32().is_nan()));
    assert!([0x7D, 0x7E, 0xFF].iter().all(|&code| F8E5M2::from_bits(code).to_f32().is_nan()));
    rounds::<F8E4M3>(0x7E, 480.0, e4m3);
    rounds::<F8E5M2>(0x7B, 65536.0, e5m2);
}

fn halves(order: Order, values: &[f32]) -> Vec<f32> {
    let input = |value: &f32| half::f16::from_f32(*value).to_le_bytes().repeat(4);
    let inputs: Vec<_> = values.iter().map(input).collect();
    let result = order.reduce(DType::F16, ReduceOp::Sum, &inputs);
    result.chunks(2).map(|bits| half::f16::from_le_bytes([bits[0], bits[1]]).to_f32()).collect()
}

#[test]
fn orders_round_where_they_say() {
    // In f16, 2048 + 1 is 2048.
    let values = [2048.0, 1.0, 1.0];
    assert_eq!(halves(Order::Ranks, &values), [2050.0; 4]);
    // Four packs of one element; slices of one, one and two packs, which start at ranks 0, 1 and 2.
    assert_eq!(halves(Order::Ring { piece: 4, pack: 1 }, &values), [2048.0, 2050.0, 2048.0, 2048.0]);
    // Pieces of one pack each: all of them are in the last slice.
    assert_eq!(halves(Order::Ring { piece: 1, pack: 1 }, &values), [2048.0; 4]);
    // In f32 the sum of a socket is 2050, in f16 it is rounded first.
    assert_eq!(halves(Order::Sockets { each: 2 }, &[2048.0, 1.0, 1.0, 1.0]), [2050.0; 4]);
    // (0 + 2) + 1.
    assert_eq!(halves(Order::Halving, &values), [2048.0; 4]);
    assert_eq!(halves(Order::Halving, &[1.0, 2048.0, 1.0]), [2050.0; 4]);
}

#[test]
#[should_panic(expected = "out of bounds")]
fn a_wrong_sum_is_out_of_bounds() {
    let one = u64::from(1f32.to_bits());
    check::<f32>(ReduceOp::Sum, &[one, one], u64::from(2.00001f32.to_bits()));
}
