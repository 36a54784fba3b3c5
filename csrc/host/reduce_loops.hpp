// The typed loops that reduce.
#pragma once

#include "../core/pack.cuh"
#include "../reduce/span.cuh"
#include "units.hpp"

namespace FA_NAMESPACE {

#if !defined(FA_HOT_SET)
#define FA_HOT_SET 1
#endif

template <class T>
constexpr bool kIsHot = false;
#define FA_IS_HOT(name, element, ...)                                                                        \
  template <>                                                                                                \
  constexpr bool kIsHot<element> = true;
FA_HOT_TYPES(FA_IS_HOT, )

// How far ahead inputs are prefetched, and up to what length: lines that another core has written take
// longer to load than out-of-order execution covers. For longer runs the hardware prefetchers suffice.
constexpr u64 kAhead = 16 * kPackBytes, kMostPrefetched = 128 << 10;

template <class T, u32 N>
FA_FN void load_elements(Elements<T, N> *to, const u8 *from, Whole) {
  load_units(to, from);
}
template <class T, u32 N>
FA_FN void load_elements(Elements<T, N> *to, const u8 *from, Partial extent) {
  __builtin_memcpy(to, from, extent.bytes);
}
template <class T, u32 N>
FA_FN void store_elements(u8 *to, const Elements<T, N> &from, Whole) {
  store_units(to, from);
}
template <class T, u32 N>
FA_FN void store_elements(u8 *to, const Elements<T, N> &from, Partial extent) {
  __builtin_memcpy(to, &from, extent.bytes);
}

// Reduces the last pack, which is partial, by the loop of whole packs: a second copy of each loop would be
// half of the code.
inline FA_OUTLINED void reduce_rest(ReduceSpan loop, const ReducedSpan &span) {
  const u64 whole = span.bytes / kPackBytes, at = whole * kPackBytes, rest = span.bytes - at;
  alignas(64) Pack packs[FA_MAX_RANKS], result;
  u64 inputs[FA_MAX_RANKS];
  for (u32 r = 0; r < span.count; ++r) {
    packs[r] = {};
    __builtin_memcpy(packs[r].byte,
                     reinterpret_cast<const u8 *>(span.inputs[r]) + span.from + whole * span.stride, rest);
    inputs[r] = u64(packs + r);
  }
  loop({inputs, span.count, span.world, 0, kPackBytes, kPackBytes, result.byte, nullptr, 0, span.scale});
  __builtin_memcpy(span.to + at, result.byte, rest);
  if (span.also != nullptr)
    __builtin_memcpy(span.also + at, result.byte, rest);
}

// `Count`: number of inputs; 0: `span.count`.
template <class T, u32 Code, u32 Count>
void reduce_span(const ReducedSpan &span) {
  constexpr u32 kLanes = kPackBytes / sizeof(T);
  const u32 count = Count == 0 ? span.count : Count;
  // A copy that no result can alias.
  const u8 *from[FA_MAX_RANKS];
  for (u32 r = 0; r < count; ++r)
    from[r] = reinterpret_cast<const u8 *>(span.inputs[r]) + span.from;

  const auto reduce = [&](u64 source, u64 at, auto extent) {
    [[maybe_unused]] Reduction<T, Op<Code>, kLanes> reduction(Op<Code>{}, span.world);
    const auto load = [&](u32 r) {
      Elements<T, kLanes> elements = {};
      load_elements(&elements, from[r] + source, extent);
      return elements;
    };
    Elements<T, kLanes> result;
    if constexpr (Code == FA_PREMUL_SUM) {
      result = premultiplied<T>(Op<Code>{}, load(0), span.scale);
    } else {
      if constexpr (Count == 0) {
        for (u32 r = 0; r < count; ++r)
          reduction.add(load(r));
      } else {
        FA_UNROLL
        for (u32 r = 0; r < Count; ++r)
          reduction.add(load(r));
      }
      result = reduction.finish();
    }
    store_elements(span.to + at, result, extent);
    if (span.also != nullptr)
      store_elements(span.also + at, result, extent);
  };
  const u64 whole = span.bytes / kPackBytes, reach = span.reach <= kMostPrefetched ? span.reach : 0;
  for (u64 i = 0; i < whole; ++i) {
    if (const u64 ahead = i * kPackBytes + kAhead; ahead < reach) {
      FA_UNROLL
      for (u32 r = 0; r < Count; ++r)
        __builtin_prefetch(from[r] + ahead);
    }
    reduce(i * span.stride, i * kPackBytes, Whole{});
  }
  if (const u32 rest = span.bytes % kPackBytes) {
    if constexpr (Count == 0)
      reduce_rest(reduce_span<T, Code, Count>, span);
    else
      reduce(whole * span.stride, whole * kPackBytes, Partial{rest});
  }
}

// The type whose loop a type has. Signed integers have those of unsigned ones where the bits are the same.
template <class T, bool IgnoresSign>
struct LoopOf {
  using type = T;
};
template <>
struct LoopOf<i8, true> {
  using type = u8;
};
template <>
struct LoopOf<i32, true> {
  using type = u32;
};
template <>
struct LoopOf<i64, true> {
  using type = u64;
};
template <u32 Code>
constexpr bool kIgnoresSign =
    Code == FA_SUM || Code == FA_PROD || Code == FA_BAND || Code == FA_BOR || Code == FA_BXOR;

template <class T, u32 Code>
constexpr void add_loops([[maybe_unused]] ReduceSpans *spans) {
  if constexpr (has_op<typename Element<T>::Accumulate>(Code)) {
    using L = typename LoopOf<T, kIgnoresSign<Code>>::type;
    for (u32 count = 0; count <= FA_MAX_RANKS; ++count)
      spans->of[Code][count] = reduce_span<L, Code, 0>;
  }
}

// Loops of sums of 2 to Count inputs, so that the loads of all inputs are issued at once.
template <class T, u32 Count = 8>
constexpr void add_hot_loops(ReduceSpans *spans) {
  spans->of[FA_SUM][Count] = reduce_span<T, FA_SUM, Count>;
  if constexpr (Count > 2)
    add_hot_loops<T, Count - 1>(spans);
}

template <class T>
constexpr ReduceSpans reduce_loops() {
  ReduceSpans spans = {};
#define FA_ADD_LOOPS(code, ...) add_loops<T, code>(&spans);
  FA_OPS(FA_ADD_LOOPS, )
  if constexpr (FA_HOT_SET && kIsHot<T>)
    add_hot_loops<T>(&spans);
  return spans;
}

} // namespace FA_NAMESPACE
