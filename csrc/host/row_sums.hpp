// Rows on the host: two vectors of consecutive elements at a time, and sums over a row in the order of
// reduce/rows.cuh.
#pragma once

#include "../core/pack.cuh"
#include "../reduce/rows.cuh"
#include "units.hpp"

namespace FA_NAMESPACE {

constexpr u32 kLanes = Unit<float>::lanes;
using Float = Unit<float>::type;
using Bits = Unit<float>::bits;

// What a loop handles at once: two units of consecutive elements, in an order that depends on the type.
struct Two {
  Float unit[2];
};
constexpr u32 kTwos = kPartials / (2 * kLanes);

template <class F>
FA_FN Two map(const Two &a, F f) {
  return {{f(a.unit[0]), f(a.unit[1])}};
}

template <class F>
FA_FN Two map(const Two &a, const Two &b, F f) {
  return {{f(a.unit[0], b.unit[0]), f(a.unit[1], b.unit[1])}};
}

// Packed: two units in memory.
template <class T>
struct Twos {
  static constexpr bool alternate = false;
  using Packed = Elements<T, 2 * kLanes>;

  static FA_FN Two widen(const Packed &packed) {
    Two two;
    for (u32 i = 0; i < 2; ++i)
      two.unit[i] = Convert<T>::widen(packed.unit[i]);
    return two;
  }

  static FA_FN Packed narrow(const Two &two) {
    return FA_NAMESPACE::narrow<T, 2 * kLanes>({{two.unit[0], two.unit[1]}});
  }
};

// One unit has the even elements, the other the odd ones: the halves of words, which takes fewer instructions
// than widening and narrowing in order.
template <>
struct Twos<Bf16> {
  static constexpr bool alternate = true;
  using Packed = Bits;

  static FA_FN Two widen(Packed words) {
    return {{bit_cast<Float>(words << 16), bit_cast<Float>(words & kUpper)}};
  }

  static FA_FN Packed narrow(const Two &two) {
#if defined(__AVX512BF16__)
    if (__builtin_expect(rounds_bf16(two.unit[0]) & rounds_bf16(two.unit[1]), true)) {
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)two.unit[1], (__m512)two.unit[0]);
      return (Packed)_mm512_permutexvar_epi16((__m512i)kInterleaved, halves);
    }
#endif
    return rounded(two);
  }

private:
  typedef u16 Halves __attribute__((vector_size(sizeof(Bits))));
  static constexpr u32 kUpper = 0xFFFF0000;
#if defined(__AVX512BF16__)
  static constexpr Halves kInterleaved = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#endif

  // As Convert<Bf16>::rounded, on all halves at once. The upper half is rounded up if the lower half is above
  // 0x8000, or equal to it and the upper half is odd. NaNs widened from bf16 have a lower half of 0.
  static FA_FN Packed rounded(const Two &two) {
    const Bits even = bit_cast<Bits>(two.unit[0]), odd = bit_cast<Bits>(two.unit[1]);
    const Halves upper = bit_cast<Halves>(even >> 16 | (odd & kUpper));
    const Halves lower = bit_cast<Halves>((even & ~kUpper) | odd << 16);
    const Halves nearest = upper - bit_cast<Halves>((lower | (upper & 1)) > 0x8000);
    return bit_cast<Packed>((nearest & 0x7FFF) > 0x7F80 ? Halves{} + 0x7FFF : nearest);
  }
};

// Two units of a type, which may be partial: missing elements count as zero.
template <class T>
constexpr u64 kTwoBytes = 2 * kLanes * sizeof(T);
struct All {};

template <class T>
FA_FN Two load(const u8 *from, All) {
  typename Twos<T>::Packed packed;
  load_units(&packed, from);
  return Twos<T>::widen(packed);
}

template <class T>
FA_FN Two load(const u8 *from, Partial part) {
  typename Twos<T>::Packed packed = {};
  __builtin_memcpy(&packed, from, part.bytes);
  return Twos<T>::widen(packed);
}

template <class Packed>
FA_FN void store(u8 *to, const Packed &packed, All) {
  store_units(to, packed);
}

template <class Packed>
FA_FN void store(u8 *to, const Packed &packed, Partial part) {
  __builtin_memcpy(to, &packed, part.bytes);
}

// Calls body(byte, extent) for each two units of `bytes` bytes.
template <class T, class Body>
FA_FN void for_each_two(u64 bytes, Body body) {
  u64 at = 0;
  for (; at + kTwoBytes<T> <= bytes; at += kTwoBytes<T>)
    body(at, All{});
  if (at < bytes)
    body(at, Partial{u32(bytes - at)});
}

// Adds the lanes of one vector by halving.
template <u32 Lanes>
struct Vector {
  typedef float type __attribute__((vector_size(Lanes * sizeof(float))));

  static FA_FN float sum(const type &vector) {
    if constexpr (Lanes == 2) {
      float last[2];
      __builtin_memcpy(last, &vector, sizeof last);
      return last[0] + last[1];
    } else {
      typename Vector<Lanes / 2>::type halves[2];
      __builtin_memcpy(halves, &vector, sizeof halves);
      return Vector<Lanes / 2>::sum(halves[0] + halves[1]);
    }
  }
};

template <class T>
FA_FN float sum_of_partials(Two (&sums)[kTwos]) {
  FA_UNROLL
  for (u32 half = kTwos / 2; half > 0; half /= 2) {
    FA_UNROLL
    for (u32 i = 0; i < half; ++i)
      sums[i] = map(sums[i], sums[i + half], [](Float a, Float b) { return a + b; });
  }
  const Float first = sums[0].unit[0], second = sums[0].unit[1];
  if constexpr (Twos<T>::alternate)
    return Vector<kLanes>::sum(first) + Vector<kLanes>::sum(second);
  else
    return Vector<kLanes>::sum(first + second);
}

// Returns lanes that are not zero where a partial pair of units has elements.
template <class T>
FA_FN Two lanes_of(Partial part) {
  const typename Twos<T>::Packed ones = Twos<T>::narrow({{Float{} + 1.0f, Float{} + 1.0f}});
  return load<T>(reinterpret_cast<const u8 *>(&ones), part);
}

// Returns the sum of term(x) over a chunk of `bytes` bytes, of which body(byte, extent) returns two units at
// a time. The term of missing elements is 0, if `Zeros`: that of a zero is.
template <class T, bool Zeros = true, class Body, class Term>
FA_FN float chunk_sum(u64 bytes, const Body &body, const Term &term) {
  constexpr u64 kRunBytes = kPartials * sizeof(T);
  const auto add = [&](Float sum, Float x) { return sum + term(x); };
  Two sums[kTwos] = {};
  u64 at = 0;
  for (; at + kRunBytes <= bytes; at += kRunBytes) {
    FA_UNROLL
    for (u32 i = 0; i < kTwos; ++i)
      sums[i] = map(sums[i], body(at + i * kTwoBytes<T>, All{}), add);
  }
  FA_UNROLL
  for (u32 i = 0; i < kTwos && at < bytes; ++i) {
    const u64 left = bytes - at < kTwoBytes<T> ? bytes - at : kTwoBytes<T>;
    const Two sum = map(sums[i], body(at, Partial{u32(left)}), add);
    if constexpr (Zeros) {
      sums[i] = sum;
    } else {
      const Two there = lanes_of<T>(Partial{u32(left)});
      for (u32 k = 0; k < 2; ++k)
        sums[i].unit[k] = there.unit[k] != 0 ? sum.unit[k] : sums[i].unit[k];
    }
    at += left;
  }
  return sum_of_partials<T>(sums);
}

// Returns `total` plus the terms of a norm, which is not centred, over `bytes` bytes of a row. They begin at
// a chunk.
template <class T, class Norm = RmsNorm, class Body>
FA_FN float add_terms(float total, u64 bytes, const Body &body) {
  constexpr u64 kChunkBytes = kChunk * sizeof(T);
  for (u64 at = 0; at < bytes; at += kChunkBytes) {
    const auto from_chunk = [&](u64 byte, auto extent) { return body(at + byte, extent); };
    total += chunk_sum<T>(bytes - at < kChunkBytes ? bytes - at : kChunkBytes, from_chunk,
                          [](Float x) { return Norm::term(x); });
  }
  return total;
}

// Computes how a row is normalised.
template <class T, class Norm>
FA_FN RowState measure(const u8 *row, const FaFused &norm) {
  constexpr u64 kChunkBytes = kChunk * sizeof(T);
  const u64 bytes = u64(norm.row) * sizeof(T);
  RowState state;
  if constexpr (!Norm::kCentred) {
    state.scale = Norm::scale(
        add_terms<T, Norm>(0, bytes, [&](u64 at, auto extent) { return load<T>(row + at, extent); }),
        norm.total, norm.epsilon);
  } else {
    ChunkTerms chunks[kMostChunks];
    float lengths[kMostChunks], total = 0, sum = 0;
    u32 count = 0;
    for (u64 at = 0; at < bytes; at += kChunkBytes, ++count) {
      const u64 size = bytes - at < kChunkBytes ? bytes - at : kChunkBytes;
      const auto get = [&](u64 byte, auto extent) { return load<T>(row + at + byte, extent); };
      const u32 length = u32(size / sizeof(T));
      const float mean = chunk_mean(chunk_sum<T>(size, get, [](Float x) { return x; }), length);
      chunks[count] = {chunk_sum<T, false>(size, get, [&](Float x) { return Norm::term(x - mean); }), mean};
      lengths[count] = float(length);
      total += lengths[count] * mean;
    }
    state.mean = divided(total, float(norm.total));
    for (u32 i = 0; i < count; ++i)
      sum += about_row_mean(chunks[i].sum, chunks[i].mean - state.mean, lengths[i]);
    state.scale = Norm::scale(sum, norm.total, norm.epsilon);
  }
  return state;
}

} // namespace FA_NAMESPACE
