//! Arithmetic between nodes, for engines that only move bytes: the operations of [`ReduceOp`], in the order of the
//! nodes.
//!
//! Floats of 8 and 16 bits are accumulated in f32, and rounded once, whatever the caller's floating-point state.

#[cfg(feature = "mpi")]
use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::float_state::in_default_state;
use crate::catalogue::{with_integers, DType, ReduceOp};
use crate::element::Element;

/// An element with its arithmetic.
pub(super) trait Number: Element {
    /// Type of the accumulator.
    type Wide: Copy + Default;

    fn read(bytes: &[u8]) -> Self::Wide;
    fn add(one: Self::Wide, other: Self::Wide) -> Self::Wide;
    fn multiply(one: Self::Wide, other: Self::Wide) -> Self::Wide;
    fn minimum(one: Self::Wide, other: Self::Wide) -> Self::Wide;
    fn maximum(one: Self::Wide, other: Self::Wide) -> Self::Wide;
    /// Returns the bitwise AND, OR and XOR. Never called for floats, which are refused earlier.
    fn bitwise(one: Self::Wide, other: Self::Wide) -> [Self::Wide; 3];
    /// Rounds to the element type. Averages, which only floats have, are first divided by the number of nodes.
    fn finish(wide: Self::Wide, op: ReduceOp, nodes: usize) -> Self;
}

/// Reduces the nodes' `parts`, in their order, into `output`. A part has the bytes of the elements of one node.
pub(super) fn reduce<T: Number>(parts: &[&[u8]], op: ReduceOp, output: &mut [T]) {
    in_default_state(|| reduce_here(parts, op, output));
}

/// Reduces like [`reduce`], in the floating-point state of the thread.
#[inline(never)]
fn reduce_here<T: Number>(parts: &[&[u8]], op: ReduceOp, output: &mut [T]) {
    /// Number of elements whose accumulators fit the first-level cache.
    const BLOCK: usize = 1024;
    let size = size_of::<T>();
    let mut accumulators = [T::Wide::default(); BLOCK];
    for (block, output) in output.chunks_mut(BLOCK).enumerate() {
        let accumulators = &mut accumulators[..output.len()];
        for (node, part) in parts.iter().enumerate() {
            let elements = part.chunks_exact(size).skip(block * BLOCK).map(T::read);
            let values = accumulators.iter_mut().zip(elements);
            match op {
                // Sums start from +0.
                ReduceOp::Sum | ReduceOp::Avg if node == 0 => {
                    values.for_each(|(sum, value)| *sum = T::add(T::Wide::default(), value));
                }
                _ if node == 0 => values.for_each(|(first, value)| *first = value),
                ReduceOp::Sum | ReduceOp::Avg => values.for_each(|(sum, value)| *sum = T::add(*sum, value)),
                ReduceOp::Prod => values.for_each(|(product, value)| *product = T::multiply(*product, value)),
                ReduceOp::Min => values.for_each(|(least, value)| *least = T::minimum(*least, value)),
                ReduceOp::Max => values.for_each(|(most, value)| *most = T::maximum(*most, value)),
                ReduceOp::BitAnd => values.for_each(|(bits, value)| *bits = T::bitwise(*bits, value)[0]),
                ReduceOp::BitOr => values.for_each(|(bits, value)| *bits = T::bitwise(*bits, value)[1]),
                ReduceOp::BitXor => values.for_each(|(bits, value)| *bits = T::bitwise(*bits, value)[2]),
                // Refused earlier.
                ReduceOp::PreMulSum(_) => {}
            }
        }
        for (output, &wide) in output.iter_mut().zip(&*accumulators) {
            *output = T::finish(wide, op, parts.len());
        }
    }
}

/// Returns whether every build of this crate has the arithmetic of a type: that of 8-bit floats depends on a feature,
/// in which nodes may differ.
pub(super) fn is_reduced(dtype: DType) -> bool {
    !matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
}

/// Reduces the elements of two nodes into those of this one, which is the first node or the second.
pub(super) fn reduce_pair<T: Number>(own: &mut [T], theirs: &[u8], is_first: bool, op: ReduceOp) {
    in_default_state(|| reduce_pair_here(own, theirs, is_first, op));
}

/// Reduces like [`reduce_pair`], in the floating-point state of the thread.
#[inline(never)]
fn reduce_pair_here<T: Number>(own: &mut [T], theirs: &[u8], is_first: bool, op: ReduceOp) {
    fn each<T: Number>(
        own: &mut [T],
        theirs: &[u8],
        is_first: bool,
        op: ReduceOp,
        combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
    ) {
        for (own, theirs) in own.iter_mut().zip(theirs.chunks_exact(size_of::<T>())) {
            let (mine, other) = (T::read(bytes_of(std::slice::from_ref(own))), T::read(theirs));
            let (first, second) = if is_first { (mine, other) } else { (other, mine) };
            *own = T::finish(combine(first, second), op, 2);
        }
    }
    match op {
        // Sums start from +0.
        ReduceOp::Sum | ReduceOp::Avg => {
            each(own, theirs, is_first, op, |one, other| T::add(T::add(T::Wide::default(), one), other));
        }
        ReduceOp::Prod => each(own, theirs, is_first, op, T::multiply),
        ReduceOp::Min => each(own, theirs, is_first, op, T::minimum),
        ReduceOp::Max => each(own, theirs, is_first, op, T::maximum),
        ReduceOp::BitAnd => each(own, theirs, is_first, op, |one, other| T::bitwise(one, other)[0]),
        ReduceOp::BitOr => each(own, theirs, is_first, op, |one, other| T::bitwise(one, other)[1]),
        ReduceOp::BitXor => each(own, theirs, is_first, op, |one, other| T::bitwise(one, other)[2]),
        // Refused earlier.
        ReduceOp::PreMulSum(_) => {}
    }
}

/// Returns the bytes of elements.
pub(super) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are numbers without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Returns the elements at an address, which may be null if there are none.
///
/// # Safety
///
/// `address` is valid for reads and writes of `count` elements, which nobody else accesses during `'a`.
pub(super) unsafe fn elements_at<'a, T: Element>(address: u64, count: usize) -> &'a mut [T] {
    match count {
        0 => &mut [],
        // SAFETY: the caller guarantees it.
        _ => unsafe { std::slice::from_raw_parts_mut(address as *mut T, count) },
    }
}

/// Converts bytes to an element.
macro_rules! read {
    ($type:ty, $bytes:expr) => {{
        let mut array = [0; size_of::<$type>()];
        array.copy_from_slice($bytes);
        <$type>::from_ne_bytes(array)
    }};
}

/// `$nan`: the bits of the NaN in results; all NaNs are replaced by it.
macro_rules! float {
    ($float:ty, $bits:ty, $wide:ty, $widen:expr, $narrow:expr, $nan:expr) => {
        impl Number for $float {
            type Wide = $wide;

            fn read(bytes: &[u8]) -> $wide {
                $widen(<$float>::from_bits(read!($bits, bytes)))
            }

            fn add(one: $wide, other: $wide) -> $wide {
                one + other
            }

            fn multiply(one: $wide, other: $wide) -> $wide {
                one * other
            }

            fn minimum(one: $wide, other: $wide) -> $wide {
                match one.is_nan() || other.is_nan() {
                    true => <$wide>::NAN,
                    // `total_cmp` orders -0 below +0.
                    false if other.total_cmp(&one).is_lt() => other,
                    false => one,
                }
            }

            fn maximum(one: $wide, other: $wide) -> $wide {
                match one.is_nan() || other.is_nan() {
                    true => <$wide>::NAN,
                    false if other.total_cmp(&one).is_gt() => other,
                    false => one,
                }
            }

            fn bitwise(one: $wide, _: $wide) -> [$wide; 3] {
                [one; 3]
            }

            fn finish(wide: $wide, op: ReduceOp, nodes: usize) -> Self {
                let value = if op == ReduceOp::Avg { wide / nodes as $wide } else { wide };
                match value.is_nan() {
                    true => <$float>::from_bits($nan),
                    false => $narrow(value),
                }
            }
        }
    };
}
float!(f16, u16, f32, f16::to_f32, f16::from_f32, 0x7FFF);
float!(bf16, u16, f32, bf16::to_f32, bf16::from_f32, 0x7FFF);
float!(f32, u32, f32, std::convert::identity, std::convert::identity, 0x7FFF_FFFF);
#[cfg(feature = "mpi")]
float!(F8E4M3, u8, f32, |value: F8E4M3| value.to_f32(), e4m3, 0x7F);
#[cfg(feature = "mpi")]
float!(F8E5M2, u8, f32, |value: F8E5M2| value.to_f32(), e5m2, 0x7F);
float!(f64, u64, f64, std::convert::identity, std::convert::identity, 0x7FFF_FFFF_FFFF_FFFF);

/// Rounds to nearest, ties to even. Unlike [`F8E4M3::from_f32`], this does not saturate: values that round beyond 448
/// become NaN. `value` is not NaN.
#[cfg(feature = "mpi")]
fn e4m3(value: f32) -> F8E4M3 {
    match value.abs() <= 464.0 {
        true => F8E4M3::from_f32(value),
        false => F8E4M3::from_bits(0x7F),
    }
}

/// Rounds to nearest, ties to even. Unlike [`F8E5M2::from_f32`], this does not saturate: values that round beyond 57344
/// become infinite.
#[cfg(feature = "mpi")]
fn e5m2(value: f32) -> F8E5M2 {
    match value.abs() < 61440.0 {
        true => F8E5M2::from_f32(value),
        false => F8E5M2::from_bits(if value > 0.0 { 0x7C } else { 0xFC }),
    }
}

macro_rules! integer {
    ($($integer:ty => $variant:ident),*) => {$(
        impl Number for $integer {
            type Wide = Self;

            fn read(bytes: &[u8]) -> Self {
                read!(Self, bytes)
            }

            fn add(one: Self, other: Self) -> Self {
                one.wrapping_add(other)
            }

            fn multiply(one: Self, other: Self) -> Self {
                one.wrapping_mul(other)
            }

            fn minimum(one: Self, other: Self) -> Self {
                one.min(other)
            }

            fn maximum(one: Self, other: Self) -> Self {
                one.max(other)
            }

            fn bitwise(one: Self, other: Self) -> [Self; 3] {
                [one & other, one | other, one ^ other]
            }

            fn finish(value: Self, _: ReduceOp, _: usize) -> Self {
                value
            }
        }
    )*};
}
with_integers!(integer);

#[cfg(test)]
mod tests {
    use super::*;

    /// Reduces one element of each node.
    fn reduce<T: Number + Default>(elements: &[T], op: ReduceOp) -> T {
        let parts: Vec<&[u8]> =
            elements.iter().map(|element| bytes_of(std::slice::from_ref(element))).collect();
        let mut output = [T::default()];
        super::reduce(&parts, op, &mut output);
        output[0]
    }

    #[test]
    fn several_blocks_are_reduced() {
        let nodes = [1, 3].map(|factor| (0..5000).map(|at| at * factor).collect::<Vec<u32>>());
        let mut output = vec![7; 5000];
        super::reduce(&[bytes_of(&nodes[0]), bytes_of(&nodes[1])], ReduceOp::Sum, &mut output);
        assert!((0..5000).zip(&output).all(|(at, &sum)| sum == 4 * at));
    }

    #[test]
    fn a_pair_is_reduced_like_two_parts() {
        let nodes = [[1.5f32, -0.0, f32::NAN, f32::MAX, 3.0], [2.5, -0.0, 1.0, f32::MAX, -4.0]];
        for op in ReduceOp::ARITHMETIC {
            let mut expected = [0.0; 5];
            super::reduce(&nodes.each_ref().map(|node| bytes_of(node)), op, &mut expected);
            for (own, is_first) in [(0, true), (1, false)] {
                let mut data = nodes[own];
                reduce_pair(&mut data, bytes_of(&nodes[1 - own]), is_first, op);
                assert_eq!(data.map(f32::to_bits), expected.map(f32::to_bits), "{op} on node {own}");
            }
        }
    }

    #[test]
    fn a_pair_of_integers_is_reduced_by_bits() {
        for (op, expected) in ReduceOp::INTEGER_ONLY.into_iter().zip([0b1000u32, 0b1110, 0b0110]) {
            let mut data = [0b1100u32; 3];
            reduce_pair(&mut data, bytes_of(&[0b1010u32; 3]), false, op);
            assert_eq!(data, [expected; 3], "{op}");
        }
    }

    /// Results have the bits of the default state, and the caller's state is preserved.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[test]
    fn the_same_bits_whatever_the_state_of_the_caller() {
        use super::super::float_state::state;

        // Flush-to-zero with denormals-are-zero, and each rounding mode.
        #[cfg(target_arch = "x86_64")]
        let others = [0x9FC0, 0x3F80, 0x5F80, 0x7F80];
        #[cfg(target_arch = "aarch64")]
        let others = [1 << 24, 1 << 22, 2 << 22, 3 << 22];
        // Sums of subnormals, and sums that are rounded.
        let nodes = [[f32::from_bits(3), 1.0, -1.0], [f32::from_bits(5), 1e-8, -1e-8]];
        let parts = nodes.each_ref().map(|node| bytes_of(node));
        // As in a call: the compiler does not know the values.
        let results = || {
            let (mut sums, mut pair) = ([0.0; 3], std::hint::black_box(nodes[0]));
            super::reduce(std::hint::black_box(&parts), ReduceOp::Sum, &mut sums);
            reduce_pair(&mut pair, parts[1], true, ReduceOp::Sum);
            [sums, pair].map(|results| results.map(f32::to_bits))
        };
        let expected = results();
        assert_eq!(expected, [[8, 1f32.to_bits(), (-1f32).to_bits()]; 2]);
        for other in others {
            let before = state::get();
            state::set(other);
            let found = results();
            let after = state::get();
            state::set(before);
            assert_eq!((found, after & state::MASK), (expected, other & state::MASK), "{other:x}");
        }
    }

    #[test]
    fn integers_wrap_and_are_compared_by_sign() {
        assert_eq!(reduce(&[100i8, 100, 100], ReduceOp::Sum), 100i8.wrapping_mul(3));
        assert_eq!(reduce(&[-128i8, 3, 5], ReduceOp::Prod), (-128i8).wrapping_mul(15));
        assert_eq!(reduce(&[200u8, 100], ReduceOp::Sum), 44);
        assert_eq!(reduce(&[u32::MAX, 2], ReduceOp::Prod), u32::MAX - 1);
        assert_eq!(reduce(&[i64::MIN, -1], ReduceOp::Sum), i64::MAX);
        assert_eq!(reduce(&[0b1101u8, 0b1011], ReduceOp::BitAnd), 0b1001);
        assert_eq!(reduce(&[-128i8, 1], ReduceOp::BitOr), -127);
        assert_eq!(reduce(&[u64::MAX, 1, 1], ReduceOp::BitXor), u64::MAX);
        extremes(0u8, 255);
        extremes(-128i8, 127);
        extremes(0u32, u32::MAX);
        extremes(i32::MIN, i32::MAX);
        extremes(5u64, 1 << 63);
        extremes(i64::MIN, 5);
    }

    fn extremes<T: Number + Default + PartialEq + std::fmt::Debug>(least: T, most: T) {
        assert_eq!(reduce(&[most, least], ReduceOp::Min), least);
        assert_eq!(reduce(&[least, most], ReduceOp::Max), most);
    }

    #[test]
    fn extremes_of_floats_are_those_of_ieee_754() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let pick = |a: f32, b: f32| if op == ReduceOp::Min { a } else { b };
            for (a, b) in [
                (-0.0, 0.0),
                (-1.0, 0.5),
                (-2.0, -1.0),
                (f32::NEG_INFINITY, f32::MIN),
                (f32::MAX, f32::INFINITY),
                (-f32::from_bits(1), f32::from_bits(1)),
            ] {
                for elements in [[a, b], [b, a]] {
                    assert_eq!(reduce(&elements, op).to_bits(), pick(a, b).to_bits());
                    let wide = elements.map(f64::from);
                    assert_eq!(reduce(&wide, op).to_bits(), f64::from(pick(a, b)).to_bits());
                }
            }
            for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)] {
                assert_eq!(reduce(&[f32::INFINITY, nan, f32::NEG_INFINITY], op).to_bits(), 0x7FFF_FFFF);
                let halves = [f16::from_f32(nan), f16::INFINITY, f16::NEG_INFINITY];
                assert_eq!(reduce(&halves, op).to_bits(), 0x7FFF);
            }
            let bits = reduce(&[f64::INFINITY, -f64::NAN], op).to_bits();
            assert_eq!(bits, 0x7FFF_FFFF_FFFF_FFFF);
        }
    }

    #[test]
    fn sums_of_16_bits_are_rounded_once_and_averages_do_not_overflow() {
        // In f16, 2048 + 1 is 2048.
        let halves = [2048.0, 1.0, 1.0].map(f16::from_f32);
        assert_eq!(reduce(&halves, ReduceOp::Sum), f16::from_f32(2050.0));
        let large = [60_000.0; 4].map(f16::from_f32);
        assert_eq!(reduce(&large, ReduceOp::Sum), f16::INFINITY);
        assert_eq!(reduce(&large, ReduceOp::Avg), large[0]);
        let opposite = [bf16::INFINITY, bf16::NEG_INFINITY];
        assert_eq!(reduce(&opposite, ReduceOp::Sum).to_bits(), 0x7FFF);
        assert_eq!(reduce(&[1.0f64, 2.0], ReduceOp::Avg), 1.5);
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn sums_of_8_bits_do_not_saturate() {
        let eighths = [16.0, 1.0, 1.0].map(e4m3);
        assert_eq!(reduce(&eighths, ReduceOp::Sum).to_bits(), e4m3(18.0).to_bits());
        assert_eq!(reduce(&[e4m3(448.0); 2], ReduceOp::Sum).to_bits(), 0x7F);
        assert_eq!(reduce(&[e5m2(57344.0); 2], ReduceOp::Sum).to_bits(), 0x7C);
        assert_eq!(reduce(&[e5m2(-57344.0); 2], ReduceOp::Sum).to_bits(), 0xFC);
    }
}
