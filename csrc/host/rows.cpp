// The typed loops of rows, for the types that have an RMSNorm.
#include "../reduce/rows.cuh"

#include "../core/pack.cuh"

namespace FA_NAMESPACE {
namespace {

constexpr u32 kLanes = Unit<float>::lanes, kUnits = kPartials / kLanes;
using Float = Unit<float>::type;

// A unit at a time, and not an array of them: some compilers keep those in memory.
template <class T>
FA_FN Float load_unit(const u8 *from) {
  typename Convert<T>::Small small;
  __builtin_memcpy(&small, from, sizeof small);
  return Convert<T>::widen(small);
}

template <class T>
FA_FN Elements<T, kLanes> rounded(Float unit) {
  return narrow<T, kLanes>({{unit}});
}

// body(from, to) for each unit of `bytes` bytes: addresses of as many sources, of which `sources[i]` is null
// or the first, and of the result. What is left at the end goes through memory that is as long as a unit.
template <class T, u32 N, class Body>
FA_FN void for_each_unit(const u8 *const (&sources)[N], u8 *to, u64 bytes, Body body) {
  constexpr u32 kBytes = kLanes * sizeof(T);
  const u8 *from[N];
  u64 at = 0;
  for (; at + kBytes <= bytes; at += kBytes) {
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      from[i] = sources[i] + at;
    body(from, to + at);
  }
  if (at == bytes)
    return;
  u8 last[N + 1][kBytes] = {};
  for (u32 i = 0; i < N; ++i) {
    __builtin_memcpy(last[i], sources[i] + at, bytes - at);
    from[i] = last[i];
  }
  body(from, last[N]);
  __builtin_memcpy(to + at, last[N], bytes - at);
}

template <class T>
void add_span(const AddedSpan &span) {
  for_each_unit<T>({span.sum, span.residual}, span.to, span.bytes, [](const u8 *const *from, u8 *to) {
    const auto result = rounded<T>(load_unit<T>(from[0]) + load_unit<T>(from[1]));
    __builtin_memcpy(to, &result, sizeof result);
  });
  if (span.also != nullptr)
    __builtin_memcpy(span.also, span.to, span.bytes);
}

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
FA_FN void add_squares(Float (&sums)[kUnits], const u8 *from) {
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i) {
    const Float x = load_unit<T>(from + i * kLanes * sizeof(T));
    sums[i] += x * x;
  }
}

template <class T>
FA_FN float squares_of_chunk(const u8 *from, u64 bytes) {
  constexpr u64 kRunBytes = kPartials * sizeof(T);
  Float sums[kUnits] = {};
  u64 at = 0;
  for (; at + kRunBytes <= bytes; at += kRunBytes)
    add_squares<T>(sums, from + at);
  if (at < bytes) {
    u8 last[kRunBytes] = {};
    __builtin_memcpy(last, from + at, bytes - at);
    add_squares<T>(sums, last);
  }
  FA_UNROLL
  for (u32 half = kUnits / 2; half > 0; half /= 2) {
    FA_UNROLL
    for (u32 i = 0; i < half; ++i)
      sums[i] += sums[i + half];
  }
  return Vector<kLanes>::sum(sums[0]);
}

template <class T>
float squares_of(const u8 *row, u64 bytes) {
  constexpr u64 kChunkBytes = kChunk * sizeof(T);
  float total = 0;
  for (; bytes > kChunkBytes; row += kChunkBytes, bytes -= kChunkBytes)
    total += squares_of_chunk<T>(row, kChunkBytes);
  return total + squares_of_chunk<T>(row, bytes);
}

template <class T>
void norm_row(const NormedRow &row) {
  const u64 bytes = u64(row.length) * sizeof(T);
  const float scale = row_scale(squares_of<T>(row.row, bytes), row.length, row.epsilon);
  if (row.weight == nullptr) {
    return for_each_unit<T>({row.row}, row.to, bytes, [&](const u8 *const *from, u8 *to) {
      const auto result = rounded<T>(load_unit<T>(from[0]) * scale);
      __builtin_memcpy(to, &result, sizeof result);
    });
  }
  const auto weighted = [&](auto weight_of) {
    for_each_unit<T>({row.row, row.weight}, row.to, bytes, [&](const u8 *const *from, u8 *to) {
      const auto result = rounded<T>(load_unit<T>(from[0]) * scale * weight_of(load_unit<T>(from[1])));
      __builtin_memcpy(to, &result, sizeof result);
    });
  };
  if (row.unit_offset)
    weighted([](Float weight) { return weight + 1.0f; });
  else
    weighted([](Float weight) { return weight; });
}

} // namespace

#define FA_ROW_LOOPS(name, element, ...)                                                                     \
  extern const RowLoops row_loops_##name = {add_span<element>, norm_row<element>};
FA_HOT_TYPES(FA_ROW_LOOPS, )

} // namespace FA_NAMESPACE
