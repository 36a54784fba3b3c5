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

// Adds the values of lanes 0 to `count` - 1 of a warp in ascending order, from +0 on. Those of other lanes
// are zeros: a sum that begins with +0 is never -0, so that zeros do not change it. On every lane.
FA_FN float added_up(float value, float sum, u32 count) {
  constexpr u32 kAtOnce = 8;
  u32 lane = 0;
  FA_NO_UNROLL
  do {
    float values[kAtOnce];
    FA_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k)
      values[k] = __shfl_sync(~0u, value, lane + k);
    FA_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k)
      sum += values[k];
    lane += kAtOnce;
  } while (lane < count);
  return sum;
}

FA_FN u32 chunk_length(const FaFused &norm, u32 chunk) { return min(kChunk, norm.row - chunk * kChunk); }

// Combines what the chunks of a row contribute, by each warp on its own. load(chunk, &terms) gets a chunk's
// terms, and may wait for them; each lane of each warp calls it equally often, from `chunk` on: the lane's
// number, or the last chunk's. `thread`: threadIdx.x. `*sum`: the sum of the terms of the row. Returns false
// on lanes on which load() returned false; then the results are of no use, on any lane. (A vote, so that all
// lanes knew it, would be on the critical path.)
template <bool Centred, class Load>
FA_FN bool combine_chunks(const FaFused &norm, u32 chunks, u32 thread, u32 chunk, const Load &load,
                          RowState *state, float *sum) {
  constexpr u32 kWarp = 32;
  const u32 lane_chunk = chunk;
  ChunkTerms terms;
  bool complete = true;
  // If Centred, a first round computes the mean.
  FA_NO_UNROLL
  for (bool has_mean = !Centred;; has_mean = true) {
    u32 first = 0;
    float total = 0;
    FA_NO_UNROLL
    do {
      // The second round has the terms, unless there are more of them.
      if (!Centred || !has_mean || chunks > kWarp)
        complete &= load(chunk, &terms);
      float part = terms.sum;
      if constexpr (Centred) {
        const float length = float(chunk_length(norm, chunk));
        part = has_mean ? about_row_mean(terms.sum, terms.mean - state->mean, length) : length * terms.mean;
      }
      // Lanes without a chunk have the last one's terms.
      const bool has_chunk = first + thread % kWarp == chunk;
      total = added_up(has_chunk ? part : 0, total, min(chunks - first, kWarp));
      first += kWarp;
      chunk = min(chunk + kWarp, chunks - 1);
    } while (first < chunks);
    if (has_mean) {
      *sum = total;
      return complete;
    }
    state->mean = divided(total, float(norm.total));
    chunk = lane_chunk;
  }
}
template <class Load>
FA_FN bool combine_chunks(const FaFused &norm, u32 chunks, u32 thread, u32 chunk, const Load &load,
                          RowState *state, float *sum) {
  return is_centred(norm.norm) ? combine_chunks<true>(norm, chunks, thread, chunk, load, state, sum)
                               : combine_chunks<false>(norm, chunks, thread, chunk, load, state, sum);
}

// Rows in memory, each of which belongs to one block, at any address.
template <class T>
class RowNorm {
public:
  static constexpr u32 kEach = kPackBytes / sizeof(T);

  // `address`: of the row.
  FA_FN RowNorm(const FaFused &norm, u64 address) : norm_(norm), address_(address) {}

  // The sum of the terms of the row, by all threads of a block.
  template <class Block>
  FA_FN float sum(const Block &block, RowState *state) const {
    __shared__ ChunkTerms terms[kMostChunks];
    // A row of no elements has a chunk of zeros.
    const u32 row = norm_.row, chunks = max((row + kChunk - 1) / kChunk, 1u);
    const bool pairs = (address_ | u64(row) * sizeof(T)) % sizeof(Two) == 0;
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < chunks; chunk += blockDim.x / kWarp) {
      Two twos[kRuns];
      load_chunk(chunk * kChunk + 2 * (threadIdx.x % kWarp), pairs & ((chunk + 1) * kChunk <= row), &twos);
      const ChunkTerms own = terms_of_chunk<T>(twos, threadIdx.x, norm_.norm, chunk_length(norm_, chunk));
      if (threadIdx.x % kWarp == 0)
        terms[chunk] = own;
    }
    block.sync();
    const auto load = [&](u32 chunk, ChunkTerms *to) {
      *to = terms[chunk];
      return true;
    };
    float sum = 0;
    combine_chunks(norm_, chunks, threadIdx.x, min(threadIdx.x % kWarp, chunks - 1), load, state, &sum);
    return sum;
  }

  // Normalises the pack from element i on, zeros beyond the end of the row. Stores it in the row at
  // `to`, unless that is 0.
  FA_FN Pack put(u32 i, const RowState &state, u64 to) const {
    const u64 addresses = address_ | norm_.normed | norm_.weight | norm_.bias | u64(norm_.row) * sizeof(T);
    const u32 left = min(i < norm_.row ? norm_.row - i : 0, kEach) * u32(sizeof(T));
    const LeafExtent extent = {{left, addresses % kPackBytes == 0 && left == kPackBytes}};
    const u64 at = u64(i) * sizeof(T);
    const auto load_pack = [&](u64 row) {
      return load(reinterpret_cast<const u8 *>(row) + at, extent, sizeof(T));
    };
    const Pack row = load_pack(address_);
    Pack weight = {}, bias = no_bias<T, Pack>();
    if (norm_.weight != 0)
      weight = load_pack(norm_.weight);
    if (norm_.bias != 0)
      bias = load_pack(norm_.bias);
    Pack normed = normed_pack<T>(row, state, factors_of<T>(weight, weight_offset(norm_)), bias);
    if (to != 0)
      store(reinterpret_cast<u8 *>(to) + at, normed, extent, sizeof(T));
    if (left < kPackBytes)
      normed = kept(normed, left);
    return normed;
  }

private:
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;
  static constexpr u32 kWarp = 32;

  const FaFused &norm_;
  const u64 address_;

  // Loads a pair of each run of a chunk, whose first pair begins at element `first`. `whole`: all are in the
  // row, and aligned. Then there is no branch around each load: it would wait for the previous load.
  FA_FN void load_chunk(u32 first, bool whole, Two (*twos)[kRuns]) const {
    const u8 *from = reinterpret_cast<const u8 *>(address_) + u64(first) * sizeof(T);
    if (whole) {
      FA_UNROLL
      for (u32 run = 0; run < kRuns; ++run)
        (*twos)[run] = *reinterpret_cast<const Two *>(from + run * kPartials * sizeof(T));
      return;
    }
    // Each pair in turn is the last one.
    FA_UNROLL
    for (Two &two : *twos)
      two = {};
    FA_NO_UNROLL
    for (u32 run = 0; run < kRuns; ++run) {
      FA_UNROLL
      for (u32 k = 0; k + 1 < kRuns; ++k)
        (*twos)[k] = (*twos)[k + 1];
      const u32 i = first + run * kPartials;
      const One *ones = reinterpret_cast<const One *>(from + run * kPartials * sizeof(T));
      Two two = {};
      if (i < norm_.row)
        two.unit[0] = ones[0].unit[0];
      if (i + 1 < norm_.row)
        two.unit[1] = ones[1].unit[0];
      (*twos)[kRuns - 1] = two;
    }
  }

  // The first bytes of a pack, then zeros.
  static FA_FN Pack kept(const Pack &pack, u32 bytes) {
    const u64 low = pack.low(), high = pack.high();
    const auto first = [](u64 word, u32 bytes) {
      return bytes == 0 ? 0 : word << (64 - 8 * bytes) >> (64 - 8 * bytes);
    };
    return pack_of(first(low, min(bytes, 8u)), first(high, bytes > 8 ? bytes - 8 : 0));
  }
};

// Computes how a row is normalised. An out-of-line function, like put_row(), put_pack() and add_residual():
// one copy for all kernels of a type.
template <class T>
FA_OUTLINED RowState measure_row(const FaFused &norm, u64 address) {
  RowState state;
  const float sum = RowNorm<T>(norm, address).sum(Block(), &state);
  with_terms(norm.norm, [&](auto of) { state.scale = of.scale(sum, norm.total, norm.epsilon); });
  return state;
}

// Normalises a row by all threads of a block. Either stores it where that is wanted, and quantises it;
// `greatest`: the greatest magnitude of the row, if it has one scale. Or only returns the greatest magnitude
// of this thread's elements.
template <class T>
FA_OUTLINED u32 put_row(const FaFused &norm, u64 address, u32 number, RowState state, bool stores,
                        u32 greatest) {
  constexpr u32 kEach = kPackBytes / sizeof(T), kWarp = 32;
  const RowNorm<T> row(norm, address);
  const PackQuantizer<T> quantizer(norm, number);
  const u64 normed = stores & (norm.normed != 0) ? norm.normed + u64(number) * norm.row * sizeof(T) : 0;
  // All lanes of a warp, since those of a group compute its scale together.
  FA_NO_UNROLL
  for (u32 i = threadIdx.x * kEach; i - threadIdx.x % kWarp * kEach < norm.row; i += blockDim.x * kEach) {
    const Pack pack = row.put(i, state, normed);
    if (!stores)
      greatest = max(greatest, greatest_of_pack<T>(pack));
    else if (norm.scaling != FA_NOT_SCALED)
      quantizer.put(i, pack, norm.scaling == FA_SCALE_PER_ROW ? greatest : greatest_of_pack<T>(pack),
                    scale_of_pack(norm, number, i));
  }
  return greatest;
}

// Normalises a row that belongs to one block.
template <class T, class Block>
FA_FN void norm_row(const Block &block, const FaFused &norm, u64 address, u32 number) {
  // All threads have read the shared memory of the previous row.
  block.sync();
  const RowState state = measure_row<T>(norm, address);
  u32 greatest = 0;
  FA_NO_UNROLL
  for (bool stores = norm.scaling != FA_SCALE_PER_ROW;; stores = true) {
    greatest = put_row<T>(norm, address, number, state, stores, greatest);
    if (stores)
      break;
    greatest = greatest_of(block, greatest);
  }
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
template <class T, bool ReceiversAdd>
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
    partition.for_each_row(block, bytes, slice_count, norm_.rows, [&](u32 row) {
      norm_row<T>(block, norm_, rows + u64(row) * norm_.row * sizeof(T), row);
    });
  }

private:
  const FaFused &norm_;

  // The residual that a sink adds; null if a different sink adds it, or if finish() does.
  FA_FN const u8 *residual(bool here) const {
    return reinterpret_cast<const u8 *>(here && norm_.residual_out == 0 ? norm_.residual : 0);
  }
};

template <class T>
constexpr bool kKeepsSums<NormedRows<T, true>> = true;

} // namespace FA_NAMESPACE
