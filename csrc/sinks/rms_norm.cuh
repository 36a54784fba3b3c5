// The epilogue of a transformer's layer: a residual is added to the sum, and its rows are normalised. The
// residual is added by the sink that the protocol has, so that what is gathered has been through it; rows are
// normalised by each rank, once all of them are at the launch's output.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/rows.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA

// A sink before which the residual is added.
template <class T, class Sink>
class Added {
public:
  FA_FN Added(const u8 *residual, const Sink &sink) : residual_(residual), sink_(sink) {}

  FA_FN u64 addresses() const { return u64(residual_) | sink_.addresses(); }

  template <class Extent>
  FA_FN void put(u64 at, Index i, const Pack &pack, Extent extent, u32 granule) const {
    using All = Elements<T, kPackBytes / sizeof(T)>;
    const Pack residual = load(residual_ + at, extent, granule);
    const All sum = add<T>(*reinterpret_cast<const All *>(&pack), *reinterpret_cast<const All *>(&residual));
    sink_.put(at, i, *reinterpret_cast<const Pack *>(&sum), extent, granule);
  }

private:
  const u8 *residual_;
  Sink sink_;
};

template <class T>
class RmsNorm {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;

public:
  FA_FN explicit RmsNorm(const FaRmsNorm &norm) : norm_(norm) {}

  template <class Reduce>
  FA_FN Rows partition(const FaLaunch &, const Reduce &) const {
    return Rows(gridDim.x, u64(norm_.row) * sizeof(T));
  }

  template <class Sink>
  FA_FN Added<T, Sink> into(const Sink &sink) const {
    return {reinterpret_cast<const u8 *>(norm_.residual), sink};
  }

  template <class Block>
  FA_FN void finish(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    if (norm_.normed == 0)
      return;
    // Of what the block's threads have stored.
    block.sync();
    const u64 row_bytes = u64(norm_.row) * sizeof(T);
    // Two elements at a time, where they are at an address for two.
    const u64 addresses = launch.output | norm_.normed | norm_.weight | row_bytes;
    const bool pairs = addresses % sizeof(Two) == 0;
    partition.for_each_row(block, bytes, parts, norm_.rows, [&](u32 row) {
      const u8 *from = reinterpret_cast<const u8 *>(launch.output) + row * row_bytes;
      u8 *to = reinterpret_cast<u8 *>(norm_.normed) + row * row_bytes;
      const float scale = row_scale(squares(block, from, pairs), norm_.row, norm_.epsilon);
      block.for_each_alone((norm_.row + 1) / 2,
                           [&](u32 pair) { store_scaled(to, from, 2 * pair, scale, pairs); });
    });
  }

private:
  const FaRmsNorm &norm_;

  // Elements i and i + 1 of a row; zero beyond its end.
  FA_FN Two load_two(const u8 *row, u32 i, bool pairs) const {
    const u8 *from = row + u64(i) * sizeof(T);
    if (pairs && i < norm_.row)
      return *reinterpret_cast<const Two *>(from);
    Two two = {};
    if (i < norm_.row)
      two.unit[0] = reinterpret_cast<const One *>(from)->unit[0];
    if (i + 1 < norm_.row)
      two.unit[1] = reinterpret_cast<const One *>(from)[1].unit[0];
    return two;
  }

  FA_FN void store_scaled(u8 *to, const u8 *from, u32 i, float scale, bool pairs) const {
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Two weight = {};
    if (weights != nullptr)
      weight = load_two(weights, i, pairs);
    const Two two =
        scaled<T>(load_two(from, i, pairs), scale, weight, weights != nullptr, norm_.unit_offset != 0);
    u8 *at = to + u64(i) * sizeof(T);
    if (pairs) {
      *reinterpret_cast<Two *>(at) = two;
      return;
    }
    reinterpret_cast<One *>(at)->unit[0] = two.unit[0];
    if (i + 1 < norm_.row)
      reinterpret_cast<One *>(at)[1].unit[0] = two.unit[1];
  }

  // The sum of the squares of a row, on every thread: a chunk is a warp's, whose lane has the partials 2 *
  // lane and 2 * lane + 1.
  template <class Block>
  FA_FN float squares(const Block &block, const u8 *row, bool pairs) const {
    constexpr u32 kWarp = 32;
    __shared__ float chunks[kMostChunks];
    const u32 lane = threadIdx.x % kWarp, count = (norm_.row + kChunk - 1) / kChunk;
    // Of the row before, all have read the sums.
    block.sync();
    FA_ROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < count; chunk += blockDim.x / kWarp) {
      float even = 0, odd = 0;
      FA_UNROLL
      for (u32 run = 0; run < kChunk / kPartials; ++run) {
        const auto x = widen<T, 2>(load_two(row, chunk * kChunk + run * kPartials + 2 * lane, pairs));
        even += x.unit[0] * x.unit[0];
        odd += x.unit[1] * x.unit[1];
      }
      FA_UNROLL
      for (u32 half = kWarp / 2; half > 0; half /= 2) {
        even += __shfl_xor_sync(0xFFFFFFFF, even, half);
        odd += __shfl_xor_sync(0xFFFFFFFF, odd, half);
      }
      if (lane == 0)
        chunks[chunk] = even + odd;
    }
    block.sync();
    float sum = 0;
    FA_ROLL
    for (u32 chunk = 0; chunk < count; ++chunk)
      sum += chunks[chunk];
    return sum;
  }
};

#else

// A sink before which the residual is added. Sums are kept in the first-level cache for that.
template <class Sink>
class Added {
public:
  static constexpr u64 kMostPacks = 4096 / kPackBytes;

  Added(const RowLoops &loops, const u8 *residual, const Sink &sink)
      : loops_(loops), residual_(residual), sink_(sink) {}

  u8 *to(u64) const { return sums_; }
  u8 *also() const { return nullptr; }

  void done(Span packs, u64 bytes) const {
    const u64 at = packs.first * kPackBytes, end = at + packs.length * kPackBytes;
    u8 *also = sink_.also();
    loops_.add({sums_, residual_ + at, sink_.to(at), also == nullptr ? nullptr : also + at,
                (end < bytes ? end : bytes) - at});
    sink_.done(packs, bytes);
  }

private:
  const RowLoops &loops_;
  const u8 *residual_;
  Sink sink_;
  alignas(64) mutable u8 sums_[kMostPacks * kPackBytes];
};

class RmsNorm {
public:
  RmsNorm(const RowLoops &loops, const FaRmsNorm &norm, u32 element_bytes)
      : loops_(loops), norm_(norm), row_bytes_(u64(norm.row) * element_bytes) {}

  template <class Reduce>
  Rows partition(const FaLaunch &launch, const Reduce &) const {
    return Rows(launch.blocks, row_bytes_);
  }

  template <class Sink>
  Added<Sink> into(const Sink &sink) const {
    return {loops_, reinterpret_cast<const u8 *>(norm_.residual), sink};
  }

  template <class Block>
  void finish(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    if (norm_.normed == 0)
      return;
    partition.for_each_row(block, bytes, parts, norm_.rows, [&](u32 row) {
      loops_.norm({reinterpret_cast<const u8 *>(launch.output) + row * row_bytes_,
                   reinterpret_cast<const u8 *>(norm_.weight),
                   reinterpret_cast<u8 *>(norm_.normed) + row * row_bytes_, norm_.row, norm_.unit_offset != 0,
                   norm_.epsilon});
    });
  }

private:
  const RowLoops &loops_;
  const FaRmsNorm &norm_;
  u64 row_bytes_;
};

#endif

} // namespace FA_NAMESPACE
