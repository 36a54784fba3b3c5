// The epilogue of a transformer's layer: a residual is added to the sum, and its rows are normalised. The
// residual is added by the sink that the protocol has, so that what is gathered has been through it; but
// where the plain sum is asked for as well, that is gathered, and each rank adds the residual to all of it.
//
// On a GPU each rank normalises all rows, once they are at the launch's output: the blocks do so side by
// side, which takes less time than normalised rows would take on the links. On the host each rank does so as
// well, for the same reason, but in a pull row by row, while it is in the first-level cache.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/quantise.cuh"
#include "../reduce/rows.cuh"
#include "epilogue.cuh"
#include "quantised_rows.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA

// A sink before which the residual is added, if it is not null.
template <class T, class Sink>
class Added {
public:
  FA_FN Added(const u8 *residual, const Sink &sink) : residual_(residual), sink_(sink) {}

  FA_FN u64 addresses() const { return u64(residual_) | sink_.addresses(); }

  template <class Extent>
  FA_FN void put(u64 at, Index i, const Pack &pack, Extent extent, u32 granule) const {
    if (residual_ == nullptr)
      return sink_.put(at, i, pack, extent, granule);
    sink_.put(at, i, added_pack<T>(pack, load(residual_ + at, extent, granule)), extent, granule);
  }

private:
  const u8 *residual_;
  Sink sink_;
};

// Gathers: the sums are sent to all as they are, and the residual is added by whoever receives them.
template <class T, bool Gathers>
class RmsNorm {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;

public:
  FA_FN explicit RmsNorm(const FaRmsNorm &norm) : norm_(norm) {}

  template <class Reduce>
  FA_FN Rows partition(const FaLaunch &, const Reduce &) const {
    return Rows(gridDim.x > 1, u64(norm_.row) * sizeof(T));
  }

  template <class Sink>
  FA_FN Added<T, Sink> into(const Sink &sink) const {
    return {residual(!Gathers), sink};
  }

  template <class Sink>
  FA_FN Added<T, Sink> into_gathered(const Sink &sink) const {
    return {residual(Gathers), sink};
  }

  template <class Sink>
  FA_FN Added<T, Sink> into_rows(const Sink &sink) const {
    return into(sink);
  }

  template <class Block>
  FA_FN void gather(const FaLaunch &launch, const Block &block, Rows partition, u8 *to, const u64 *sources,
                    const Slices &slices, u32 world, u64 bytes) const {
    copy_slices(partition, block, to, sources, slices, launch.rank, world, bytes, Target::kOutput);
  }

  template <class Block>
  FA_FN void finish(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    if (norm_.residual_out != 0)
      add_residual(launch, block, partition, bytes, parts);
    if (norm_.normed == 0)
      return;
    // Of what the block's threads have stored.
    block.sync();
    const u64 rows = norm_.residual_out == 0 ? launch.output : norm_.residual_out;
    const u64 row_bytes = u64(norm_.row) * sizeof(T);
    // Two elements at a time, where they are at an address for two.
    const u64 addresses = rows | norm_.normed | norm_.weight | row_bytes;
    const bool pairs = addresses % sizeof(Two) == 0, packs = addresses % kPackBytes == 0;
    partition.for_each_row(block, bytes, parts, norm_.rows, [&](u32 row) {
      const u8 *from = reinterpret_cast<const u8 *>(rows) + row * row_bytes;
      const float scale = row_scale(squares(block, from, pairs), norm_.row, norm_.epsilon);
      u8 *to = reinterpret_cast<u8 *>(norm_.normed) + row * normed_bytes(norm_, row_bytes);
      if (norm_.scaling != FA_NOT_SCALED) {
        const auto pair = [&](u32 i) { return widen<T, 2>(normed(from, i, scale, pairs)); };
        const auto alone = [](u32 *) { return true; };
        QuantisedRows(norm_).put(block, row, {0, norm_.row}, pair, alone);
        return;
      }
      if (packs)
        return block.for_each_alone(u32(row_bytes / kPackBytes),
                                    [&](u32 pack) { store_scaled_pack(to, from, pack, scale); });
      block.for_each_alone((norm_.row + 1) / 2,
                           [&](u32 pair) { store_scaled(to, from, 2 * pair, scale, pairs); });
    });
  }

private:
  static constexpr u32 kWarp = 32;
  const FaRmsNorm &norm_;

  // What a sink adds: nothing, if it is another sink that does, or if that is done at the end.
  FA_FN const u8 *residual(bool here) const {
    return reinterpret_cast<const u8 *>(here && norm_.residual_out == 0 ? norm_.residual : 0);
  }

  // To the plain sums that the block's threads have stored.
  template <class Block>
  FA_FN void add_residual(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    block.sync();
    const u8 *sums = reinterpret_cast<const u8 *>(launch.output);
    const u8 *residual = reinterpret_cast<const u8 *>(norm_.residual);
    u8 *to = reinterpret_cast<u8 *>(norm_.residual_out);
    const u64 addresses = u64(sums) | u64(residual) | u64(to);
    const u32 granule = granule_of(addresses | bytes);
    const Slices slices = partition.slices(bytes, parts);
    FA_ROLL
    for (u32 part = 0; part < parts; ++part) {
      for_each_pack(
          block, slices.of(part), bytes, pack_aligned(addresses),
          [&](u64 at, Index, auto extent) {
            const Pack sum = load(sums + at, extent, granule), added = load(residual + at, extent, granule);
            store(to + at, added_pack<T>(sum, added), extent, granule);
          },
          partition);
    }
  }

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

  // Elements i and i + 1 of a normalised row.
  FA_FN Two normed(const u8 *from, u32 i, float scale, bool pairs) const {
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Two weight = {};
    if (weights != nullptr)
      weight = load_two(weights, i, pairs);
    return scaled<T>(load_two(from, i, pairs), scale, weight, weights != nullptr, norm_.unit_offset != 0);
  }

  FA_FN void store_scaled(u8 *to, const u8 *from, u32 i, float scale, bool pairs) const {
    const Two two = normed(from, i, scale, pairs);
    u8 *at = to + u64(i) * sizeof(T);
    if (pairs) {
      *reinterpret_cast<Two *>(at) = two;
      return;
    }
    reinterpret_cast<One *>(at)->unit[0] = two.unit[0];
    if (i + 1 < norm_.row)
      reinterpret_cast<One *>(at)[1].unit[0] = two.unit[1];
  }

  // The same of a pack, where all is aligned to packs: few loads that wait for memory.
  FA_FN void store_scaled_pack(u8 *to, const u8 *from, u32 i, float scale) const {
    const u64 at = u64(i) * kPackBytes;
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Pack weight = {0, 0};
    const Pack row = load(from + at, Whole{}, 0);
    if (weights != nullptr)
      weight = load(weights + at, Whole{}, 0);
    store(to + at, scaled_pack<T>(row, scale, weight, weights != nullptr, norm_.unit_offset != 0), Whole{},
          0);
  }

  // The sum of the squares of a row, on every thread: a chunk is a warp's.
  template <class Block>
  FA_FN float squares(const Block &block, const u8 *row, bool pairs) const {
    __shared__ float chunks[kMostChunks];
    const u32 lane = threadIdx.x % kWarp, count = (norm_.row + kChunk - 1) / kChunk;
    // Of the row before, all have read the sums.
    block.sync();
    FA_ROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < count; chunk += blockDim.x / kWarp) {
      const u32 first = chunk * kChunk + 2 * lane;
      ChunkSquares<T> squares;
      // Without a branch around each load, which would wait for the one before it.
      if (pairs && chunk * kChunk + kChunk <= norm_.row) {
        Two twos[kChunk / kPartials];
        FA_UNROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run)
          twos[run] = *reinterpret_cast<const Two *>(row + u64(first + run * kPartials) * sizeof(T));
        FA_UNROLL
        for (const Two &two : twos)
          squares.add(two);
      } else {
        FA_ROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run)
          squares.add(load_two(row, first + run * kPartials, pairs));
      }
      const float sum = squares.sum();
      if (lane == 0)
        chunks[chunk] = sum;
    }
    block.sync();
    float sum = 0;
    FA_ROLL
    for (u32 chunk = 0; chunk < count; ++chunk)
      sum += chunks[chunk];
    return sum;
  }
};

template <class T>
constexpr bool kKeepsSums<RmsNorm<T, true>> = true;

#else

// Normalises rows of a message, of which the squares have been summed.
struct RowNorm {
  const RowLoops &loops;
  const FaRmsNorm &norm;
  u64 row_bytes;

  // The row at a byte of the message.
  void at(const u8 *row, u64 at, float squares) const {
    const u64 number = at / row_bytes;
    u8 *to = reinterpret_cast<u8 *>(norm.normed) + number * normed_bytes(norm, row_bytes);
    loops.norm({norm, u32(number), row, to, squares});
  }
};

// A sink before which the residual is added, unless that is done later, and after which rows may be
// normalised: sums and rows are in the first-level cache then.
template <class Sink>
class Added {
  static constexpr u64 kRunBytes = 4096;

public:
  // `norms`: results are of whole rows, in ascending order, each of which is normalised when it is complete.
  Added(const RowNorm &rows, const Sink &sink, bool norms = false)
      : rows_(rows), sink_(sink), adds_(rows.norm.residual_out == 0), norms_(norms) {}

  u8 *to(u64 at) const { return adds_ ? sums_ : sink_.to(at); }
  u8 *also() const { return adds_ ? nullptr : sink_.also(); }

  // A run is of one row that is to be normalised, and of whole chunks of it.
  u64 most(u64 pack) const {
    if (!norms_)
      return kRunBytes / kPackBytes;
    if (row_ == kNone)
      row_ = pack * kPackBytes;
    const u64 left = row_ + rows_.row_bytes - pack * kPackBytes;
    return (left < kRunBytes ? left : kRunBytes) / kPackBytes;
  }

  void done(Span packs, u64 bytes) const {
    if (!adds_)
      return sink_.done(packs, bytes);
    const u64 at = packs.first * kPackBytes, end = at + packs.length * kPackBytes;
    u8 *to = sink_.to(at), *also = sink_.also() == nullptr ? nullptr : sink_.also() + at;
    rows_.loops.add({sums_, reinterpret_cast<const u8 *>(rows_.norm.residual) + at, to, also,
                     (end < bytes ? end : bytes) - at, norms_ ? &squares_ : nullptr});
    sink_.done(packs, bytes);
    if (!norms_ || end < row_ + rows_.row_bytes)
      return;
    rows_.at(to - at + row_, row_, squares_);
    row_ = end;
    squares_ = 0;
  }

private:
  static constexpr u64 kNone = ~u64(0);

  const RowNorm &rows_;
  Sink sink_;
  bool adds_, norms_;
  mutable u64 row_ = kNone;   // byte of the first row that is not normalised
  mutable float squares_ = 0; // of what is there of it
  alignas(64) mutable u8 sums_[kRunBytes];
};

class RmsNorm {
public:
  RmsNorm(const RowLoops &loops, const FaRmsNorm &norm, const FaLaunch &launch)
      : rows_{loops, norm, u64(norm.row) * element_bytes(launch.dtype)}, norms_(norm.normed != 0),
        adds_(norm.residual_out == 0), at_once_(norms_ && adds_ && at_once(launch)) {}

  template <class Reduce>
  Rows partition(const FaLaunch &launch, const Reduce &) const {
    return Rows(launch.blocks > 1 || at_once_, rows_.row_bytes);
  }

  template <class Sink>
  Added<Sink> into(const Sink &sink) const {
    return {rows_, sink};
  }

  template <class Sink>
  Added<Sink> into_rows(const Sink &sink) const {
    return {rows_, sink, at_once_};
  }

  template <class Block>
  void gather(const FaLaunch &launch, const Block &block, Rows partition, u8 *to, const u64 *sources,
              const Slices &slices, u32 world, u64 bytes) const {
    if (!at_once_)
      return copy_slices(partition, block, to, sources, slices, launch.rank, world, bytes, Target::kOutput);
    for (u32 step = 1; step < world; ++step) {
      const u32 r = (launch.rank + step) % world;
      const Span share = partition.share(block, slices.of(r));
      const u64 end = (share.first + share.length) * kPackBytes;
      for (u64 at = share.first * kPackBytes; at < end; at += rows_.row_bytes)
        rows_.at(to + at, at,
                 rows_.loops.copy(to + at, reinterpret_cast<const u8 *>(sources[r]) + at, rows_.row_bytes));
    }
  }

  template <class Block>
  void finish(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    if (!adds_)
      add_residual(launch, block, partition, bytes, parts);
    if (!norms_ || at_once_)
      return;
    const u64 rows = adds_ ? launch.output : rows_.norm.residual_out;
    partition.for_each_row(block, bytes, parts, rows_.norm.rows, [&](u32 row) {
      const u64 at = row * rows_.row_bytes;
      const u8 *from = reinterpret_cast<const u8 *>(rows) + at;
      rows_.at(from, at, rows_.loops.copy(nullptr, from, rows_.row_bytes));
    });
  }

private:
  RowNorm rows_;
  bool norms_;
  bool adds_;    // as results are stored or sent; else after the last phase, to all of them
  bool at_once_; // a row is normalised when it is complete; else all rows after the last phase

  template <class Block>
  void add_residual(const FaLaunch &launch, Block &block, Rows partition, u64 bytes, u32 parts) const {
    const Slices slices = partition.slices(bytes, parts);
    for (u32 part = 0; part < parts; ++part) {
      const Span share = partition.share(block, slices.of(part));
      const u64 at = share.first * kPackBytes, end = at + share.length * kPackBytes;
      if (share.length != 0)
        rows_.loops.add({reinterpret_cast<const u8 *>(launch.output) + at,
                         reinterpret_cast<const u8 *>(rows_.norm.residual) + at,
                         reinterpret_cast<u8 *>(rows_.norm.residual_out) + at, nullptr,
                         (end < bytes ? end : bytes) - at, nullptr});
    }
  }

  bool at_once(const FaLaunch &launch) const {
    if (rows_.row_bytes % kPackBytes != 0)
      return false;
    // Not in place of an input that peers still read. In a two-shot only its owner reads a slice, and peers'
    // rows are normalised when all inputs have been read.
    if (launch.algorithm == FA_ONE_SHOT_PULL_NORM)
      return launch.source == 0 || rows_.norm.normed != launch.input;
    return launch.algorithm == FA_TWO_SHOT_PULL_NORM;
  }
};

#endif

} // namespace FA_NAMESPACE
