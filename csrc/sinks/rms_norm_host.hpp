// The epilogue of a transformer layer on the host: adds a residual to the sum and normalises its rows. What
// is gathered, and which rank adds the residual, is as on GPUs (rms_norm_cuda.cuh).
//
// Each rank normalises all rows; in a pull it does so row by row, while a row is in the first-level cache.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/quantized_rows.cuh"
#include "../reduce/rows.cuh"
#include "epilogue.cuh"

namespace FA_NAMESPACE {

// Normalises rows of a message. `squares` is the sum of a row's squares, if the norm needs it.
struct RowNorm {
  const RowLoops &loops;
  const FaFused &norm;
  u64 row_bytes;

  bool takes_squares() const { return norm.norm == FA_NORM_RMS; }

  // Normalises the row at byte `at` of the message.
  void at(const u8 *row, u64 at, float squares) const {
    loops.norm({norm, u32(at / row_bytes), row, squares});
  }
};

// A sink adapter that adds the residual, unless that is done later, and may then normalise complete rows:
// both while the data is in the first-level cache.
template <class Sink>
class ResidualAdder {
  static constexpr u64 kRunBytes = 4096;

public:
  // `norms`: the results are whole rows in ascending order; normalise each one when it is complete.
  ResidualAdder(const RowNorm &rows, const Sink &sink, bool norms = false)
      : rows_(rows), sink_(sink), adds_(rows.norm.residual_out == 0), norms_(norms) {}

  u8 *to(u64 at) const { return adds_ ? sums_ : sink_.to(at); }
  u8 *also() const { return adds_ ? nullptr : sink_.also(); }

  // A run ends at the end of a row, and consists of whole chunks of it.
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
                     (end < bytes ? end : bytes) - at,
                     norms_ && rows_.takes_squares() ? &squares_ : nullptr});
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
  mutable float squares_ = 0; // sum over that row so far
  alignas(64) mutable u8 sums_[kRunBytes];
};

class NormedRows {
public:
  NormedRows(const RowLoops &loops, const FaFused &norm, const FaLaunch &launch)
      : rows_{loops, norm, u64(norm.row) * element_bytes(launch.dtype)}, norms_(norm.norm != FA_NO_NORM),
        adds_(norm.residual_out == 0), row_by_row_(norms_ && adds_ && is_row_by_row(launch)) {}

  template <class Reduce>
  RowPartition partition(const FaLaunch &launch, const Reduce &) const {
    return RowPartition(launch.blocks > 1 || row_by_row_, rows_.row_bytes);
  }

  template <class Sink>
  ResidualAdder<Sink> into(const Sink &sink) const {
    return {rows_, sink};
  }

  template <class Sink>
  ResidualAdder<Sink> into_rows(const Sink &sink) const {
    return {rows_, sink, row_by_row_};
  }

  template <class Block>
  void gather(const FaLaunch &launch, const Block &block, RowPartition partition, u8 *to,
              const u64 *addresses, const Slices &slices, u32 world, u64 bytes) const {
    if (!row_by_row_)
      return copy_slices(partition, block, to, addresses, slices, launch.rank, world, bytes, Target::kOutput);
    for (u32 step = 1; step < world; ++step) {
      const u32 r = (launch.rank + step) % world;
      const Span share = partition.share(block, slices.of(r));
      const u64 end = (share.first + share.length) * kPackBytes;
      for (u64 at = share.first * kPackBytes; at < end; at += rows_.row_bytes)
        rows_.at(to + at, at,
                 rows_.loops.copy(to + at, reinterpret_cast<const u8 *>(addresses[r]) + at, rows_.row_bytes));
    }
  }

  template <class Block>
  void finish(const FaLaunch &launch, Block &block, RowPartition partition, u64 bytes,
              u32 slice_count) const {
    if (!adds_)
      add_residual(launch, block, partition, bytes, slice_count);
    if (!norms_ || row_by_row_)
      return;
    const u64 rows = adds_ ? launch.output : rows_.norm.residual_out;
    partition.for_each_row(block, bytes, slice_count, rows_.norm.rows, [&](u32 row) {
      const u64 at = row * rows_.row_bytes;
      const u8 *from = reinterpret_cast<const u8 *>(rows) + at;
      rows_.at(from, at, rows_.takes_squares() ? rows_.loops.copy(nullptr, from, rows_.row_bytes) : 0);
    });
  }

private:
  RowNorm rows_;
  bool norms_;
  bool adds_;       // the sink adds the residual; else finish() does, to all results
  bool row_by_row_; // each row is normalised when it is complete; else finish() normalises all rows

  template <class Block>
  void add_residual(const FaLaunch &launch, Block &block, RowPartition partition, u64 bytes,
                    u32 slice_count) const {
    const Slices slices = partition.slices(bytes, slice_count);
    for (u32 r = 0; r < slice_count; ++r) {
      const Span share = partition.share(block, slices.of(r));
      const u64 at = share.first * kPackBytes, end = at + share.length * kPackBytes;
      if (share.length != 0)
        rows_.loops.add({reinterpret_cast<const u8 *>(launch.output) + at,
                         reinterpret_cast<const u8 *>(rows_.norm.residual) + at,
                         reinterpret_cast<u8 *>(rows_.norm.residual_out) + at, nullptr,
                         (end < bytes ? end : bytes) - at, nullptr});
    }
  }

  bool is_row_by_row(const FaLaunch &launch) const {
    if (rows_.row_bytes % kPackBytes != 0)
      return false;
    // Not if the normalised rows overwrite an input that peers still read. In a two-shot only its owner reads
    // a slice, and peers' rows are normalised after all inputs have been read. In a reduce-scatter only its
    // owner reads a share.
    switch (launch.algorithm) {
    case FA_ONE_SHOT_PULL_NORM: return launch.source == 0 || rows_.norm.normed != launch.input;
    case FA_TWO_SHOT_PULL_NORM:
    case FA_REDUCE_SCATTER_NORM: return true;
    default: return false;
    }
  }
};

} // namespace FA_NAMESPACE
