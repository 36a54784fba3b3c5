// The rows of a sharded norm on GPUs (algorithms/sharded_norm.cuh). All threads of a block work on one row.
#pragma once

#include "rms_norm_cuda.cuh"

namespace FA_NAMESPACE {

template <class T>
class ShardedRows {
public:
  FA_FN ShardedRows(const FaShardedNorm &norm, u32 world) : norm_(norm), world_(world) {}

  FA_FN u32 count() const { return norm_.rows; }

  template <class Block>
  FA_FN u64 squares(const Block &block, u32 row) const {
    u64 sums = 0;
    FA_NO_UNROLL
    for (u32 p = 0; p < norm_.parts; ++p) {
      const FaFused part = fused(norm_.part[p], row);
      RowState state;
      // All threads have read the shared memory of the previous part.
      block.sync();
      const float sum = RowNorm<T>(part, from(norm_.part[p], row)).sum(block, &state);
      sums |= u64(__float_as_uint(sum)) << 32 * p;
    }
    return sums;
  }

  // A thread's first pack of the first part of a row, and of its weights, if it is whole and they are
  // aligned.
  struct Kept {
    bool exists;
    Pack row, weight;
  };
  FA_FN Kept keep(u32 row) const {
    const FaShardedRows &part = norm_.part[0];
    const u64 at = u64(threadIdx.x) * kPackBytes, address = from(part, row);
    const u64 addresses = address | (part.to + row * part.to_stride) | part.weight;
    Kept kept = {pack_aligned(addresses) && (threadIdx.x + 1) * kEach <= part.row, {}, {}};
    load_if(kept.exists, reinterpret_cast<const u8 *>(address + at), &kept.row);
    load_if(kept.exists & (part.weight != 0), reinterpret_cast<const u8 *>(part.weight + at), &kept.weight);
    return kept;
  }

  template <class Block>
  FA_FN void scale(const Block &block, u32 row, const u64 *sums, const Kept &kept) const {
    FA_NO_UNROLL
    for (u32 p = 0; p < norm_.parts; ++p) {
      float squares = 0;
      FA_NO_UNROLL
      for (u32 r = 0; r < world_; ++r)
        squares += __uint_as_float(u32(sums[r] >> 32 * p));
      const FaFused part = fused(norm_.part[p], row);
      const RowState state = {0, row_scale(squares, part.total, part.epsilon)};
      const RowNorm<T> own(part, from(norm_.part[p], row));
      block.for_each_in_block((part.row + kEach - 1) / kEach, [&](u32 i) {
        if (kept.exists & (p == 0) & (i == threadIdx.x))
          store(reinterpret_cast<u8 *>(part.normed + u64(i) * kPackBytes),
                normed_pack<T>(kept.row, state, factors_of<T>(kept.weight, weight_offset(part)),
                               no_bias<T, Pack>(), false),
                Whole{}, 0);
        else
          own.put(i * kEach, state, part.normed);
      });
    }
  }

private:
  static constexpr u32 kEach = kPackBytes / sizeof(T);

  const FaShardedNorm &norm_;
  u32 world_;

  static FA_FN u64 from(const FaShardedRows &part, u32 row) { return part.from + row * part.from_stride; }

  // The operands of a norm of one row. Everything that uses them is inlined: in memory they would be a stack
  // frame.
  static FA_FN FaFused fused(const FaShardedRows &part, u32 row) {
    FaFused norm = {};
    norm.normed = part.to + row * part.to_stride;
    norm.weight = part.weight;
    norm.row = part.row;
    norm.total = part.total;
    norm.norm = FA_NORM_RMS;
    norm.epsilon = part.epsilon;
    norm.unit_offset = part.unit_offset;
    return norm;
  }
};

} // namespace FA_NAMESPACE
