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

// The part of a row that a block has: the row, or whole chunks of it, and the last ones reach the row's end.
struct RowPart {
  u64 address;    // that the first element of the row has, or would have
  u32 begin, end; // elements
  u32 readable;   // elements that can be read: up to there, those beyond the row's end are zeros
  u32 epoch;      // of a team
  u64 *words;     // in which the blocks of a team exchange the terms of chunks, a pair for each; null: no team
};

struct MeasuredRow {
  RowState state;
  bool complete; // false: a block of the team failed
};

// Waits for words with `epoch` that another block of this rank stores. If that block fails, it reports which
// rank it waited for. It does not call functions, so that an out-of-line function may wait.
template <class Load>
FA_FN bool wait_for_block(const FaLaunch &launch, u32 epoch, const Load &load) {
  const Failure failure = wait_until<true>(launch, launch.rank, load);
  return failure.none() || succeeded<true>(launch, {failure.code(), 0}, epoch);
}

// Sums the chunks of a part of a row, each by a warp, and combines them with those of the other parts, in
// ascending order, so that the result is that of a block with the whole row. `code`: of the norm.
template <class T>
FA_FN MeasuredRow measure_inlined(const FaLaunch *launch, const FaFused &norm, u32 code, const RowPart &part,
                                  float *squares = nullptr) {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;
  constexpr u32 kWarp = 32, kAtOnce = 8;
  // Of chunks; and what is added up, with zeros after the last chunk: a sum that begins with +0 is never -0.
  __shared__ ChunkTerms all_terms[kMostChunks];
  __shared__ float4 all_parts[(kMostChunks + kAtOnce) / 4];
  float *parts = reinterpret_cast<float *>(all_parts);
  const Block block;
  const u32 row = norm.row, total = norm.total, chunks = (row + kChunk - 1) / kChunk;
  const float epsilon = norm.epsilon;
  const u32 lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const bool centred = is_centred(code);
  const bool pairs = (part.address | u64(row) * sizeof(T)) % sizeof(Two) == 0;
  const auto length_of = [&](u32 chunk) { return min(kChunk, row - chunk * kChunk); };
  if (threadIdx.x < kAtOnce)
    parts[chunks + threadIdx.x] = 0;
  FA_NO_UNROLL
  for (u32 chunk = part.begin / kChunk + threadIdx.x / kWarp; chunk * kChunk < part.end; chunk += warps) {
    const u32 first = chunk * kChunk + 2 * lane;
    const u8 *from = reinterpret_cast<const u8 *>(part.address) + u64(first) * sizeof(T);
    Two twos[kRuns];
    // No branch around each load: it would wait for the previous load.
    if (pairs && (chunk + 1) * kChunk <= part.readable) {
      FA_UNROLL
      for (u32 run = 0; run < kRuns; ++run)
        twos[run] = *reinterpret_cast<const Two *>(from + run * kPartials * sizeof(T));
    } else {
      // Each pair in turn is the last one.
      FA_NO_UNROLL
      for (u32 run = 0; run < kRuns; ++run) {
        FA_UNROLL
        for (u32 k = 0; k + 1 < kRuns; ++k)
          twos[k] = twos[k + 1];
        const u32 i = first + run * kPartials;
        const One *ones = reinterpret_cast<const One *>(from + run * kPartials * sizeof(T));
        Two two = {};
        if (i < row)
          two.unit[0] = ones[0].unit[0];
        if (i + 1 < row)
          two.unit[1] = ones[1].unit[0];
        twos[kRuns - 1] = two;
      }
    }
    const ChunkTerms terms = terms_of_chunk<T>(twos, code, length_of(chunk));
    if (part.words != nullptr)
      store_relaxed_pair_below(lane, 1, part.words + 2 * chunk,
                               u64(part.epoch) << 32 | __float_as_uint(terms.sum),
                               u64(part.epoch) << 32 | __float_as_uint(terms.mean));
    else if (lane == 0)
      all_terms[chunk] = terms;
  }
  if (part.words == nullptr)
    block.sync();
  bool complete = true;
  FA_NO_UNROLL
  for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    ChunkTerms terms;
    if (part.words == nullptr) {
      terms = all_terms[chunk];
    } else {
      u64 sum = 0, mean = 0;
      complete = wait_for_block(*launch, part.epoch, [&] {
        load_relaxed_pair(part.words + 2 * chunk, &sum, &mean);
        return ((u32(sum >> 32) ^ part.epoch) | (u32(mean >> 32) ^ part.epoch)) == 0;
      });
      if (!complete)
        break;
      terms = {__uint_as_float(u32(sum)), __uint_as_float(u32(mean))};
      all_terms[chunk] = terms;
    }
    parts[chunk] = centred ? float(length_of(chunk)) * terms.mean : terms.sum;
  }
  if (!block.all(complete))
    return {{}, false};
  const auto added_up = [&] {
    float sum = 0;
    u32 some = 0;
    FA_NO_UNROLL
    do {
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce / 4; ++k, ++some) {
        const float4 four = all_parts[some];
        sum = sum + four.x + four.y + four.z + four.w;
      }
    } while (some * 4 < chunks);
    return sum;
  };
  RowState state;
  float sum = added_up();
  if (centred) {
    state.mean = divided(sum, float(total));
    // All threads have read the parts.
    block.sync();
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x)
      parts[chunk] = about_row_mean(all_terms[chunk].sum, all_terms[chunk].mean - state.mean,
                                    float(length_of(chunk)));
    block.sync();
    sum = added_up();
  }
  if (squares != nullptr)
    *squares = sum;
  else
    with_terms(code, [&](auto of) { state.scale = of.scale(sum, total, epsilon); });
  return {state, true};
}

// An out-of-line function, like normed_pack_at(), put_pack() and add_residual(): one copy for all kernels of
// a type.
template <class T>
FA_OUTLINED MeasuredRow measure(const FaLaunch &launch, const FaFused &norm, RowPart part) {
  return measure_inlined<T>(&launch, norm, norm.norm, part);
}

// Rows in memory, each of which belongs to one block, at any address.
template <class T>
class RowNorm {
public:
  static constexpr u32 kEach = kPackBytes / sizeof(T);

  // `address`: of the row.
  FA_FN RowNorm(const FaFused &norm, u64 address) : norm_(norm), address_(address) {}

  FA_FN RowPart all() const { return {address_, 0, norm_.row, norm_.row, 0, nullptr}; }

  // Normalises the pack from element i on, zeros beyond the end of the row, and stores it in the row at `to`.
  FA_FN Pack put(u32 i, const RowState &state, u64 to, bool stores) const {
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
    Pack normed = normed_pack<T>(row, state, weight, weight_offset(norm_), bias);
    if (stores)
      store(reinterpret_cast<u8 *>(to) + at, normed, extent, sizeof(T));
    if (left < kPackBytes)
      normed = kept(normed, left);
    return normed;
  }

private:
  const FaFused &norm_;
  const u64 address_;

  // The first bytes of a pack, then zeros.
  static FA_FN Pack kept(const Pack &pack, u32 bytes) {
    const u64 low = pack.low(), high = pack.high();
    const auto first = [](u64 word, u32 bytes) { return bytes == 0 ? 0 : word << (64 - 8 * bytes) >> (64 - 8 * bytes); };
    return pack_of(first(low, min(bytes, 8u)), first(high, bytes > 8 ? bytes - 8 : 0));
  }
};

// Normalises a pack of a row, and stores it where that is wanted. `number`: of the row.
template <class T>
FA_OUTLINED Pack normed_pack_at(const FaFused &norm, u64 address, u32 number, u32 i, RowState state,
                                bool stores) {
  return RowNorm<T>(norm, address)
      .put(i, state, norm.normed + u64(number) * norm.row * sizeof(T), stores & (norm.normed != 0));
}

// Normalises a row that belongs to one block.
template <class T, class Block>
FA_FN void norm_row(const FaLaunch &launch, const Block &block, const FaFused &norm, u64 address,
                    u32 number) {
  constexpr u32 kEach = kPackBytes / sizeof(T), kWarp = 32;
  // All threads have read the shared memory of the previous row.
  block.sync();
  const RowState state = measure<T>(launch, norm, RowNorm<T>(norm, address).all()).state;
  u32 greatest = 0;
  FA_NO_UNROLL
  for (bool stores = norm.scaling != FA_SCALE_PER_ROW;; stores = true) {
    // All lanes of a warp, since those of a group compute its scale together.
    FA_NO_UNROLL
    for (u32 i = threadIdx.x * kEach; i - threadIdx.x % kWarp * kEach < norm.row; i += blockDim.x * kEach) {
      const Pack pack = normed_pack_at<T>(norm, address, number, i, state, stores);
      if (!stores)
        greatest = max(greatest, greatest_of_pack<T>(pack));
      else if (norm.scaling != FA_NOT_SCALED)
        put_pack<T>(norm, number, i, pack, greatest);
    }
    if (stores)
      return;
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
      norm_row<T>(launch, block, norm_, rows + u64(row) * norm_.row * sizeof(T), row);
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
