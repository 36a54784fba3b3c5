// The element types: how each is stored, what it is accumulated in, and the conversion of one unit each way.
#pragma once

#include "lanes.cuh"

#if FA_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#elif defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace FA_NAMESPACE {

struct F16 {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};

// Accumulate: the accumulator type. i8 and u8 fit i32, i32 and u32 fit i64, for every world of 16 ranks:
// no sum that an average divides can overflow. 64-bit integers are averaged without a wider type.
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

// The one NaN that results hold: what GPU arithmetic produces.
template <class A>
FA_FN typename Unit<A>::type canonical_nan() {
  using Bits = typename Unit<A>::bits;
  constexpr auto all_but_sign = typename UnsignedOf<A>::type(-1) >> 1;
  return bit_cast<typename Unit<A>::type>(Bits{} + all_but_sign);
}

// Whether the conversion of a NaN to the type is that one.
template <class T>
constexpr bool kNarrowsToCanonicalNan = false;
template <>
constexpr bool kNarrowsToCanonicalNan<Bf16> = true;

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
};
template <>
struct Convert<Bf16> {
  using Small = u16;
  static FA_FN float widen(u16 bits) { return __uint_as_float(u32(bits) << 16); }
  static FA_FN u16 narrow(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
};

#else

template <class T>
struct Convert {
  using A = typename Element<T>::Accumulate;
  using S = typename Element<T>::Storage;
  using U = typename Unit<A>::type;
  typedef S Small __attribute__((vector_size(Unit<A>::lanes * sizeof(S))));
  static FA_FN U widen(Small small) { return __builtin_convertvector(small, U); }
  static FA_FN Small narrow(U unit) { return __builtin_convertvector(unit, Small); }
};

using FloatUnit = Unit<float>::type;
using FloatBits = Unit<float>::bits;
typedef u16 HalfUnit __attribute__((vector_size(Unit<float>::lanes * 2)));

template <>
struct Convert<Bf16> {
  using Small = HalfUnit;
  static FA_FN FloatUnit widen(Small small) { return bit_cast<FloatUnit>(longer(small) << 16); }
  // To nearest, ties to even, by integer addition; a NaN would carry into infinity, so it is replaced.
  static FA_FN Small narrow(FloatUnit value) {
    const FloatBits bits = bit_cast<FloatBits>(value);
    const FloatBits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return shorter(value == value ? rounded : FloatBits{} + 0x7FFF);
  }

private:
#if defined(__AVX512F__)
  // Of which some compilers make two halves and more.
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
  // With a full mask: the forms without one make some compilers warn of their own headers.
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
#else
  // The exponent is rebiased by a multiplication, which is exact and normalises subnormals; infinity and
  // NaN, whose exponent is all ones, get the rest of their exponent by hand.
  static FA_FN FloatUnit widen(Small small) {
    const FloatBits bits = __builtin_convertvector(small, FloatBits);
    const FloatBits magnitude = (bits & 0x7FFF) << 13;
    const FloatUnit scaled = bit_cast<FloatUnit>(magnitude) * 0x1p112f;
    const FloatBits special = magnitude | 0x7F800000;
    const FloatBits result = (bits & 0x7C00) == 0x7C00 ? special : bit_cast<FloatBits>(scaled);
    return bit_cast<FloatUnit>(result | ((bits & 0x8000) << 16));
  }
  // To nearest, ties to even. Normal results round by integer addition; subnormal ones by adding 0.5, whose
  // last place is the last place of a half's subnormals.
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

} // namespace FA_NAMESPACE
