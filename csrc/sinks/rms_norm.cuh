// The epilogue of a transformer's layer: a residual is added to the sum, and its rows are normalised. The
// residual is added by the sink that the protocol has, so that what is gathered has been through it; but
// where the plain sum is asked for as well, that is gathered, and each rank adds the residual to all of it.
//
// On a GPU each rank normalises all rows, once they are at the launch's output: the blocks do so side by
// side, which takes less time than normalised rows would take on the links. On the host each rank does so as
// well, for the same reason, but in a pull row by row, while it is in the first-level cache.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/quantized_rows.cuh"
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
    Pack sum = pack;
    if (residual_ != nullptr)
      sum = added_pack<T>(pack, load(residual_ + at, extent, granule));
    sink_.put(at, i, sum, extent, granule);
  }

private:
  const u8 *residual_;
  Sink sink_;
};

// Normalises rows of a message that has been stored, each by all threads of a block.
template <class T>
class RowNorm {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;

public:
  // Of rows that begin at this address.
  FA_FN RowNorm(const FaRmsNorm &norm, u64 rows)
      : norm_(norm), rows_(rows), row_bytes_(u64(norm.row) * sizeof(T)),
        addresses_(rows | norm.normed | norm.weight | row_bytes_), pairs_(addresses_ % sizeof(Two) == 0) {}

  template <class Block>
  FA_FN void put(const Block &block, u32 row) const {
    const u8 *from = reinterpret_cast<const u8 *>(rows_) + row * row_bytes_;
    const float scale = row_scale(squares(block, from), norm_.row, norm_.epsilon);
    u8 *to = reinterpret_cast<u8 *>(norm_.normed) + row * normed_bytes(norm_, row_bytes_);
    if (norm_.scaling != FA_NOT_SCALED) {
      const auto pair = [&](u32 i) { return widen<T, 2>(normed(from, i, scale)); };
      const auto alone = [](u32 *) { return true; };
      QuantisedRows(norm_).put(block, row, {0, norm_.row}, pair, alone);
      return;
    }
    if (addresses_ % kPackBytes == 0)
      return block.for_each_alone(u32(row_bytes_ / kPackBytes),
                                  [&](u32 pack) { store_scaled_pack(to, from, pack, scale); });
    block.for_each_alone((norm_.row + 1) / 2, [&](u32 pair) { store_scaled(to, from, 2 * pair, scale); });
  }

private:
  static constexpr u32 kWarp = 32;

  const FaRmsNorm &norm_;
  const u64 rows_, row_bytes_, addresses_;
  const bool pairs_; // two elements at a time, as they are at an address for two

  // Elements i and i + 1 of a row; zero beyond its end.
  FA_FN Two load_two(const u8 *row, u32 i) const {
    const u8 *from = row + u64(i) * sizeof(T);
    if (pairs_ && i < norm_.row)
      return *reinterpret_cast<const Two *>(from);
    Two two = {};
    if (i < norm_.row)
      two.unit[0] = reinterpret_cast<const One *>(from)->unit[0];
    if (i + 1 < norm_.row)
      two.unit[1] = reinterpret_cast<const One *>(from)[1].unit[0];
    return two;
  }

  // Elements i and i + 1 of a normalised row.
  FA_FN Two normed(const u8 *from, u32 i, float scale) const {
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Two weight = {};
    if (weights != nullptr)
      weight = load_two(weights, i);
    return scaled<T>(load_two(from, i), scale, weight, weights != nullptr, norm_.unit_offset != 0);
  }

  FA_FN void store_scaled(u8 *to, const u8 *from, u32 i, float scale) const {
    const Two two = normed(from, i, scale);
    u8 *at = to + u64(i) * sizeof(T);
    if (pairs_) {
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
    Pack weight = {};
    const Pack row = load(from + at, Whole{}, 0);
    if (weights != nullptr)
      weight = load(weights + at, Whole{}, 0);
    store(to + at, scaled_pack<T>(row, scale, weight, weights != nullptr, norm_.unit_offset != 0), Whole{},
          0);
  }

  // The sum of the squares of a row, on every thread: a chunk is a warp's.
  template <class Block>
  FA_FN float squares(const Block &block, const u8 *row) const {
    __shared__ float chunks[kMostChunks];
    const u32 lane = threadIdx.x % kWarp, count = (norm_.row + kChunk - 1) / kChunk;
    // Of the row before, all have read the sums.
    block.sync();
    FA_ROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < count; chunk += blockDim.x / kWarp) {
      const u32 first = chunk * kChunk + 2 * lane;
      ChunkSquares<T> squares;
      // Without a branch around each load, which would wait for the one before it.
      if (pairs_ && chunk * kChunk + kChunk <= norm_.row) {
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
          squares.add(load_two(row, first + run * kPartials));
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

// A function, as add_residual() is: all kernels of a type share them.
template <class T, class Block>
FA_CALL void normalise(const FaRmsNorm &norm, const Block &block, u32 row, u64 rows) {
  RowNorm<T>(norm, rows).put(block, row);
}

// Adds the residual to the plain sums that the block's threads have stored.
template <class T, class Block>
FA_CALL void add_residual(const FaRmsNorm &norm, u64 output, const Block &block, Rows partition, u64 bytes,
                          u32 parts) {
  block.sync();
  const u8 *sums = reinterpret_cast<const u8 *>(output);
  const u8 *residual = reinterpret_cast<const u8 *>(norm.residual);
  u8 *to = reinterpret_cast<u8 *>(norm.residual_out);
  const u64 addresses = u64(sums) | u64(residual) | u64(to);
  const u32 granule = granule_of(addresses | bytes);
  const Slices slices = partition.slices(bytes, parts);
  FA_ROLL
  for (u32 part = 0; part < parts; ++part) {
    for_each_pack(
        block, slices.of(part), bytes, pack_aligned(addresses),
        [&](u64 at, Index, auto extent) {
          const Pack sum = load(sums + at, here(extent), granule),
                     added = load(residual + at, here(extent), granule);
          store(to + at, added_pack<T>(sum, added), here(extent), granule);
        },
        partition);
  }
}

// Gathers: the sums are sent to all as they are, and the residual is added by whoever receives them.
template <class T, bool Gathers>
class RmsNorm {
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
      add_residual<T>(norm_, launch.output, block, partition, bytes, parts);
    if (norm_.normed == 0)
      return;
    // Of what the block's threads have stored.
    block.sync();
    const u64 rows = norm_.residual_out == 0 ? launch.output : norm_.residual_out;
    partition.for_each_row(block, bytes, parts, norm_.rows,
                           [&](u32 row) { normalise<T>(norm_, block, row, rows); });
  }

private:
  const FaRmsNorm &norm_;

  // What a sink adds: nothing, if it is another sink that does, or if that is done at the end.
  FA_FN const u8 *residual(bool here) const {
    return reinterpret_cast<const u8 *>(here && norm_.residual_out == 0 ? norm_.residual : 0);
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
