// Quantised rows on the host: some elements of a row at a time, in the type of the call.
#pragma once

#include "../reduce/quantized_rows.cuh"
#include "row_sums.hpp"

namespace FA_NAMESPACE {

// The greatest lane of a vector of `Lanes` words, by halving.
template <u32 Lanes>
struct Greatest {
  typedef u32 Vector __attribute__((vector_size(Lanes * sizeof(u32))));

  static FA_FN u32 of(const Vector &vector) {
    typename Greatest<Lanes / 2>::Vector halves[2];
    __builtin_memcpy(halves, &vector, sizeof halves);
    return Greatest<Lanes / 2>::of(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
};
template <>
struct Greatest<1> {
  typedef u32 Vector __attribute__((vector_size(sizeof(u32))));
  static FA_FN u32 of(const Vector &vector) { return vector[0]; }
};

// Some elements of a normalised row, padded with zeros to a whole unit.
template <class T>
class NormedSpan {
  using Small = typename Convert<T>::Small;

public:
  static constexpr u32 kMost = kChunk;

  // load(first, length, to) copies elements of the row.
  template <class Load>
  NormedSpan(const Load &load, u32 first, u32 length) : length_(length) {
    load(first, length, bytes_);
    __builtin_memset(bytes_ + length * sizeof(T), 0, sizeof(Small));
  }

  // The bits of the greatest magnitude of a range that begins at a whole unit.
  u32 greatest(u32 first, u32 end) const {
    Bits most = {};
    for (u32 i = first; i < end; i += kLanes) {
      const Bits magnitude = bit_cast<Bits>(widened(i)) & 0x7FFFFFFF;
      most = magnitude > most ? magnitude : most;
    }
    return Greatest<kLanes>::of(bit_cast<typename Greatest<kLanes>::Vector>(most));
  }
  u32 greatest() const { return greatest(0, length_); }

  // Quantises a range that begins at a whole unit. `to`: where the span's first number goes.
  void quantize(u8 *to, const FaFused &norm, float inverse, u32 first, u32 end) const {
    if (has_halves(norm))
      return store_halves(to, inverse, first, end);
    switch (norm.dtype) {
    case FA_I8: return store(to, inverse, first, end, [](Float x) { return saturate_i8(x); });
    case FA_F8E4M3: return store(to, inverse, first, end, [](Float x) { return bytes_of(e4m3().narrow(x)); });
    default: return store(to, inverse, first, end, [](Float x) { return bytes_of(e5m2().narrow(x)); });
    }
  }

private:
  // Elements of which numbers of 4 bits are packed at once. Groups and rows are multiples of it.
  static constexpr u32 kHalves = 16;
  static_assert(kHalves % kLanes == 0, "whole units");

  u32 length_;
  alignas(64) u8 bytes_[kMost * sizeof(T) + sizeof(Small)];

  FA_FN Float widened(u32 i) const {
    Small small;
    __builtin_memcpy(&small, bytes_ + i * sizeof(T), sizeof small);
    return Convert<T>::widen(small);
  }

  // Stores narrow(element * inverse) for each element.
  template <class Narrow>
  FA_FN void store(u8 *to, float inverse, u32 first, u32 end, Narrow narrow) const {
    u32 i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const ByteUnit bytes = narrow(widened(i) * inverse);
      __builtin_memcpy(to + i, &bytes, sizeof bytes);
    }
    if (i < end) {
      const ByteUnit bytes = narrow(widened(i) * inverse);
      __builtin_memcpy(to + i, &bytes, end - i);
    }
  }

  FA_FN void store_halves(u8 *to, float inverse, u32 first, u32 end) const {
    for (u32 at = first; at < end; at += kHalves) {
      u64 bytes[2];
      for (u32 i = 0; i < kHalves; i += kLanes) {
        const ByteUnit codes = bytes_of(e2m1().narrow(widened(at + i) * inverse));
        __builtin_memcpy(reinterpret_cast<u8 *>(bytes) + i, &codes, sizeof codes);
      }
      for (u32 half = 0; half < 2; ++half) {
        // Packs pairs of bytes, then of 16-bit, then of 32-bit words.
        u64 packed = bytes[half];
        packed = (packed | packed >> 4) & 0x00FF00FF00FF00FF;
        packed = (packed | packed >> 8) & 0x0000FFFF0000FFFF;
        const u32 word = u32(packed | packed >> 16);
        __builtin_memcpy(to + at / 2 + half * sizeof word, &word, sizeof word);
      }
    }
  }
};

// Groups of which scales are computed together, so that their latencies overlap.
constexpr u32 kGroups = 32;
static_assert(kGroups % kLanes == 0, "whole units");

// Stores the scales of `count` consecutive groups of a row from their greatest magnitudes, which are padded
// to whole units, and returns the factors by which elements are quantised. Scales are those of
// scale_of_group().
FA_FN void store_scales_of_groups(const FaFused &norm, u32 row, u32 group, u32 count, const u32 *greatest,
                                  float *inverses) {
  if (norm.scales.rule != FA_RULE_E4M3) {
    for (u32 i = 0; i < count; ++i) {
      const GroupScale scale = scale_of_group(norm, greatest[i]);
      store_scale(norm.scales, row, group + i, scale.bits);
      inverses[i] = scale.inverse;
    }
    return;
  }
  const float global = *reinterpret_cast<const float *>(norm.global_scale);
  for (u32 i = 0; i < count; i += kLanes) {
    Float most;
    __builtin_memcpy(&most, greatest + i, sizeof most);
    const ByteUnit scales = scales_of_e2m1(most, global);
    const Float values = ConvertF8<E4M3>{}.widen(scales);
    const Float factors = values == 0 ? Float{} : global / values;
    __builtin_memcpy(inverses + i, &factors, sizeof factors);
    for (u32 lane = 0; lane < kLanes && i + lane < count; ++lane)
      store_scale(norm.scales, row, group + i + lane, scales[lane]);
  }
}

// Quantises a row. load(first, length, to) copies elements of the normalised row.
template <class T, class Load>
void quantize_row(const FaFused &norm, u32 row, const Load &load) {
  using Span = NormedSpan<T>;
  u8 *to = numbers_of_row(norm, row);
  const u32 length = norm.row;
  const auto for_each_span = [&](auto body) {
    for (u32 first = 0; first < length; first += Span::kMost) {
      const u32 count = length - first < Span::kMost ? length - first : Span::kMost;
      body(first, count, Span(load, first, count));
    }
  };
  const u32 group = norm.scales.group;
  if (group != 0) {
    // Spans are whole groups, except at the row's end.
    return for_each_span([&](u32 begin, u32 count, const Span &span) {
      for (u32 first = 0; first < count; first += kGroups * group) {
        u32 greatest[kGroups] = {}, groups = 0;
        float inverses[kGroups];
        const auto end_of = [&](u32 i) {
          const u32 end = first + (i + 1) * group;
          return end < count ? end : count;
        };
        for (; groups < kGroups && first + groups * group < count; ++groups)
          greatest[groups] = span.greatest(first + groups * group, end_of(groups));
        store_scales_of_groups(norm, row, (begin + first) / group, groups, greatest, inverses);
        for (u32 i = 0; i < groups; ++i)
          span.quantize(to + begin * norm.number_bits / 8, norm, inverses[i], first + i * group, end_of(i));
      }
    });
  }
  float inverse;
  if (norm.scaling == FA_SCALE_GIVEN) {
    inverse = given_inverse(norm);
  } else {
    u32 greatest = 0;
    for_each_span([&](u32, u32, const Span &span) {
      const u32 own = span.greatest();
      greatest = own > greatest ? own : greatest;
    });
    const GroupScale scale = scale_of_group(norm, greatest);
    store_scale(norm.scales, row, 0, scale.bits);
    inverse = scale.inverse;
  }
  for_each_span([&](u32 first, u32 count, const Span &span) {
    span.quantize(to + first * norm.number_bits / 8, norm, inverse, 0, count);
  });
}

} // namespace FA_NAMESPACE
