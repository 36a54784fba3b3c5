// The element types: storage, accumulator type, and conversion of one unit in both directions.
#pragma once

#include "lanes.cuh"

#if FA_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#elif defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace FA_NAMESPACE {

struct F16 {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};
struct F8E4M3 {
  u8 bits;
};
struct F8E5M2 {
  u8 bits;
};
// Either of the two 8-bit floats, selected at run time: on GPUs they share a kernel.
struct AnyF8 {
  u8 bits;
};

// Accumulate: the accumulator type. i8 and u8 fit i32, and i32 and u32 fit i64, for up to 16 ranks: the sum
// that an average divides cannot overflow. 64-bit integers are averaged without a wider type.
template <class T>
struct Element {
  using Accumulate = T;
  using Storage = T;
};
template <>
struct Element<F16> {
  using Accumulate = float;
  using Storage = u16;
};
template <>
struct Element<Bf16> {
  using Accumulate = float;
  using Storage = u16;
};
template <>
struct Element<F8E4M3> {
  using Accumulate = float;
  using Storage = u8;
};
template <>
struct Element<F8E5M2> {
  using Accumulate = float;
  using Storage = u8;
};
template <>
struct Element<AnyF8> {
  using Accumulate = float;
  using Storage = u8;
};
template <>
struct Element<i8> {
  using Accumulate = i32;
  using Storage = i8;
};
template <>
struct Element<u8> {
  using Accumulate = i32;
  using Storage = u8;
};
template <>
struct Element<i32> {
  using Accumulate = i64;
  using Storage = i32;
};
template <>
struct Element<u32> {
  using Accumulate = i64;
  using Storage = u32;
};

// The only NaN in results: the one that GPU arithmetic produces.
template <class A>
FA_FN typename Unit<A>::type canonical_nan() {
  using Bits = typename Unit<A>::bits;
  constexpr auto all_but_sign = typename UnsignedOf<A>::type(-1) >> 1;
  return bit_cast<typename Unit<A>::type>(Bits{} + all_but_sign);
}

// Whether narrowing to the type turns every NaN into the canonical one.
template <class T>
constexpr bool kNarrowsToCanonicalNan = false;
template <>
constexpr bool kNarrowsToCanonicalNan<Bf16> = true;
template <>
constexpr bool kNarrowsToCanonicalNan<F8E4M3> = true;
template <>
constexpr bool kNarrowsToCanonicalNan<F8E5M2> = true;
template <>
constexpr bool kNarrowsToCanonicalNan<AnyF8> = true;

// Whether two elements are narrowed by one instruction, which rounds as two do.
template <class T>
constexpr bool kNarrowsTwo = false;

using FloatUnit = Unit<float>::type;
using FloatBits = Unit<float>::bits;

// 1 / x, correctly rounded.
FA_FN float reciprocal(float x) {
#if FA_CUDA
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

// Converts between bytes and the low bits of a unit of words.
#if FA_CUDA
using ByteUnit = u8;
FA_FN FloatBits words_of(ByteUnit bytes) { return bytes; }
FA_FN ByteUnit bytes_of(FloatBits words) { return u8(words); }
#else
typedef u8 ByteUnit __attribute__((vector_size(Unit<float>::lanes)));
// Intrinsics, because some compilers convert lane by lane.
#if defined(__AVX512F__)
FA_FN FloatBits words_of(ByteUnit bytes) {
  return (FloatBits)_mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)bytes);
}
FA_FN ByteUnit bytes_of(FloatBits words) {
  return (ByteUnit)_mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)words);
}
#elif defined(__AVX2__) && defined(__F16C__)
FA_FN FloatBits words_of(ByteUnit bytes) {
  return (FloatBits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
}
FA_FN ByteUnit bytes_of(FloatBits words) {
  // The values fit in bytes, so nothing saturates.
  const __m256i low = (__m256i)(words & 0xFF);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  return (ByteUnit)_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
}
#else
FA_FN FloatBits words_of(ByteUnit bytes) { return __builtin_convertvector(bytes, FloatBits); }
FA_FN ByteUnit bytes_of(FloatBits words) { return __builtin_convertvector(words, ByteUnit); }
#endif
#endif

// The formats of the OCP 8-bit Floating Point Specification (OFP8), revision 1.0. `special`: the least
// magnitude that is not finite, and the result of an overflow. For e4m3, which has no infinity, that is its
// only NaN.
struct E4M3 {
  static constexpr u32 mantissa = 3, bias = 7, special = 0x7F;
};
struct E5M2 {
  static constexpr u32 mantissa = 2, bias = 15, special = 0x7C;
};
struct AnyFormat {
  u32 mantissa, bias, special;
};
template <class Format>
FA_FN constexpr AnyFormat any_format() {
  return {Format::mantissa, Format::bias, Format::special};
}

// The same conversion code on all devices, so that results cannot differ: the conversion instructions of some
// GPUs saturate instead.
template <class Format>
struct ConvertF8 {
  using Small = ByteUnit;
  Format format;

#if FA_CUDA
  // Converts through a half, exactly: an e5m2 is the upper byte of a half; an e4m3 is a half scaled by a
  // power of two, subnormals included.
  FA_FN FloatUnit widen(Small small) const {
    const u32 bits = small, dropped = 10 - format.mantissa;
    const u32 half = (bits & 0x80) << 8 | (bits & 0x7F) << dropped;
    const float value = __half2float(__ushort_as_half(u16(half))) * power(15 - format.bias);
    return (bits & 0x7F) == 0x7F ? canonical_nan<float>() : value;
  }
#else
  // Rebiases the exponent by an addition. A subnormal is read as if it had a leading 1, which is then
  // subtracted: a multiplication would have a subnormal operand, which is slow on some CPUs.
  FA_FN FloatUnit widen(Small small) const {
    const FloatBits bits = words_of(small), magnitude = bits & 0x7F;
    const FloatBits shifted = magnitude << (23 - format.mantissa);
    const FloatBits normal = shifted + ((127 - format.bias) << 23);
    const FloatUnit with_one = bit_cast<FloatUnit>(shifted + ((128 - format.bias) << 23));
    const FloatBits subnormal = bit_cast<FloatBits>(with_one - power(1 - format.bias));
    const FloatBits finite = magnitude < (1u << format.mantissa) ? subnormal : normal;
    const FloatBits result = magnitude < format.special ? finite : shifted | 0x7F800000;
    return bit_cast<FloatUnit>(result | ((bits & 0x80) << 24));
  }
#endif

  // Rounds to nearest, ties to even. Normal results round by integer addition, with a carry into the
  // exponent; subnormal ones by adding a float whose unit in the last place is theirs. Values above the
  // largest number after rounding overflow (OFP8's non-saturating conversion).
  FA_FN Small narrow(FloatUnit value) const {
    const u32 dropped = 23 - format.mantissa;
    const FloatBits bits = bit_cast<FloatBits>(value), magnitude = bits & 0x7FFFFFFF;
    const FloatBits rebiased = magnitude - ((127 - format.bias) << 23);
    const FloatBits normal =
        (rebiased + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped;
    const FloatUnit rounder = power(24 - format.bias - format.mantissa);
    const FloatUnit sum = bit_cast<FloatUnit>(magnitude) + rounder;
    const FloatBits subnormal = bit_cast<FloatBits>(sum) - bit_cast<FloatBits>(rounder);
    FloatBits result = magnitude < ((128 - format.bias) << 23) ? subnormal : normal;
    result = result < format.special ? result : FloatBits{} + format.special;
    result = magnitude > 0x7F800000 ? FloatBits{} + 0x7F : result;
    // NaN has no sign.
    return bytes_of(result == 0x7F ? result : result | ((bits >> 24) & 0x80));
  }

private:
  static FA_FN FloatUnit power(u32 exponent) {
    return bit_cast<FloatUnit>(FloatBits{} + ((127 + exponent) << 23));
  }
};

#if FA_CUDA

template <>
constexpr bool kNarrowsToCanonicalNan<F16> = true;

template <class T>
struct Convert {
  using Small = typename Element<T>::Storage;
  using A = typename Element<T>::Accumulate;
  static FA_FN A widen(Small value) { return A(value); }
  static FA_FN Small narrow(A value) { return Small(value); }
};
template <>
struct Convert<F16> {
  using Small = u16;
  static FA_FN float widen(u16 bits) { return __half2float(__ushort_as_half(bits)); }
  static FA_FN u16 narrow(float value) { return __half_as_ushort(__float2half_rn(value)); }
  static FA_FN u32 narrow_two(float low, float high) {
    const __half2 two = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32 *>(&two);
  }
};
template <>
struct Convert<Bf16> {
  using Small = u16;
  static FA_FN float widen(u16 bits) { return __uint_as_float(u32(bits) << 16); }
  static FA_FN u16 narrow(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
  static FA_FN u32 narrow_two(float low, float high) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32 *>(&two);
  }
};

template <>
constexpr bool kNarrowsTwo<F16> = true;
template <>
constexpr bool kNarrowsTwo<Bf16> = true;

#else

// The type between an integer and its accumulator; the type itself if there is none.
template <class S>
S half_of(S);
i16 half_of(i8);
u16 half_of(u8);

template <class T>
struct Convert {
  using A = typename Element<T>::Accumulate;
  using S = typename Element<T>::Storage;
  using U = typename Unit<A>::type;
  typedef S Small __attribute__((vector_size(Unit<A>::lanes * sizeof(S))));
  // Of half the accumulator's size: GCC 12 converts between vectors of 8-bit and 32-bit integers
  // element by element.
  using H = decltype(half_of(S{}));
  typedef H Half __attribute__((vector_size(Unit<A>::lanes * sizeof(H))));
  static FA_FN U widen(Small small) {
    return __builtin_convertvector(__builtin_convertvector(small, Half), U);
  }
  static FA_FN Small narrow(U unit) {
    return __builtin_convertvector(__builtin_convertvector(unit, Half), Small);
  }
};

typedef u16 HalfUnit __attribute__((vector_size(Unit<float>::lanes * 2)));

#if defined(__AVX512BF16__)
// Returns whether the bf16 instructions round like Convert<Bf16>::narrow: they flush subnormals to zero, and
// keep the payloads of NaNs.
FA_FN bool rounds_bf16(FloatUnit value) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
  return _mm512_fpclass_ps_mask((__m512)value, kQuietNan | kSubnormal | kSignallingNan) == 0;
}
#endif

template <>
struct Convert<Bf16> {
  using Small = HalfUnit;
  static FA_FN FloatUnit widen(Small small) { return bit_cast<FloatUnit>(longer(small) << 16); }
  static FA_FN Small narrow(FloatUnit value) {
#if defined(__AVX512BF16__)
    if (__builtin_expect(rounds_bf16(value), true))
      return (Small)_mm512_cvtneps_pbh((__m512)value);
#endif
    return rounded(value);
  }

private:
  // Rounds to nearest, ties to even, by integer addition. A NaN would carry into infinity, so it is replaced.
  static FA_FN Small rounded(FloatUnit value) {
    const FloatBits bits = bit_cast<FloatBits>(value);
    const FloatBits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return shorter(value == value ? rounded : FloatBits{} + 0x7FFF);
  }
#if defined(__AVX512F__)
  // Intrinsics, because some compilers split the conversion in halves.
  static FA_FN FloatBits longer(Small small) {
    return (FloatBits)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)small);
  }
  static FA_FN Small shorter(FloatBits bits) {
    return (Small)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)bits);
  }
#else
  static FA_FN FloatBits longer(Small small) { return __builtin_convertvector(small, FloatBits); }
  static FA_FN Small shorter(FloatBits bits) { return __builtin_convertvector(bits, Small); }
#endif
};

template <>
struct Convert<F16> {
  using Small = HalfUnit;
#if defined(__AVX512F__)
  // With a full mask: the unmasked intrinsics make some compilers warn about their own headers.
  static FA_FN FloatUnit widen(Small small) {
    return (FloatUnit)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)small);
  }
  static FA_FN Small narrow(FloatUnit value) {
    constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (Small)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)value, kRounding);
  }
#elif defined(__F16C__)
  static FA_FN FloatUnit widen(Small small) { return (FloatUnit)_mm256_cvtph_ps((__m128i)small); }
  static FA_FN Small narrow(FloatUnit value) {
    return (Small)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__aarch64__)
  // Part of every Armv8-A. They round as FPCR says: to nearest, in the state of core/float_state.cuh.
  static FA_FN FloatUnit widen(Small small) { return (FloatUnit)vcvt_f32_f16((float16x4_t)small); }
  static FA_FN Small narrow(FloatUnit value) { return (Small)vcvt_f16_f32((float32x4_t)value); }
#else
  // Rebiases the exponent by a multiplication, which is exact and normalises subnormals. Infinity and NaN,
  // whose exponent is all ones, get the remaining exponent bits explicitly.
  static FA_FN FloatUnit widen(Small small) {
    const FloatBits bits = __builtin_convertvector(small, FloatBits);
    const FloatBits magnitude = (bits & 0x7FFF) << 13;
    const FloatUnit scaled = bit_cast<FloatUnit>(magnitude) * 0x1p112f;
    const FloatBits special = magnitude | 0x7F800000;
    const FloatBits result = (bits & 0x7C00) == 0x7C00 ? special : bit_cast<FloatBits>(scaled);
    return bit_cast<FloatUnit>(result | ((bits & 0x8000) << 16));
  }
  // Rounds to nearest, ties to even. Normal results round by integer addition; subnormal ones by adding 0.5,
  // whose unit in the last place is that of a half's subnormals.
  static FA_FN Small narrow(FloatUnit value) {
    const FloatBits bits = bit_cast<FloatBits>(value);
    const FloatBits sign = (bits >> 16) & 0x8000;
    const FloatBits magnitude = bits & 0x7FFFFFFF;
    const FloatBits normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const FloatBits subnormal = bit_cast<FloatBits>(bit_cast<FloatUnit>(magnitude) + 0.5f) - 0x3F000000;
    FloatBits result = magnitude < 0x38800000 ? subnormal : normal;
    // 65520 and above round to infinity.
    result = magnitude >= 0x477FF000 ? FloatBits{} + 0x7C00 : result;
    result = magnitude > 0x7F800000 ? FloatBits{} + 0x7FFF : result;
    return __builtin_convertvector(result | sign, Small);
  }
#endif
};

#endif

template <>
struct Convert<F8E4M3> : ConvertF8<E4M3> {};
template <>
struct Convert<F8E5M2> : ConvertF8<E5M2> {};
template <>
struct Convert<AnyF8> : ConvertF8<AnyFormat> {
  FA_FN explicit Convert(u32 dtype)
      : ConvertF8{dtype == FA_F8E4M3 ? any_format<E4M3>() : any_format<E5M2>()} {}
};

// Narrows the values of `lanes` into `to`.
template <class T, class Lanes, class Elements>
FA_FN void narrow_into(const Convert<T> &convert, const Lanes &lanes, Elements *to) {
  constexpr u32 kUnits = Elements::units;
  if constexpr (kNarrowsTwo<T> && kUnits % 2 == 0) {
    FA_UNROLL
    for (u32 i = 0; i < kUnits; i += 2)
      *reinterpret_cast<u32 *>(to->unit + i) = convert.narrow_two(lanes.unit[i], lanes.unit[i + 1]);
  } else {
    FA_UNROLL
    for (u32 i = 0; i < kUnits; ++i)
      to->unit[i] = convert.narrow(lanes.unit[i]);
  }
}

} // namespace FA_NAMESPACE
