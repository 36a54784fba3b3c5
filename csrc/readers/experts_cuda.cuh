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
    // Without experts' rows all entries are negative; what is loaded for them is not used.
    const u64 rows = experts.rows == 0 ? norm.residual : input;
    if (bytes == kPackBytes && pack_aligned(rows | experts.shared | row_bytes))
      return whole(experts, rows, at, row_bytes, float_weights);
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
          sum += widened(reinterpret_cast<const u8 *>(rows + u64(entry) * row_bytes + column)) *
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

  // A whole pack of one row, at addresses that are aligned to packs.
  static FA_FN Pack whole(const FaExperts &experts, u64 rows, u64 at, u32 row_bytes, bool float_weights) {
    using All = Elements<T, kEach>;
    const u32 row_packs = row_bytes / kPackBytes, index = u32(at / kPackBytes), number = index / row_packs;
    const u64 row = number, from = rows + u64(index - number * row_packs) * kPackBytes;
    const i32 *table = reinterpret_cast<const i32 *>(experts.table) + row * experts.top_k;
    const auto wide = [](const Pack &pack) { return widen<T, kEach>(*reinterpret_cast<const All *>(&pack)); };
    auto sum = splat<float, kEach>(0);
    const u32 top_k = experts.top_k;
    const u64 weights_at = experts.weights, first_weight = row * top_k;
    FA_NO_UNROLL
    for (u32 first = 0; first < top_k; first += kAtOnce) {
      const u32 loaded = min(kAtOnce, top_k - first);
      // Loads overlap: branches are around all loads of a kind, and nothing uses a result before the last.
      i32 entries[kAtOnce];
      u32 at_k[kAtOnce], weights[kAtOnce];
      Pack packs[kAtOnce];
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        at_k[k] = min(first + k, top_k - 1);
        const i32 entry = table[at_k[k]];
        entries[k] = first + k == at_k[k] ? entry : -1;
        weights[k] = kWeightOne;
      }
      if (weights_at != 0) {
        if (sizeof(T) == sizeof(float) || float_weights) {
          FA_UNROLL
          for (u32 k = 0; k < kAtOnce; ++k)
            weights[k] = reinterpret_cast<const u32 *>(weights_at)[first_weight + at_k[k]];
        } else {
          FA_UNROLL
          for (u32 k = 0; k < kAtOnce; ++k)
            weights[k] = reinterpret_cast<const u16 *>(weights_at)[first_weight + at_k[k]];
        }
      }
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k)
        packs[k] = load(reinterpret_cast<const u8 *>(from + u64(max(entries[k], 0)) * row_bytes), Whole{}, 0);
      // One loop body for all: the first is used, and the others move down.
      FA_NO_UNROLL
      for (u32 used = 0; used < loaded; ++used) {
        // A sum that begins with +0 is never -0, so that the product of two zeros does not change it.
        const bool exists = entries[0] >= 0;
        const float factor = exists ? weight_of<T>(float_weights, weights[0]) : 0;
        sum = map(sum, wide(exists ? packs[0] : Pack{}), [&](float a, float x) { return a + x * factor; });
        FA_UNROLL
        for (u32 k = 0; k + 1 < kAtOnce; ++k) {
          entries[k] = entries[k + 1];
          weights[k] = weights[k + 1];
          packs[k] = packs[k + 1];
        }
      }
    }
    sum = map(sum, [&](float a) { return a * experts.routed_scale; });
    if (experts.shared != 0)
      sum = map(sum, wide(load(reinterpret_cast<const u8 *>(experts.shared + at), Whole{}, 0)),
                [](float a, float b) { return a + b; });
    const All result = narrow<T, kEach>(sum);
    return *reinterpret_cast<const Pack *>(&result);
  }
};

} // namespace FA_NAMESPACE
