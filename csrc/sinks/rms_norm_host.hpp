// The epilogue of a transformer's layer on the host: a residual is added to the sum, and its rows are
// normalised. What is gathered, and by whom the residual is added, is as on GPUs (rms_norm_cuda.cuh).
//
// Each rank normalises all rows, but in a pull row by row, while a row is in the first-level cache.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/quantized_rows.cuh"
#include "../reduce/rows.cuh"
#include "epilogue.cuh"

namespace FA_NAMESPACE {

// Normalises rows of a message, of which the squares have been summed if the norm goes by them.
struct RowNorm {
  const RowLoops &loops;
  const FaFused &norm;
  u64 row_bytes;

  bool takes_squares() const { return norm.norm == FA_NORM_RMS; }

  // The row at a byte of the message.
  void at(const u8 *row, u64 at, float squares) const {
    loops.norm({norm, u32(at / row_bytes), row, squares});
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
  mutable float squares_ = 0; // of what is there of it
  alignas(64) mutable u8 sums_[kRunBytes];
};

class NormedRows {
public:
  NormedRows(const RowLoops &loops, const FaFused &norm, const FaLaunch &launch)
      : rows_{loops, norm, u64(norm.row) * element_bytes(launch.dtype)}, norms_(norm.norm != FA_NO_NORM),
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
      rows_.at(from, at, rows_.takes_squares() ? rows_.loops.copy(nullptr, from, rows_.row_bytes) : 0);
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
    switch (launch.algorithm) {
    case FA_ONE_SHOT_PULL_NORM:
    case FA_ONE_SHOT_PULL_OTHER_NORM: return launch.source == 0 || rows_.norm.normed != launch.input;
    case FA_TWO_SHOT_PULL_NORM:
    case FA_TWO_SHOT_PULL_OTHER_NORM: return true;
    default: return false;
    }
  }
};

} // namespace FA_NAMESPACE
