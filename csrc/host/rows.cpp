// The typed loops of rows, for the types that have an RMSNorm.
#include "../reduce/rows.cuh"

#include "../core/pack.cuh"

namespace FA_NAMESPACE {
namespace {

// The sum of one vector's partials, halved until one is left.
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
struct WholeRun {
  static constexpr u32 bytes = kPartials * sizeof(T);
};

// body(byte offset, extent) for elements in runs of kPartials, of which the last may be partial.
template <class T, class Body>
FA_FN void for_each_run(u64 bytes, Body body) {
  u64 at = 0;
  for (; at + WholeRun<T>::bytes <= bytes; at += WholeRun<T>::bytes)
    body(at, WholeRun<T>{});
  if (at < bytes)
    body(at, Part{u32(bytes - at)});
}

template <class T, class Extent>
FA_FN Elements<T, kPartials> load_run(const u8 *from, Extent extent) {
  Elements<T, kPartials> elements = {};
  __builtin_memcpy(&elements, from, extent.bytes);
  return elements;
}

template <class T>
void add_span(const AddedSpan &span) {
  for_each_run<T>(span.bytes, [&](u64 at, auto extent) {
    const auto result = add(load_run<T>(span.sum + at, extent), load_run<T>(span.residual + at, extent));
    __builtin_memcpy(span.to + at, &result, extent.bytes);
    if (span.also != nullptr)
      __builtin_memcpy(span.also + at, &result, extent.bytes);
  });
}

template <class T>
float squares_of(const u8 *row, u64 bytes) {
  using L = LanesOf<T, kPartials>;
  using U = typename L::U;
  constexpr u64 kChunkBytes = kChunk * sizeof(T);
  float total = 0;
  for (u64 first = 0; first < bytes; first += kChunkBytes) {
    L sums = splat<float, kPartials>(0);
    const u64 left = bytes - first;
    for_each_run<T>(left < kChunkBytes ? left : kChunkBytes, [&](u64 at, auto extent) {
      const L x = widen<T, kPartials>(load_run<T>(row + first + at, extent));
      sums = map(sums, map(x, x, Arithmetic<float>::multiply), Arithmetic<float>::add);
    });
    FA_UNROLL
    for (u32 half = L::units / 2; half > 0; half /= 2) {
      FA_UNROLL
      for (u32 i = 0; i < half; ++i)
        sums.unit[i] = sums.unit[i] + sums.unit[i + half];
    }
    total += Vector<sizeof(U) / sizeof(float)>::sum(sums.unit[0]);
  }
  return total;
}

template <class T>
void norm_row(const NormedRow &row) {
  const u64 bytes = u64(row.length) * sizeof(T);
  const float scale = row_scale(squares_of<T>(row.row, bytes), row.length, row.epsilon);
  const bool weighted = row.weight != nullptr;
  for_each_run<T>(bytes, [&](u64 at, auto extent) {
    const auto x = load_run<T>(row.row + at, extent);
    const auto weight = weighted ? load_run<T>(row.weight + at, extent) : Elements<T, kPartials>{};
    const auto result = scaled(x, scale, weight, weighted, row.unit_offset);
    __builtin_memcpy(row.to + at, &result, extent.bytes);
  });
}

} // namespace

#define FA_ROW_LOOPS(name, element, ...)                                                                     \
  extern const RowLoops row_loops_##name = {add_span<element>, norm_row<element>};
FA_HOT_TYPES(FA_ROW_LOOPS, )

} // namespace FA_NAMESPACE
