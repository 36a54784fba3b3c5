// The partition of messages of whole rows, each of which is one block's.
#pragma once

#include "pack.cuh"

namespace FA_NAMESPACE {

// Shares and slices are whole rows. Rows that are not whole packs are for launches of one block, which has
// all of the message: that is divided at any pack, as is one that has no rows.
class Rows {
public:
  static constexpr bool has_parts = true;

  // Rows of `bytes`, if they are to be kept whole.
  FA_FN Rows(bool whole, u64 bytes) : packs_(whole ? Index(bytes / kPackBytes) : 0) {}

  FA_FN Span all(u64 bytes) const { return all_packs(bytes); }
  FA_FN Slices slices(u64 bytes, u32 world) const {
    return Slices(Index(packs_of(bytes)), world, packs_ == 0 ? 1 : packs_);
  }

#if FA_CUDA
  // body(i) for pack i of a span, for those that are this block's.
  template <class Block, class Body>
  FA_FN void for_each(const Block &block, Span span, Body body) const {
    // One body: at any pack, the span is a row of all blocks.
    const bool any = packs_ == 0;
    const Index each = any ? span.length : packs_, step = any ? span.length : block.count() * packs_;
    const Index first = any ? block.first() : threadIdx.x, stride = any ? block.stride() : blockDim.x;
    FA_ROLL
    for (Index row = any ? 0 : block.index() * packs_; row < span.length; row += step) {
      FA_ROLL
      for (Index i = first; i < each; i += stride)
        body(row + i);
    }
  }

  // body(row) for the rows of the message that are this block's where it has so many slices, by all threads.
  template <class Block, class Body>
  FA_FN void for_each_row(const Block &block, u64 bytes, u32 parts, u32 rows, Body body) const {
    if (packs_ == 0) {
      FA_ROLL
      for (u32 row = 0; row < rows; ++row)
        body(row);
      return;
    }
    const u32 each = slices(bytes, parts).each / packs_;
    FA_ROLL
    for (u32 first = 0; first < rows; first += each) {
      FA_ROLL
      for (u32 i = block.index(); i < each && first + i < rows; i += block.count())
        body(first + i);
    }
  }
#else
  // What of a span is this block's.
  template <class Block>
  FA_FN Span share(const Block &block, Span span) const {
    const u64 each = packs_ == 0 ? 1 : packs_;
    const auto share = block.share(span.length / each);
    return {span.first + share.first * each, (share.last - share.first) * each};
  }

  template <class Block, class Body>
  FA_FN void for_each_row(const Block &block, u64 bytes, u32 parts, u32 rows, Body body) const {
    if (packs_ == 0) {
      for (u32 row = 0; row < rows; ++row)
        body(row);
      return;
    }
    const Slices all = slices(bytes, parts);
    for (u32 part = 0; part < parts; ++part) {
      const Span own = share(block, all.of(part));
      for (u64 pack = own.first; pack < own.first + own.length; pack += packs_)
        body(u32(pack / packs_));
    }
  }
#endif

private:
  Index packs_; // of a row; 0: one block has all
};

} // namespace FA_NAMESPACE
