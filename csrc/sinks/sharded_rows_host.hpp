// The rows of a sharded norm on the host (algorithms/sharded_norm.cuh).
#pragma once

#include "../reduce/rows.cuh"

namespace FA_NAMESPACE {

class ShardedRows {
public:
  ShardedRows(const RowLoops &loops, const FaShardedNorm &norm, const FaLaunch &launch)
      : loops_(loops), norm_(norm), world_(launch.world), element_bytes_(element_bytes(launch.dtype)) {}

  u32 count() const { return norm_.rows; }

  template <class Block>
  u64 squares(const Block &, u32 row) const {
    Sums sums = {};
    for (u32 p = 0; p < norm_.parts; ++p) {
      const FaShardedRows &part = norm_.part[p];
      sums.of[p] = loops_.copy(nullptr, from(part, row), part.row * element_bytes_);
    }
    u64 packed;
    __builtin_memcpy(&packed, &sums, sizeof packed);
    return packed;
  }

  struct Kept {};
  Kept keep(u32) const { return {}; }

  template <class Block>
  void scale(const Block &, u32 row, const u64 *packed, Kept) const {
    for (u32 p = 0; p < norm_.parts; ++p) {
      const FaShardedRows &part = norm_.part[p];
      float squares = 0;
      for (u32 r = 0; r < world_; ++r) {
        Sums sums;
        __builtin_memcpy(&sums, packed + r, sizeof sums);
        squares += sums.of[p];
      }
      FaFused norm = {};
      norm.normed = part.to + row * part.to_stride;
      norm.weight = part.weight;
      norm.row = part.row;
      norm.total = part.total;
      norm.norm = FA_NORM_RMS;
      norm.epsilon = part.epsilon;
      norm.unit_offset = part.unit_offset;
      loops_.norm({norm, 0, from(part, row), squares});
    }
  }

private:
  // What a packet has of a row.
  struct Sums {
    float of[FA_SHARDED_PARTS];
  };
  static_assert(sizeof(Sums) == sizeof(u64), "two floats in a word");

  const RowLoops &loops_;
  const FaShardedNorm &norm_;
  u32 world_;
  u64 element_bytes_;

  static const u8 *from(const FaShardedRows &part, u32 row) {
    return reinterpret_cast<const u8 *>(part.from + row * part.from_stride);
  }
};

} // namespace FA_NAMESPACE
