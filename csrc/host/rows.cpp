// The typed loops of rows, for the types that have norms.
#include "../reduce/rows.cuh"
#include "../reduce/quantized_rows.cuh"

#include "row_sums.hpp"

namespace FA_NAMESPACE {
namespace {

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
    *span.squares = add_terms<T>(*span.squares, span.bytes, add);
}

template <class T>
float copy_row(u8 *to, const u8 *row, u64 bytes) {
  const auto get = [&](u64 at, auto extent) { return load<T>(row + at, extent); };
  if (to == nullptr)
    return add_terms<T>(0, bytes, get);
  return add_terms<T>(0, bytes, [&](u64 at, auto extent) {
    typename Twos<T>::Packed packed = {};
    if constexpr (__is_same(decltype(extent), All))
      load_units(&packed, row + at);
    else
      __builtin_memcpy(&packed, row + at, extent.bytes);
    store(to + at, packed, extent);
    return Twos<T>::widen(packed);
  });
}

// Normalises `length` elements of a row, from `first` on, with the state of the row's passes.
template <class T, class Norm>
FA_FN void norm_span(const NormedRow &row, const RowState &state, u32 first, u32 length, u8 *to) {
  const u64 skipped = u64(first) * sizeof(T), bytes = u64(length) * sizeof(T);
  const u8 *from = row.row + skipped;
  const u8 *weights = reinterpret_cast<const u8 *>(row.norm.weight) + skipped;
  const u8 *biases = reinterpret_cast<const u8 *>(row.norm.bias) + skipped;
  const bool has_weights = row.norm.weight != 0;
  // Each combination of weight and bias is a separate loop.
  const auto run = [&](auto weighted, auto biased) {
    for_each_two<T>(bytes, [&](u64 at, auto extent) {
      Two x = map(load<T>(from + at, extent), [&](Float x) { return Norm::apply(state, x); });
      x = weighted(x, at, extent);
      store(to + at, Twos<T>::narrow(biased(x, at, extent)), extent);
    });
  };
  const auto same = [](const Two &x, u64, auto) { return x; };
  const auto times = [&](auto weight_of) {
    return [&, weight_of](const Two &x, u64 at, auto extent) {
      return map(x, load<T>(weights + at, extent),
                 [&](Float x, Float weight) { return x * weight_of(weight); });
    };
  };
  const auto with_weights = [&](auto biased) {
    if (!has_weights)
      run(same, biased);
    else if (row.norm.unit_offset != 0)
      run(times([](Float weight) { return weight + 1.0f; }), biased);
    else
      run(times([](Float weight) { return weight; }), biased);
  };
  if (row.norm.bias == 0)
    return with_weights(same);
  with_weights([&](const Two &x, u64 at, auto extent) {
    return map(x, load<T>(biases + at, extent), [](Float x, Float bias) { return x + bias; });
  });
}

// Some normalised elements of a row, padded with zeros to a whole unit.
template <class T, class Norm>
class NormedSpan {
  using Small = typename Convert<T>::Small;

public:
  static constexpr u32 kMost = kChunk;

  NormedSpan(const NormedRow &row, const RowState &state, u32 first, u32 length) : length_(length) {
    norm_span<T, Norm>(row, state, first, length, bytes_);
    __builtin_memset(bytes_ + length * sizeof(T), 0, sizeof(Small));
  }

  // The bits of the greatest magnitude, of all elements or a range.
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

  // Stores narrow(element * inverse) for each element.
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

  void quantize(u8 *to, float scale, u32 dtype) const {
    const float inverse = 1.0f / scale, largest = largest_of(dtype);
    switch (dtype) {
    case FA_I8: return store(to, inverse, [](Float x) { return saturate_i8(x); });
    case FA_F8E4M3: return store(to, inverse, [&](Float x) { return saturate_f8(x, E4M3{}, largest); });
    default: return store(to, inverse, [&](Float x) { return saturate_f8(x, E5M2{}, largest); });
    }
  }

  // Stores the elements, two in a byte, and the scales of their blocks; `block` is the index in the row of
  // the first block.
  void quantize_blocks(u8 *to, const FaFused &norm, u32 number, u32 block) const {
    static_assert(FA_SCALED_BLOCK % kLanes == 0 && FA_SCALED_BLOCK == 16,
                  "a block is whole units, and 8 bytes when packed");
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
        // Packs pairs of bytes, then of 16-bit, then of 32-bit words.
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

// Quantises a row. A scale of the whole row takes a separate pass, because the normalised row is not stored
// anywhere.
template <class T, class Norm>
void quantize_row(const NormedRow &row, const RowState &state) {
  using Span = NormedSpan<T, Norm>;
  const u32 scaling = row.norm.scaling, dtype = row.norm.dtype, length = row.norm.row;
  u8 *to = numbers_of_row(row.norm, row.number);
  const u32 each = scaling == FA_SCALE_PER_GROUP ? u32(FA_SCALED_GROUP) : Span::kMost;
  const auto for_each_span = [&](auto body) {
    for (u32 first = 0; first < length; first += each)
      body(first, Span(row, state, first, length - first < each ? length - first : each));
  };
  if (has_scale_blocks(row.norm)) {
    return for_each_span([&](u32 first, const Span &span) {
      span.quantize_blocks(to + first / 2, row.norm, row.number, first / FA_SCALED_BLOCK);
    });
  }
  float *scales = scales_of_row(row.norm, row.number);
  if (scaling == FA_SCALE_PER_ROW) {
    u32 greatest = 0;
    for_each_span([&](u32, const Span &span) {
      const u32 own = span.greatest();
      greatest = own > greatest ? own : greatest;
    });
    *scales = scale_of(greatest, dtype);
  }
  for_each_span([&](u32 first, const Span &span) {
    float *scale = scales;
    if (scaling == FA_SCALE_PER_GROUP) {
      scale += first / each;
      *scale = scale_of(span.greatest(), dtype);
    }
    span.quantize(to + first, *scale, dtype);
  });
}

template <class T, class Norm>
void norm_row_by(const NormedRow &row, const RowState &state) {
  if (row.norm.scaling != FA_NOT_SCALED)
    quantize_row<T, Norm>(row, state);
  if (row.norm.normed == 0)
    return;
  u8 *to = reinterpret_cast<u8 *>(row.norm.normed) + row.number * u64(row.norm.row) * sizeof(T);
  norm_span<T, Norm>(row, state, 0, row.norm.row, to);
}

template <class T>
void norm_row(const NormedRow &row) {
  RowState state;
  with_norm(row.norm.norm, [&](auto norm) {
    using Norm = decltype(norm);
    if constexpr (__is_same(Norm, RmsNorm))
      Norm::after(0, row.squares, row.norm, &state);
    else
      measure<T, Norm>(row.row, row.norm, &state);
    norm_row_by<T, Norm>(row, state);
  });
}

} // namespace

#define FA_ROW_LOOPS(name, element, ...)                                                                     \
  extern const RowLoops row_loops_##name = {add_span<element>, copy_row<element>, norm_row<element>};
FA_HOT_TYPES(FA_ROW_LOOPS, )

} // namespace FA_NAMESPACE
