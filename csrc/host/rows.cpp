// The typed loops of rows, for the types that have an RMSNorm.
#include "../reduce/rows.cuh"
#include "../reduce/quantise.cuh"

#include "../core/pack.cuh"

namespace FA_NAMESPACE {
namespace {

constexpr u32 kLanes = Unit<float>::lanes;
using Float = Unit<float>::type;
using Bits = Unit<float>::bits;

// What a loop works on at once: two units of consecutive elements. Their order in the units is the type's
// own.
struct Two {
  Float unit[2];
};
constexpr u32 kTwos = kPartials / (2 * kLanes);

template <class T>
struct Twos {
  static constexpr bool alternate = false;

  static FA_FN Two load(const u8 *from) {
    typename Convert<T>::Small small[2];
    __builtin_memcpy(small, from, sizeof small);
    return {{Convert<T>::widen(small[0]), Convert<T>::widen(small[1])}};
  }

  static FA_FN void store(u8 *to, const Two &two) {
    const auto first = narrow<T, kLanes>({{two.unit[0]}}), second = narrow<T, kLanes>({{two.unit[1]}});
    __builtin_memcpy(to, &first, sizeof first);
    __builtin_memcpy(to + sizeof first, &second, sizeof second);
  }
};

// Elements of even index, and of odd: they are the halves of words, which takes fewer instructions than to
// lengthen and to shorten them.
template <>
struct Twos<Bf16> {
  static constexpr bool alternate = true;

  static FA_FN Two load(const u8 *from) {
    Bits words;
    __builtin_memcpy(&words, from, sizeof words);
    return {{bit_cast<Float>(words << 16), bit_cast<Float>(words & kUpper)}};
  }

  static FA_FN void store(u8 *to, const Two &two) {
    const Bits words = rounded(two.unit[0]) >> 16 | (rounded(two.unit[1]) & kUpper);
    __builtin_memcpy(to, &words, sizeof words);
  }

private:
  static constexpr u32 kUpper = 0xFFFF0000;

  // As Convert<Bf16>::narrow, in the upper half of each word.
  static FA_FN Bits rounded(Float value) {
    const Bits bits = bit_cast<Bits>(value);
    return value == value ? bits + 0x7FFF + ((bits >> 16) & 1) : Bits{} + 0x7FFFFFFF;
  }
};

// body(from) for each two units of `bytes` bytes, whose result is stored, in a second place as well if that
// is not null: `from` has the addresses in as many sources. What is left at the end goes through memory that
// is as long as two units.
template <class T, u32 N, class Body>
FA_FN void for_each_two(const u8 *const (&sources)[N], u8 *to, u8 *also, u64 bytes, Body body) {
  constexpr u32 kBytes = 2 * kLanes * sizeof(T);
  const u8 *from[N];
  u64 at = 0;
  for (; at + kBytes <= bytes; at += kBytes) {
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      from[i] = sources[i] + at;
    const Two two = body(from);
    Twos<T>::store(to + at, two);
    if (also != nullptr)
      Twos<T>::store(also + at, two);
  }
  if (at == bytes)
    return;
  u8 last[N][kBytes] = {}, result[kBytes];
  for (u32 i = 0; i < N; ++i) {
    __builtin_memcpy(last[i], sources[i] + at, bytes - at);
    from[i] = last[i];
  }
  Twos<T>::store(result, body(from));
  __builtin_memcpy(to + at, result, bytes - at);
  if (also != nullptr)
    __builtin_memcpy(also + at, result, bytes - at);
}

template <class F>
FA_FN Two map(const Two &a, F f) {
  return {{f(a.unit[0]), f(a.unit[1])}};
}

template <class F>
FA_FN Two map(const Two &a, const Two &b, F f) {
  return {{f(a.unit[0], b.unit[0]), f(a.unit[1], b.unit[1])}};
}

template <class T>
void add_span(const AddedSpan &span) {
  for_each_two<T>({span.sum, span.residual}, span.to, span.also, span.bytes, [](const u8 *const *from) {
    return map(Twos<T>::load(from[0]), Twos<T>::load(from[1]), [](Float a, Float b) { return a + b; });
  });
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
FA_FN void add_squares(Two (&sums)[kTwos], const u8 *from) {
  FA_UNROLL
  for (u32 i = 0; i < kTwos; ++i)
    sums[i] = map(sums[i], Twos<T>::load(from + i * 2 * kLanes * sizeof(T)),
                  [](Float sum, Float x) { return sum + x * x; });
}

template <class T>
FA_FN float squares_of_chunk(const u8 *from, u64 bytes) {
  constexpr u64 kRunBytes = kPartials * sizeof(T);
  Two sums[kTwos] = {};
  u64 at = 0;
  for (; at + kRunBytes <= bytes; at += kRunBytes)
    add_squares<T>(sums, from + at);
  if (at < bytes) {
    u8 last[kRunBytes] = {};
    __builtin_memcpy(last, from + at, bytes - at);
    add_squares<T>(sums, last);
  }
  FA_UNROLL
  for (u32 half = kTwos / 2; half > 0; half /= 2) {
    FA_UNROLL
    for (u32 i = 0; i < half; ++i)
      sums[i] = map(sums[i], sums[i + half], [](Float a, Float b) { return a + b; });
  }
  const Float even = sums[0].unit[0], odd = sums[0].unit[1];
  if constexpr (Twos<T>::alternate)
    return Vector<kLanes>::sum(even) + Vector<kLanes>::sum(odd);
  else
    return Vector<kLanes>::sum(even + odd);
}

template <class T>
float squares_of(const u8 *row, u64 bytes) {
  constexpr u64 kChunkBytes = kChunk * sizeof(T);
  float total = 0;
  for (; bytes > kChunkBytes; row += kChunkBytes, bytes -= kChunkBytes)
    total += squares_of_chunk<T>(row, kChunkBytes);
  return total + squares_of_chunk<T>(row, bytes);
}

// `length` elements of a row, from the one at `first` on.
template <class T>
FA_FN void norm_span(const NormedRow &row, float scale, u32 first, u32 length, u8 *to, u8 *also) {
  const u64 at = u64(first) * sizeof(T), bytes = u64(length) * sizeof(T);
  const u8 *from = row.row + at;
  if (row.weight == nullptr) {
    return for_each_two<T>({from}, to, also, bytes, [&](const u8 *const *from) {
      return map(Twos<T>::load(from[0]), [&](Float x) { return x * scale; });
    });
  }
  const auto weighted = [&](auto weight_of) {
    for_each_two<T>({from, row.weight + at}, to, also, bytes, [&](const u8 *const *from) {
      return map(Twos<T>::load(from[0]), Twos<T>::load(from[1]),
                 [&](Float x, Float weight) { return x * scale * weight_of(weight); });
    });
  };
  if (row.unit_offset)
    weighted([](Float weight) { return weight + 1.0f; });
  else
    weighted([](Float weight) { return weight; });
}

// Some normalised elements of a row, with zeros behind them up to a whole unit.
template <class T>
class NormedSpan {
  using Small = typename Convert<T>::Small;

public:
  static constexpr u32 kMost = kChunk;

  NormedSpan(const NormedRow &row, float scale, u32 first, u32 length) : length_(length) {
    norm_span<T>(row, scale, first, length, bytes_, nullptr);
    __builtin_memset(bytes_ + length * sizeof(T), 0, sizeof(Small));
  }

  // The bits of the greatest magnitude.
  u32 greatest() const {
    Bits most = {};
    for (u32 i = 0; i < length_; i += kLanes) {
      const Bits magnitude = bit_cast<Bits>(load(i)) & 0x7FFFFFFF;
      most = magnitude > most ? magnitude : most;
    }
    u32 greatest = 0;
    for (u32 lane = 0; lane < kLanes; ++lane)
      greatest = most[lane] > greatest ? most[lane] : greatest;
    return greatest;
  }

  // Stores the elements by what narrow() makes of them, divided by the scale.
  template <class Narrow>
  FA_FN void store(u8 *to, float inverse, Narrow narrow) const {
    u32 i = 0;
    for (; i + kLanes <= length_; i += kLanes) {
      const ByteUnit bytes = narrow(load(i) * inverse);
      __builtin_memcpy(to + i, &bytes, sizeof bytes);
    }
    if (i < length_) {
      const ByteUnit bytes = narrow(load(i) * inverse);
      __builtin_memcpy(to + i, &bytes, length_ - i);
    }
  }

  void quantise(u8 *to, float scale, u32 dtype) const {
    const float inverse = 1.0f / scale, largest = largest_of(dtype);
    switch (dtype) {
    case FA_I8: return store(to, inverse, [](Float x) { return saturate_i8(x); });
    case FA_F8E4M3: return store(to, inverse, [&](Float x) { return saturate_f8(x, E4M3{}, largest); });
    default: return store(to, inverse, [&](Float x) { return saturate_f8(x, E5M2{}, largest); });
    }
  }

private:
  FA_FN Float load(u32 i) const {
    Small small;
    __builtin_memcpy(&small, bytes_ + i * sizeof(T), sizeof small);
    return Convert<T>::widen(small);
  }

  u32 length_;
  alignas(64) u8 bytes_[kMost * sizeof(T) + sizeof(Small)];
};

// A row as 8-bit numbers. The scale of all of a row takes a pass of its own, as the normalised row is
// nowhere.
template <class T>
void quantise_row(const NormedRow &row, float scale) {
  const u32 each = row.scaling == FA_SCALE_OF_GROUP ? u32(FA_SCALED_GROUP) : NormedSpan<T>::kMost;
  const auto for_each_span = [&](auto body) {
    for (u32 first = 0; first < row.length; first += each)
      body(first, NormedSpan<T>(row, scale, first, row.length - first < each ? row.length - first : each));
  };
  if (row.scaling == FA_SCALE_OF_ROW) {
    u32 greatest = 0;
    for_each_span([&](u32, const NormedSpan<T> &span) {
      const u32 own = span.greatest();
      greatest = own > greatest ? own : greatest;
    });
    *row.scales = scale_of(greatest, row.dtype);
  }
  for_each_span([&](u32 first, const NormedSpan<T> &span) {
    float *scale = row.scales;
    if (row.scaling == FA_SCALE_OF_GROUP) {
      scale += first / each;
      *scale = scale_of(span.greatest(), row.dtype);
    }
    span.quantise(row.to + first, *scale, row.dtype);
  });
}

template <class T>
void norm_row(const NormedRow &row) {
  const u64 bytes = u64(row.length) * sizeof(T);
  const float scale = row_scale(squares_of<T>(row.row, bytes), row.length, row.epsilon);
  if (row.scaling == FA_NOT_SCALED)
    norm_span<T>(row, scale, 0, row.length, row.to, row.also);
  else
    quantise_row<T>(row, scale);
}

} // namespace

#define FA_ROW_LOOPS(name, element, ...)                                                                     \
  extern const RowLoops row_loops_##name = {add_span<element>, norm_row<element>};
FA_HOT_TYPES(FA_ROW_LOOPS, )

} // namespace FA_NAMESPACE
