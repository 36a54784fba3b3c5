// The epilogue of a transformer layer on GPUs: adds a residual to the sum and normalises its rows. The
// algorithm's sink adds the residual, so that gathered results already include it. If the plain sum is asked
// for as well, the plain sum is gathered, and each rank adds the residual to all of it.
//
// Each rank normalises all rows once they are at the launch's output. Its blocks do so in parallel, in less
// time than it would take to move normalised rows over the links.
#pragma once

#include "../core/rows.cuh"
#include "../reduce/quantized_rows.cuh"
#include "../reduce/rows.cuh"
#include "epilogue.cuh"
#include "quantized_rows_cuda.cuh"

namespace FA_NAMESPACE {

// A sink adapter that adds the residual, if it is not null.
template <class T, class Sink>
class ResidualAdder {
public:
  FA_FN ResidualAdder(const u8 *residual, const Sink &sink) : residual_(residual), sink_(sink) {}

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

// Normalises rows of a stored message; all threads of a block work on one row.
template <class T, class Norm>
class RowNorm {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;

public:
  // `rows`: address of the rows.
  FA_FN RowNorm(const FaFused &norm, u64 rows)
      : norm_(norm), rows_(rows), row_bytes_(u64(norm.row) * sizeof(T)),
        addresses_(rows | norm.normed | norm.weight | (kIsRms ? 0 : norm.bias) | row_bytes_),
        pairs_(addresses_ % sizeof(Two) == 0) {}

  template <class Block>
  FA_FN void put(const Block &block, u32 row) const {
    const u8 *from = reinterpret_cast<const u8 *>(rows_) + row * row_bytes_;
    RowState state;
    measure<0>(block, from, &state);
    u8 *to = norm_.normed == 0 ? nullptr : reinterpret_cast<u8 *>(norm_.normed) + row * row_bytes_;
    if (to != nullptr)
      store_row(block, to, from, state);
    if (norm_.scaling == FA_NOT_SCALED)
      return;
    // A row that is stored is not normalised again. Other threads of the block have stored some of it.
    if (to != nullptr)
      block.sync();
    const auto pair = [&](u32 i) {
      return widen<T, 2>(to != nullptr ? load_two(to, i) : normed(from, i, state));
    };
    const auto identity = [](u32 *) { return true; };
    QuantizedRows(norm_).put(block, row, {0, norm_.row}, pair, identity);
  }

private:
  static constexpr u32 kWarp = 32;
  static constexpr bool kIsRms = __is_same(Norm, RmsNorm);

  const FaFused &norm_;
  const u64 rows_, row_bytes_, addresses_;
  const bool pairs_; // pairs of elements are aligned

  // Number of elements from i to the end of the row.
  FA_FN u32 left(u32 i) const { return i < norm_.row ? norm_.row - i : 0; }

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
  FA_FN Two normed(const u8 *from, u32 i, const RowState &state) const {
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Two weight = {};
    if (weights != nullptr)
      weight = load_two(weights, i);
    const u8 *biases = reinterpret_cast<const u8 *>(kIsRms ? 0 : norm_.bias);
    Two bias = {};
    if (biases != nullptr)
      bias = load_two(biases, i);
    return scaled<T, Norm>(load_two(from, i), state, weight, weights != nullptr, norm_.unit_offset != 0, bias,
                           biases != nullptr);
  }

  template <class Block>
  FA_FN void store_row(const Block &block, u8 *to, const u8 *from, const RowState &state) const {
    if constexpr (kIsRms) {
      if (addresses_ % kPackBytes == 0)
        return block.for_each_in_block(u32(row_bytes_ / kPackBytes),
                                       [&](u32 pack) { store_scaled_pack(to, from, pack, state); });
    }
    block.for_each_in_block((norm_.row + 1) / 2, [&](u32 pair) { store_scaled(to, from, 2 * pair, state); });
  }

  FA_FN void store_scaled(u8 *to, const u8 *from, u32 i, const RowState &state) const {
    const Two two = normed(from, i, state);
    u8 *at = to + u64(i) * sizeof(T);
    if (pairs_) {
      *reinterpret_cast<Two *>(at) = two;
      return;
    }
    reinterpret_cast<One *>(at)->unit[0] = two.unit[0];
    if (i + 1 < norm_.row)
      reinterpret_cast<One *>(at)[1].unit[0] = two.unit[1];
  }

  // Like store_scaled(), for a pack, if everything is aligned to packs: fewer loads to wait for.
  FA_FN void store_scaled_pack(u8 *to, const u8 *from, u32 i, const RowState &state) const {
    const u64 at = u64(i) * kPackBytes;
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Pack weight = {};
    const Pack row = load(from + at, Whole{}, 0);
    if (weights != nullptr)
      weight = load(weights + at, Whole{}, 0);
    store(to + at, scaled_pack<T>(row, state, weight, weights != nullptr, norm_.unit_offset != 0), Whole{},
          0);
  }

  // Runs all passes over a row; the state is complete on every thread.
  template <u32 Pass, class Block>
  FA_FN void measure(const Block &block, const u8 *row, RowState *state) const {
    Norm::template after<Pass>(sum<Pass>(block, row, *state), norm_, state);
    if constexpr (Pass + 1 < Norm::kPasses)
      measure<Pass + 1>(block, row, state);
  }

  // Returns the sum of a pass over a row, on every thread. Each chunk is summed by a warp.
  template <u32 Pass, class Block>
  FA_FN float sum(const Block &block, const u8 *row, const RowState &state) const {
    __shared__ float chunks[kMostChunks];
    const u32 lane = threadIdx.x % kWarp, count = (norm_.row + kChunk - 1) / kChunk;
    // All threads have read the sums of the previous row.
    block.sync();
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < count; chunk += blockDim.x / kWarp) {
      const u32 first = chunk * kChunk + 2 * lane;
      ChunkSum<T, Norm, Pass> chunk_sum;
      // No branch around each load: it would wait for the previous load.
      if (pairs_ && chunk * kChunk + kChunk <= norm_.row) {
        Two twos[kChunk / kPartials];
        FA_UNROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run)
          twos[run] = *reinterpret_cast<const Two *>(row + u64(first + run * kPartials) * sizeof(T));
        FA_UNROLL
        for (const Two &two : twos)
          chunk_sum.add(two, state);
      } else {
        FA_NO_UNROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run)
          chunk_sum.add(load_two(row, first + run * kPartials), state, left(first + run * kPartials));
      }
      const float sum = chunk_sum.sum();
      if (lane == 0)
        chunks[chunk] = sum;
    }
    block.sync();
    float sum = 0;
    FA_NO_UNROLL
    for (u32 chunk = 0; chunk < count; ++chunk)
      sum += chunks[chunk];
    return sum;
  }
};

// An out-of-line function, like add_residual(): one copy for all kernels of a type.
template <class T, class Norms, class Block>
FA_OUTLINED void normalise(const FaFused &norm, const Block &block, u32 row, u64 rows) {
  Norms::with(norm.norm, [&](auto of) { RowNorm<T, decltype(of)>(norm, rows).put(block, row); });
}

// Adds the residual to the plain sums that the block's threads have stored.
template <class T, class Block>
FA_OUTLINED void add_residual(const FaFused &norm, u64 output, const Block &block, RowPartition partition,
                              u64 bytes, u32 slice_count) {
  block.sync();
  const u8 *sums = reinterpret_cast<const u8 *>(output);
  const u8 *residual = reinterpret_cast<const u8 *>(norm.residual);
  u8 *to = reinterpret_cast<u8 *>(norm.residual_out);
  const u64 addresses = u64(sums) | u64(residual) | u64(to);
  const u32 granule = granule_of(addresses | bytes);
  const Slices slices = partition.slices(bytes, slice_count);
  FA_NO_UNROLL
  for (u32 r = 0; r < slice_count; ++r) {
    for_each_pack(
        block, slices.of(r), bytes, pack_aligned(addresses),
        [&](u64 at, Index, auto extent) {
          const Pack sum = load(sums + at, in_leaf(extent), granule),
                     added = load(residual + at, in_leaf(extent), granule);
          store(to + at, added_pack<T>(sum, added), in_leaf(extent), granule);
        },
        partition);
  }
}

// ReceiversAdd: plain sums are sent to all ranks, and the receivers add the residual.
template <class T, bool ReceiversAdd, class Norms>
class NormedRows {
public:
  FA_FN explicit NormedRows(const FaFused &norm) : norm_(norm) {}

  template <class Reduce>
  FA_FN RowPartition partition(const FaLaunch &, const Reduce &) const {
    return RowPartition(gridDim.x > 1, u64(norm_.row) * sizeof(T));
  }

  template <class Sink>
  FA_FN ResidualAdder<T, Sink> into(const Sink &sink) const {
    return {residual(!ReceiversAdd), sink};
  }

  template <class Sink>
  FA_FN ResidualAdder<T, Sink> into_gathered(const Sink &sink) const {
    return {residual(ReceiversAdd), sink};
  }

  template <class Sink>
  FA_FN ResidualAdder<T, Sink> into_rows(const Sink &sink) const {
    return into(sink);
  }

  template <class Block>
  FA_FN void gather(const FaLaunch &launch, const Block &block, RowPartition partition, u8 *to,
                    const u64 *addresses, const Slices &slices, u32 world, u64 bytes) const {
    copy_slices(partition, block, to, addresses, slices, launch.rank, world, bytes, Target::kOutput);
  }

  template <class Block>
  FA_FN void finish(const FaLaunch &launch, Block &block, RowPartition partition, u64 bytes,
                    u32 slice_count) const {
    if (norm_.residual_out != 0)
      add_residual<T>(norm_, launch.output, block, partition, bytes, slice_count);
    if (norm_.norm == FA_NO_NORM)
      return;
    // The rows were stored by other threads of the block.
    block.sync();
    const u64 rows = norm_.residual_out == 0 ? launch.output : norm_.residual_out;
    partition.for_each_row(block, bytes, slice_count, norm_.rows,
                           [&](u32 row) { normalise<T, Norms>(norm_, block, row, rows); });
  }

private:
  const FaFused &norm_;

  // The residual that a sink adds; null if a different sink adds it, or if finish() does.
  FA_FN const u8 *residual(bool here) const {
    return reinterpret_cast<const u8 *>(here && norm_.residual_out == 0 ? norm_.residual : 0);
  }
};

template <class T, class Norms>
constexpr bool kKeepsSums<NormedRows<T, true, Norms>> = true;

} // namespace FA_NAMESPACE
