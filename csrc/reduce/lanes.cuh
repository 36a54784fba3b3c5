// Lanes<A, N>: N values of the accumulator type A in registers, and the element-wise operations of
// reductions. A unit is the operand of one instruction: a scalar on a GPU, a vector on the host.
#pragma once

#include "../core/memory.cuh"

namespace FA_NAMESPACE {

template <class A>
struct UnsignedOf;
template <>
struct UnsignedOf<i32> {
  using type = u32;
};
template <>
struct UnsignedOf<i64> {
  using type = u64;
};
template <>
struct UnsignedOf<u64> {
  using type = u64;
};
template <>
struct UnsignedOf<float> {
  using type = u32;
};
template <>
struct UnsignedOf<double> {
  using type = u64;
};

#if FA_CUDA

template <class A>
struct Unit {
  using type = A;
  using mask = bool;
  using bits = typename UnsignedOf<A>::type;
  static constexpr u32 lanes = 1;
};

template <class To, class From>
FA_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the types have the same size");
  union {
    From from;
    To to;
  } both = {from};
  return both.to;
}

#else

#if defined(__AVX512F__)
constexpr u32 kUnitBytes = 64;
#elif defined(__AVX2__)
constexpr u32 kUnitBytes = 32;
#else
constexpr u32 kUnitBytes = 16;
#endif

template <class A>
struct Unit {
  using bits_lane = typename UnsignedOf<A>::type;
  typedef A type __attribute__((vector_size(kUnitBytes)));
  typedef bits_lane bits __attribute__((vector_size(kUnitBytes)));
  static constexpr u32 lanes = kUnitBytes / sizeof(A);
};

// A cast between vector types of equal size reinterprets the bits.
template <class To, class From>
FA_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the types have the same size");
  return (To)from;
}

#endif

template <class A, u32 N>
struct Lanes {
  using U = typename Unit<A>::type;
  static constexpr u32 units = N / Unit<A>::lanes;
  static_assert(units * Unit<A>::lanes == N && units > 0, "N is a multiple of the lanes of a unit");
  U unit[units];
};

// Applies f to each unit of one or two Lanes.
template <class A, u32 N, class F>
FA_FN Lanes<A, N> map(const Lanes<A, N> &a, F f) {
  Lanes<A, N> result;
  FA_UNROLL
  for (u32 i = 0; i < Lanes<A, N>::units; ++i)
    result.unit[i] = f(a.unit[i]);
  return result;
}

template <class A, u32 N, class F>
FA_FN Lanes<A, N> map(const Lanes<A, N> &a, const Lanes<A, N> &b, F f) {
  Lanes<A, N> result;
  FA_UNROLL
  for (u32 i = 0; i < Lanes<A, N>::units; ++i)
    result.unit[i] = f(a.unit[i], b.unit[i]);
  return result;
}

template <class A, u32 N>
FA_FN Lanes<A, N> splat(A value) {
  Lanes<A, N> result;
  FA_UNROLL
  for (u32 i = 0; i < Lanes<A, N>::units; ++i)
    result.unit[i] = value - typename Lanes<A, N>::U{};
  return result;
}

} // namespace FA_NAMESPACE
