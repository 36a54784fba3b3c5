// The partition of messages that consist of rows: each row belongs to one block.
#pragma once

#include "pack.cuh"

namespace FA_NAMESPACE {

// A partition whose shares and slices are whole rows. Rows that are not whole packs are launched on a
// single block, which has the whole message; such a message is divided at any pack, like one without rows.
class RowPartition {
public:
  static constexpr bool has_partial_packs = true;

  // `bytes` is the size of a row. `whole`: keep rows whole.
  FA_FN RowPartition(bool whole, u64 bytes) : packs_(whole ? Index(bytes / kPackBytes) : 0) {}

  FA_FN Span all(u64 bytes) const { return all_packs(bytes); }
  FA_FN Slices slices(u64 bytes, u32 world) const {
    return Slices(Index(packs_of(bytes)), world, packs_ == 0 ? 1 : packs_);
  }

#if FA_CUDA
  // Calls body(i) for each pack i of a span that belongs to this block.
  template <class Block, class Body>
  FA_FN void for_each(const Block &block, Span span, Body body) const {
    // One loop for both cases: a message divided at any pack counts as one row that all blocks share.
    const bool any = packs_ == 0;
    const Index each = any ? span.length : packs_, step = any ? span.length : block.count() * packs_;
    const Index first = any ? block.first() : threadIdx.x, stride = any ? block.stride() : blockDim.x;
    FA_NO_UNROLL
    for (Index row = any ? 0 : block.index() * packs_; row < span.length; row += step) {
      FA_NO_UNROLL
      for (Index i = first; i < each; i += stride)
        body(row + i);
    }
  }

  // Calls body(row) on all threads, for each row of the message that belongs to this block when there are
  // `slice_count` slices.
  template <class Block, class Body>
  FA_FN void for_each_row(const Block &block, u64 bytes, u32 slice_count, u32 rows, Body body) const {
    if (packs_ == 0) {
      FA_NO_UNROLL
      for (u32 row = 0; row < rows; ++row)
        body(row);
      return;
    }
    const u32 each = slices(bytes, slice_count).each / packs_;
    FA_NO_UNROLL
    for (u32 first = 0; first < rows; first += each) {
      FA_NO_UNROLL
      for (u32 i = block.index(); i < each && first + i < rows; i += block.count())
        body(first + i);
    }
  }
#else
  // This block's share of a span.
  template <class Block>
  FA_FN Span share(const Block &block, Span span) const {
    const u64 each = packs_ == 0 ? 1 : packs_;
    const auto share = block.share(span.length / each);
    return {span.first + share.first * each, (share.last - share.first) * each};
  }

  template <class Block, class Body>
  FA_FN void for_each_row(const Block &block, u64 bytes, u32 slice_count, u32 rows, Body body) const {
    if (packs_ == 0) {
      for (u32 row = 0; row < rows; ++row)
        body(row);
      return;
    }
    const Slices all = slices(bytes, slice_count);
    for (u32 r = 0; r < slice_count; ++r) {
      const Span own = share(block, all.of(r));
      for (u64 pack = own.first; pack < own.first + own.length; pack += packs_)
        body(u32(pack / packs_));
    }
  }
#endif

private:
  Index packs_; // packs of a row; 0: divided at any pack
};

} // namespace FA_NAMESPACE
