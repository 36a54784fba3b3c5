// The typed loops of rows, for the types that have an RMSNorm.
#include "../reduce/rows.cuh"
#include "../reduce/quantized_rows.cuh"

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

template <class F>
FA_FN Two map(const Two &a, F f) {
  return {{f(a.unit[0]), f(a.unit[1])}};
}

template <class F>
FA_FN Two map(const Two &a, const Two &b, F f) {
  return {{f(a.unit[0], b.unit[0]), f(a.unit[1], b.unit[1])}};
}

// Packed: two units as they lie in memory.
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

// Elements of even index, and of odd: they are the halves of words, which takes fewer instructions than to
// lengthen and to shorten them.
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

  // As Convert<Bf16>::rounded, of all halves at once. Where the lower half of a result is above a half, or is
  // that and the upper is odd, the upper is rounded up. The NaNs that come of bf16 have no lower half.
  static FA_FN Packed rounded(const Two &two) {
    const Bits even = bit_cast<Bits>(two.unit[0]), odd = bit_cast<Bits>(two.unit[1]);
    const Halves upper = bit_cast<Halves>(even >> 16 | (odd & kUpper));
    const Halves lower = bit_cast<Halves>((even & ~kUpper) | odd << 16);
    const Halves nearest = upper - bit_cast<Halves>((lower | (upper & 1)) > 0x8000);
    return bit_cast<Packed>((nearest & 0x7FFF) > 0x7F80 ? Halves{} + 0x7FFF : nearest);
  }
};

// Two units of a type, of which there may be a part: the rest counts as zero.
template <class T>
constexpr u64 kTwoBytes = 2 * kLanes * sizeof(T);
struct All {};

template <class T>
FA_FN Two load(const u8 *from, All) {
  typename Twos<T>::Packed packed;
  __builtin_memcpy(&packed, from, sizeof packed);
  return Twos<T>::widen(packed);
}

template <class T>
FA_FN Two load(const u8 *from, Part part) {
  typename Twos<T>::Packed packed = {};
  __builtin_memcpy(&packed, from, part.bytes);
  return Twos<T>::widen(packed);
}

template <class Packed>
FA_FN void store(u8 *to, const Packed &packed, All) {
  __builtin_memcpy(to, &packed, sizeof packed);
}

template <class Packed>
FA_FN void store(u8 *to, const Packed &packed, Part part) {
  __builtin_memcpy(to, &packed, part.bytes);
}

// body(byte, extent) for each two units of so many bytes.
template <class T, class Body>
FA_FN void for_each_two(u64 bytes, Body body) {
  u64 at = 0;
  for (; at + kTwoBytes<T> <= bytes; at += kTwoBytes<T>)
    body(at, All{});
  if (at < bytes)
    body(at, Part{u32(bytes - at)});
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

// `total` and the squares of what body(byte, extent) has of each two units of so many bytes, from the
// beginning of a chunk on.
template <class T, class Body>
FA_FN float add_squares(float total, u64 bytes, Body body) {
  constexpr u64 kChunkBytes = kChunk * sizeof(T), kRunBytes = kPartials * sizeof(T);
  const auto add = [](Float sum, Float x) { return sum + x * x; };
  for (u64 at = 0; at < bytes;) {
    const u64 end = bytes - at < kChunkBytes ? bytes : at + kChunkBytes;
    Two sums[kTwos] = {};
    for (; at + kRunBytes <= end; at += kRunBytes) {
      FA_UNROLL
      for (u32 i = 0; i < kTwos; ++i)
        sums[i] = map(sums[i], body(at + i * kTwoBytes<T>, All{}), add);
    }
    FA_UNROLL
    for (u32 i = 0; i < kTwos && at < end; ++i) {
      const u64 left = end - at < kTwoBytes<T> ? end - at : kTwoBytes<T>;
      sums[i] = map(sums[i], body(at, Part{u32(left)}), add);
      at += left;
    }
    total += sum_of_partials<T>(sums);
  }
  return total;
}

template <class T>
void add_span(const AddedSpan &span) {
  const auto add = [&](u64 at, auto extent) {
    const auto sum = Twos<T>::narrow(map(load<T>(span.sum + at, extent), load<T>(span.residual + at, extent),
                                         [](Float a, Float b) { return a + b; }));
    store(span.to + at, sum, extent);
    if (span.also != nullptr)
      store(span.also + at, sum, extent);
    return Twos<T>::widen(sum);
  };
  if (span.squares == nullptr)
    for_each_two<T>(span.bytes, add);
  else
    *span.squares = add_squares<T>(*span.squares, span.bytes, add);
}

template <class T>
float copy_row(u8 *to, const u8 *row, u64 bytes) {
  const auto get = [&](u64 at, auto extent) { return load<T>(row + at, extent); };
  if (to == nullptr)
    return add_squares<T>(0, bytes, get);
  return add_squares<T>(0, bytes, [&](u64 at, auto extent) {
    typename Twos<T>::Packed packed = {};
    if constexpr (__is_same(decltype(extent), All))
      __builtin_memcpy(&packed, row + at, sizeof packed);
    else
      __builtin_memcpy(&packed, row + at, extent.bytes);
    store(to + at, packed, extent);
    return Twos<T>::widen(packed);
  });
}

// `length` elements of a row, from the one at `first` on.
template <class T>
FA_FN void norm_span(const NormedRow &row, float scale, u32 first, u32 length, u8 *to) {
  const u8 *weights = reinterpret_cast<const u8 *>(row.norm.weight);
  const u64 skipped = u64(first) * sizeof(T), bytes = u64(length) * sizeof(T);
  const u8 *from = row.row + skipped;
  if (weights == nullptr) {
    return for_each_two<T>(bytes, [&](u64 at, auto extent) {
      const Two x = load<T>(from + at, extent);
      store(to + at, Twos<T>::narrow(map(x, [&](Float x) { return x * scale; })), extent);
    });
  }
  weights += skipped;
  const auto weighted = [&](auto weight_of) {
    for_each_two<T>(bytes, [&](u64 at, auto extent) {
      const Two x = load<T>(from + at, extent), weight = load<T>(weights + at, extent);
      const auto scaled = [&](Float x, Float weight) { return x * scale * weight_of(weight); };
      store(to + at, Twos<T>::narrow(map(x, weight, scaled)), extent);
    });
  };
  if (row.norm.unit_offset != 0)
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
    norm_span<T>(row, scale, first, length, bytes_);
    __builtin_memset(bytes_ + length * sizeof(T), 0, sizeof(Small));
  }

  // The bits of the greatest magnitude, of all or of some.
  u32 greatest() const { return greatest(0, length_); }
  u32 greatest(u32 first, u32 end) const {
    Bits most = {};
    for (u32 i = first; i < end; i += kLanes) {
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

  // Stores the elements, two in a byte, and the scales of their blocks, of which the row's first is `block`.
  void quantise_blocks(u8 *to, const FaFused &norm, u32 number, u32 block) const {
    static_assert(FA_SCALED_BLOCK % kLanes == 0 && FA_SCALED_BLOCK == 16, "whole units, and 8 bytes");
    const float global = *reinterpret_cast<const float *>(norm.global_scale);
    for (u32 first = 0; first < length_; first += FA_SCALED_BLOCK, ++block, to += FA_SCALED_BLOCK / 2) {
      const ByteUnit scale = scale_of_e2m1(greatest(first, first + FA_SCALED_BLOCK), global);
      *scale_of_block(norm, number, block) = scale[0];
      const Float inverse = inverse_of_e2m1(scale, global);
      u64 halves[2];
      for (u32 i = 0; i < FA_SCALED_BLOCK; i += kLanes) {
        const ByteUnit codes = saturate_e2m1(load(first + i) * inverse);
        __builtin_memcpy(reinterpret_cast<u8 *>(halves) + i, &codes, sizeof codes);
      }
      for (u32 half = 0; half < 2; ++half) {
        // Pairs of bytes, of words, and of those, are put together.
        u64 packed = halves[half];
        packed = (packed | packed >> 4) & 0x00FF00FF00FF00FF;
        packed = (packed | packed >> 8) & 0x0000FFFF0000FFFF;
        const u32 word = u32(packed | packed >> 16);
        __builtin_memcpy(to + half * sizeof word, &word, sizeof word);
      }
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

// A row as numbers of fewer bits. The scale of all of a row takes a pass of its own, as the normalised row is
// nowhere.
template <class T>
void quantise_row(const NormedRow &row, float scale) {
  const u32 scaling = row.norm.scaling, dtype = row.norm.dtype, length = row.norm.row;
  u8 *to = numbers_of_row(row.norm, row.number);
  const u32 each = scaling == FA_SCALE_PER_GROUP ? u32(FA_SCALED_GROUP) : NormedSpan<T>::kMost;
  const auto for_each_span = [&](auto body) {
    for (u32 first = 0; first < length; first += each)
      body(first, NormedSpan<T>(row, scale, first, length - first < each ? length - first : each));
  };
  if (has_blocks(row.norm)) {
    return for_each_span([&](u32 first, const NormedSpan<T> &span) {
      span.quantise_blocks(to + first / 2, row.norm, row.number, first / FA_SCALED_BLOCK);
    });
  }
  float *scales = scales_of_row(row.norm, row.number);
  if (scaling == FA_SCALE_PER_ROW) {
    u32 greatest = 0;
    for_each_span([&](u32, const NormedSpan<T> &span) {
      const u32 own = span.greatest();
      greatest = own > greatest ? own : greatest;
    });
    *scales = scale_of(greatest, dtype);
  }
  for_each_span([&](u32 first, const NormedSpan<T> &span) {
    float *scale = scales;
    if (scaling == FA_SCALE_PER_GROUP) {
      scale += first / each;
      *scale = scale_of(span.greatest(), dtype);
    }
    span.quantise(to + first, *scale, dtype);
  });
}

template <class T>
void norm_row(const NormedRow &row) {
  const float scale = row_scale(row.squares, row.norm.row, row.norm.epsilon);
  if (row.norm.scaling == FA_NOT_SCALED) {
    u8 *to = reinterpret_cast<u8 *>(row.norm.normed) + row.number * u64(row.norm.row) * sizeof(T);
    return norm_span<T>(row, scale, 0, row.norm.row, to);
  }
  quantise_row<T>(row, scale);
}

} // namespace

#define FA_ROW_LOOPS(name, element, ...)                                                                     \
  extern const RowLoops row_loops_##name = {add_span<element>, copy_row<element>, norm_row<element>};
FA_HOT_TYPES(FA_ROW_LOOPS, )

} // namespace FA_NAMESPACE
