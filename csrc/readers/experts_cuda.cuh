// Packs of an input that are computed from experts' rows.
#pragma once

#include "../reduce/rows.cuh"
#include "experts.cuh"

namespace FA_NAMESPACE {

// A weight, of these bits, as a float.
template <class T>
FA_FN float weight_of(bool is_float, u32 bits) {
  if (sizeof(T) == sizeof(float) || is_float)
    return __uint_as_float(bits);
  return widen<T, 1>({{typename Convert<T>::Small(bits)}}).unit[0];
}

template <class T>
class ExpertRows {
  static constexpr u32 kEach = kPackBytes / sizeof(T), kAtOnce = 8;

public:
  static constexpr bool kMayCompute = true;

  FA_FN ExpertRows(const FaLaunch &launch, const FaFused &norm) : norm_(norm), input_(launch.input) {}

  FA_FN bool computes() const { return norm_.experts.top_k != 0; }

  // The pack, of `bytes` bytes, for which an input in memory would have the address `from`.
  FA_FN Pack pack(const u8 *from, u32 bytes) const {
    return gather(norm_, input_, u64(from) - input_, bytes);
  }

private:
  const FaFused &norm_;
  const u64 input_;

  static FA_FN float widened(const u8 *element) {
    return widen<T, 1>(*reinterpret_cast<const Elements<T, 1> *>(element)).unit[0];
  }
  // An out-of-line function: one copy for all kernels of a type.
  static FA_OUTLINED Pack gather(const FaFused &norm, u64 input, u64 at, u32 bytes) {
    const FaExperts &experts = norm.experts;
    const u32 row_bytes = norm.row * u32(sizeof(T));
    const bool float_weights = has_float_weights(experts);
    if (bytes == kPackBytes && pack_aligned(input | experts.shared | row_bytes)) {
      const u32 row_packs = row_bytes / kPackBytes, index = u32(at / kPackBytes), row = index / row_packs;
      return whole(norm, input, row, index - row * row_packs);
    }
    // From the last element to the first, as load_partial() does. Each may be in another row.
    Pack pack = {};
    FA_NO_UNROLL
    for (u32 e = bytes; e > 0;) {
      e -= sizeof(T);
      const u64 row = (at + e) / row_bytes, column = at + e - row * row_bytes;
      float sum = 0;
      FA_NO_UNROLL
      for (u64 i = row * experts.top_k; i < (row + 1) * experts.top_k; ++i) {
        const i32 entry = reinterpret_cast<const i32 *>(experts.table)[i];
        if (entry >= 0)
          sum += widened(reinterpret_cast<const u8 *>(input + u64(entry) * row_bytes + column)) *
                 weight_of<T>(float_weights, weight_bits<T>(experts, i));
      }
      sum *= experts.routed_scale;
      if (experts.shared != 0)
        sum += widened(reinterpret_cast<const u8 *>(experts.shared + at + e));
      const auto element = narrow<T, 1>({{sum}}).unit[0];
      if constexpr (sizeof(T) == sizeof(float))
        push_granule(&pack, __float_as_uint(element), sizeof(T));
      else
        push_granule(&pack, element, sizeof(T));
    }
    return pack;
  }

  // Pack i of a row, at addresses that are aligned to packs.
  static FA_FN Pack whole(const FaFused &norm, u64 input, u32 row, u32 i) {
    using All = Elements<T, kEach>;
    const FaExperts &experts = norm.experts;
    const bool float_weights = has_float_weights(experts);
    const u32 row_bytes = norm.row * u32(sizeof(T)), top_k = experts.top_k;
    const u64 from = input + u64(i) * kPackBytes, first_entry = u64(row) * top_k;
    const u8 *table = reinterpret_cast<const u8 *>(experts.table + first_entry * sizeof(i32));
    const u8 *weights_at = reinterpret_cast<const u8 *>(
        experts.weights + first_entry * (float_weights ? sizeof(float) : sizeof(T)));
    const auto wide = [](const Pack &pack) { return widen<T, kEach>(*reinterpret_cast<const All *>(&pack)); };
    const Pack shared = load_if(experts.shared != 0, experts.shared + u64(row) * row_bytes + i * kPackBytes);
    auto sum = splat<float, kEach>(0);
    FA_NO_UNROLL
    for (u32 first = 0; first < top_k; first += kAtOnce) {
      const u32 loaded = min(kAtOnce, top_k - first);
      // Loads overlap: they have predicates instead of branches, and nothing uses a result before the last.
      u32 entries[kAtOnce], weights[kAtOnce];
      Pack packs[kAtOnce];
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        entries[k] = u32(-1), weights[k] = kWeightOne;
        load_if(k < loaded, table + (first + k) * sizeof(i32), &entries[k]);
      }
      if (sizeof(T) == sizeof(float) || float_weights) {
        FA_UNROLL
        for (u32 k = 0; k < kAtOnce; ++k)
          load_if((k < loaded) & (experts.weights != 0), weights_at + (first + k) * sizeof(float),
                  &weights[k]);
      } else {
        FA_UNROLL
        for (u32 k = 0; k < kAtOnce; ++k)
          weights[k] = reinterpret_cast<const u16 *>(weights_at)[min(first + k, top_k - 1)];
      }
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k)
        packs[k] = load_if(i32(entries[k]) >= 0, from + u64(entries[k]) * row_bytes);
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        if ((k == 2 || k == 4) && k >= loaded) // up to a power of two, because each branch takes time
          break;
        // A sum that begins with +0 is never -0, so that the product of two zeros does not change it.
        const float factor = i32(entries[k]) >= 0 ? weight_of<T>(float_weights, weights[k]) : 0;
        sum = map(sum, wide(packs[k]), [&](float a, float x) { return a + x * factor; });
      }
    }
    sum = map(sum, [&](float a) { return a * experts.routed_scale; });
    if (experts.shared != 0)
      sum = map(sum, wide(shared), [](float a, float b) { return a + b; });
    const All result = narrow<T, kEach>(sum);
    return *reinterpret_cast<const Pack *>(&result);
  }
};

} // namespace FA_NAMESPACE
