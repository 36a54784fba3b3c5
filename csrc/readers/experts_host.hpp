// The typed loop of the host that computes a part of an input from experts' rows, two vectors at a time.
#pragma once

#include "../host/row_sums.hpp"
#include "experts.cuh"

namespace FA_NAMESPACE {

// Returns weight i.
template <class T>
FA_FN float weight_of(const FaExperts &experts, u64 i) {
  const u32 bits = weight_bits<T>(experts, i);
  float weight;
  if (has_float_weights(experts)) {
    __builtin_memcpy(&weight, &bits, sizeof weight);
    return weight;
  }
  typename Twos<T>::Packed packed = {};
  __builtin_memcpy(&packed, &bits, sizeof(T));
  // GCC 12 for aarch64 crashes if it sees that all other elements are zero.
  asm("" : "+m"(packed));
  const Two wide = Twos<T>::widen(packed);
  __builtin_memcpy(&weight, &wide, sizeof weight);
  return weight;
}

// The experts' rows of a row, without those that do not exist, and their weights.
template <class T>
class RowExperts {
public:
  RowExperts(const FaExperts &experts, u64 row, const u8 *rows, u64 row_bytes) {
    for (u64 i = row * experts.top_k; i < (row + 1) * experts.top_k; ++i) {
      const i32 entry = reinterpret_cast<const i32 *>(experts.table)[i];
      if (entry < 0)
        continue;
      from_[count_] = rows + u64(entry) * row_bytes;
      weight_[count_++] = weight_of<T>(experts, i);
    }
  }

  // Adds up the experts' elements from byte `at` of the row on.
  template <class Extent>
  FA_FN Two sum(u64 at, Extent extent) const {
    Two sum = {};
    for (u32 k = 0; k < count_; ++k)
      sum = map(sum, load<T>(from_[k] + at, extent), [&](Float a, Float x) { return a + x * weight_[k]; });
    return sum;
  }

private:
  u32 count_ = 0;
  const u8 *from_[FA_MOST_EXPERTS];
  float weight_[FA_MOST_EXPERTS];
};

template <class T>
void gather_span(const GatheredSpan &span) {
  const FaExperts &experts = span.norm.experts;
  const u64 row_bytes = u64(span.norm.row) * sizeof(T), end = span.at + span.bytes;
  u64 row = span.at / row_bytes, first = span.at % row_bytes;
  u8 *to = span.to;
  for (u64 at = span.at; at < end; ++row, first = 0) {
    const u64 bytes = row_bytes - first < end - at ? row_bytes - first : end - at;
    const RowExperts<T> gathered(experts, row, span.rows + first, row_bytes);
    const u8 *shared = reinterpret_cast<const u8 *>(experts.shared) + at;
    for_each_two<T>(bytes, [&](u64 i, auto extent) {
      Two sum = map(gathered.sum(i, extent), [&](Float a) { return a * experts.routed_scale; });
      if (experts.shared != 0)
        sum = map(sum, load<T>(shared + i, extent), [](Float a, Float b) { return a + b; });
      store(to + i, Twos<T>::narrow(sum), extent);
    });
    at += bytes;
    to += bytes;
  }
}

} // namespace FA_NAMESPACE
