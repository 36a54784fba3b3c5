// The arithmetic of accumulators of one type, which the functors of ops.cuh use.
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

template <class A>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

template <class A>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float lowest = -__builtin_huge_valf(), highest = __builtin_huge_valf();
};
template <>
struct Limits<double> {
  static constexpr double lowest = -__builtin_huge_val(), highest = __builtin_huge_val();
};
template <>
struct Limits<i32> {
  static constexpr i32 lowest = -0x7FFFFFFF - 1, highest = 0x7FFFFFFF;
};
template <>
struct Limits<i64> {
  static constexpr i64 lowest = -0x7FFFFFFFFFFFFFFF - 1, highest = 0x7FFFFFFFFFFFFFFF;
};
template <>
struct Limits<u64> {
  static constexpr u64 lowest = 0, highest = ~u64(0);
};

// Integer sums and products wrap: they are computed unsigned, where overflow is defined.
template <class A>
struct Arithmetic {
  using U = typename Unit<A>::type;
  using Bits = typename Unit<A>::bits;
  using Value = U;

  static FA_FN A zero() { return 0; }
  static FA_FN A one() { return 1; }
  static FA_FN A lowest() { return Limits<A>::lowest; }
  static FA_FN A highest() { return Limits<A>::highest; }
  static FA_FN A all_ones() { return A(-1); }
  static FA_FN U bitwise_and(U a, U b) { return a & b; }
  static FA_FN U bitwise_or(U a, U b) { return a | b; }
  static FA_FN U bitwise_xor(U a, U b) { return a ^ b; }

  static FA_FN U add(U a, U b) {
    if constexpr (kIsFloat<A>)
      return a + b;
    else
      return bit_cast<U>(bit_cast<Bits>(a) + bit_cast<Bits>(b));
  }

  static FA_FN U multiply(U a, U b) {
    if constexpr (kIsFloat<A>)
      return a * b;
    else
      return bit_cast<U>(bit_cast<Bits>(a) * bit_cast<Bits>(b));
  }

  // IEEE 754-2019 minimum and maximum: NaN if either is NaN, and -0 is below +0.
  static FA_FN U minimum(U a, U b) {
#if FA_CUDA && __CUDA_ARCH__ >= 800
    if constexpr (kIsFloat<A> && sizeof(A) == 4) {
      U least;
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
      return least;
    }
#endif
    if constexpr (kIsFloat<A>) {
      const U equal = bit_cast<U>(bit_cast<Bits>(a) | bit_cast<Bits>(b));
      const U least = a < b ? a : equal;
      return ordered(a, b, b < a ? b : least);
    } else {
      return a < b ? a : b;
    }
  }

  static FA_FN U maximum(U a, U b) {
#if FA_CUDA && __CUDA_ARCH__ >= 800
    if constexpr (kIsFloat<A> && sizeof(A) == 4) {
      U most;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
      return most;
    }
#endif
    if constexpr (kIsFloat<A>) {
      const U equal = bit_cast<U>(bit_cast<Bits>(a) & bit_cast<Bits>(b));
      const U most = a > b ? a : equal;
      return ordered(a, b, b > a ? b : most);
    } else {
      return a > b ? a : b;
    }
  }

private:
  static FA_FN U ordered(U a, U b, U result) { return (a == a) & (b == b) ? result : canonical_nan<A>(); }
};

} // namespace FA_NAMESPACE
