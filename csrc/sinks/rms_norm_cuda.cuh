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

// A part of a row that all threads of a block work on: the row, or the part of a block of a team
// (cuda/team_rows.cuh), which is whole chunks, or reaches the row's end.
struct RowPart {
  u64 address; // that the first element of the row has, or would have
  ElementRange range;
  u32 row;    // number of the row in the launch
  u32 epoch;  // of a team
  u64 *words; // in which the blocks of a team exchange values; null: the block has the row
};

// Waits for a float that another block of this rank sends in a word. If that block fails, it reports which
// rank it waited for. `Leaf`: the caller is an out-of-line function.
template <bool Leaf = false>
FA_FN bool wait_for_word(const FaLaunch &launch, const u64 *from, u32 epoch, float *value) {
  u64 word = 0;
  const Failure failure = wait_until<Leaf>(launch, launch.rank, [&] {
    word = load_relaxed(from);
    return u32(word >> 32) == epoch;
  });
  *value = __uint_as_float(u32(word));
  return failure.none() || succeeded<Leaf>(launch, {failure.code(), 0}, epoch);
}

// Normalises parts of rows.
template <class T>
class RowNorm {
  using One = Elements<T, 1>;
  using Two = Elements<T, 2>;

public:
  FA_FN RowNorm(const FaFused &norm, u64 address, ElementRange range)
      : norm_(norm), row_(reinterpret_cast<const u8 *>(address)), range_(range),
        addresses_(address | norm.normed | norm.weight | norm.bias | u64(norm.row) * sizeof(T)),
        pairs_(addresses_ % sizeof(Two) == 0), code_(norm.norm), offset_(weight_offset(norm)) {}

  // Runs all passes over the row. exchange(pass, sums) completes the sums of a pass, which are those of this
  // part's chunks and its place among the row's; it syncs the block, and returns false if it failed.
  template <class Block, class Exchange>
  FA_FN bool measure(const Block &block, RowState *state, const Exchange &exchange) const {
    u32 passes = 1;
    FA_NO_UNROLL
    for (u32 pass = 0; pass < passes; ++pass) {
      float total = 0;
      if (!sum(block, pass, *state, &total, exchange))
        return false;
      with_norm(code_, [&](auto of) {
        of.after(pass, total, norm_, state);
        passes = of.kPasses;
      });
    }
    return true;
  }

  // Stores the normalised part; `to`: address of its row.
  template <class Block>
  FA_FN void store(const Block &block, u64 to, const RowState &state) const {
    if (addresses_ % kPackBytes == 0)
      return for_each<kPackBytes / sizeof(T)>(block, [&](u32 i) { store_pack(to, i, state); });
    for_each<2>(block, [&](u32 i) { store_pair(reinterpret_cast<u8 *>(to), i, state); });
  }

  // Elements i and i + 1 as they are stored; zero beyond the end of the row.
  FA_FN Two two(u32 i) const { return load_two(row_, i); }

  // Elements i and i + 1 of the normalised row.
  FA_FN Two normed(u32 i, const RowState &state) const {
    const u8 *weights = reinterpret_cast<const u8 *>(norm_.weight);
    Two weight = {};
    if (weights != nullptr)
      weight = load_two(weights, i);
    const u8 *biases = reinterpret_cast<const u8 *>(norm_.bias);
    Two bias = no_bias<Two>();
    if (biases != nullptr)
      bias = load_two(biases, i);
    return normed(load_two(row_, i), weight, bias, state);
  }

  // RMSNorm of a row in two steps, between which other sums are added (sharded_rows_cuda.cuh).
  template <class Block>
  FA_FN float squares(const Block &block) const {
    float squares;
    sum(block, 0, {}, &squares, [&](u32, const float *) {
      block.sync();
      return true;
    });
    return squares;
  }
  template <class Block>
  FA_FN void scale(const Block &block, float squares) const {
    RowState state;
    RmsNorm::after(0, squares, norm_, &state);
    store(block, norm_.normed, state);
  }

private:
  static constexpr u32 kWarp = 32, kAtOnce = 2;

  const FaFused &norm_;
  const u8 *row_;
  const ElementRange range_;
  const u64 addresses_;
  const bool pairs_;   // pairs of elements are aligned
  const u32 code_;     // of the norm
  const float offset_; // of the weights

  // Zeros that change no sum.
  template <class Many>
  static FA_FN Many no_bias() {
    Many many;
    FA_UNROLL
    for (u32 word = 0; word < sizeof(Many) / 4; ++word)
      reinterpret_cast<u32 *>(&many)[word] = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
    return many;
  }

  template <u32 Each, class Block, class Body>
  FA_FN void for_each(const Block &block, Body body) const {
    block.for_each_in_block((range_.end - range_.begin + Each - 1) / Each,
                            [&](u32 i) { body(range_.begin + Each * i); });
  }

  // Number of elements from i to the end of the row.
  FA_FN u32 left(u32 i) const { return i < norm_.row ? norm_.row - i : 0; }

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

  template <u32 N>
  FA_FN Elements<T, N> normed(const Elements<T, N> &row, const Elements<T, N> &weight,
                              const Elements<T, N> &bias, const RowState &state) const {
    auto lanes = widen<T, N>(row);
    with_norm(code_,
              [&](auto of) { lanes = map(lanes, [&](float x) { return decltype(of)::apply(state, x); }); });
    lanes = weighted<T, N>(lanes, weight, offset_);
    return narrow<T, N>(map(lanes, widen<T, N>(bias), Arithmetic<float>::add));
  }

  FA_FN void store_pair(u8 *to, u32 i, const RowState &state) const {
    const Two two = normed(i, state);
    u8 *at = to + u64(i) * sizeof(T);
    if (pairs_) {
      *reinterpret_cast<Two *>(at) = two;
      return;
    }
    reinterpret_cast<One *>(at)->unit[0] = two.unit[0];
    if (i + 1 < norm_.row)
      reinterpret_cast<One *>(at)[1].unit[0] = two.unit[1];
  }

  // Like store_pair(), for a pack, if everything is aligned to packs: fewer loads to wait for.
  FA_FN void store_pack(u64 to, u32 i, const RowState &state) const {
    using Word = Elements<T, 4 / sizeof(T)>;
    const u64 at = u64(i) * sizeof(T);
    const auto load_pack = [&](u64 address) {
      return load(reinterpret_cast<const u8 *>(address) + at, Whole{}, 0);
    };
    Pack row = load_pack(u64(row_)), weight = {}, bias = no_bias<Pack>(), result = {};
    if (norm_.weight != 0)
      weight = load_pack(norm_.weight);
    if (norm_.bias != 0)
      bias = load_pack(norm_.bias);
    // One loop body for the words, because the code is long: each in turn is the first.
    FA_NO_UNROLL
    for (u32 word = 0; word < 4; ++word) {
      const auto first = [](Pack *pack) {
        const u32 *word = pack->word;
        const Word elements = *reinterpret_cast<const Word *>(&word[0]);
        *pack = {word[1], word[2], word[3], word[3]};
        return elements;
      };
      const Word next = normed(first(&row), first(&weight), first(&bias), state);
      result = {result.word[1], result.word[2], result.word[3], *reinterpret_cast<const u32 *>(&next)};
    }
    FA_NAMESPACE::store(reinterpret_cast<u8 *>(to) + at, result, Whole{}, 0);
  }

  // The sum of a pass over the row, on every thread. Each chunk is summed by a warp.
  template <class Block, class Exchange>
  FA_FN bool sum(const Block &block, u32 pass, const RowState &state, float *sum,
                 const Exchange &exchange) const {
    __shared__ float chunks[kMostChunks];
    const u32 lane = threadIdx.x % kWarp, end = (range_.end + kChunk - 1) / kChunk;
    // All threads have read the sums of the previous row.
    block.sync();
    FA_NO_UNROLL
    for (u32 chunk = range_.begin / kChunk + threadIdx.x / kWarp; chunk < end; chunk += blockDim.x / kWarp) {
      const u32 first = chunk * kChunk + 2 * lane;
      ChunkSum<T> chunk_sum;
      // No branch around each load: it would wait for the previous load.
      if (pairs_ && chunk * kChunk + kChunk <= norm_.row) {
        Two twos[kChunk / kPartials];
        FA_UNROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run)
          twos[run] = *reinterpret_cast<const Two *>(row_ + u64(first + run * kPartials) * sizeof(T));
        with_norm(code_, [&](auto of) {
          FA_UNROLL
          for (const Two &two : twos)
            chunk_sum.add(two, of, pass, state);
        });
      } else {
        FA_NO_UNROLL
        for (u32 run = 0; run < kChunk / kPartials; ++run) {
          const u32 i = first + run * kPartials;
          const Two two = load_two(row_, i);
          with_norm(code_, [&](auto of) { chunk_sum.add(two, of, pass, state, left(i)); });
        }
      }
      const float sum = chunk_sum.sum();
      if (lane == 0)
        chunks[chunk] = sum;
    }
    if (!exchange(pass, chunks))
      return false;
    // A sum that begins with +0 is never -0, so that +0 in place of a missing chunk does not change it.
    const u32 count = (norm_.row + kChunk - 1) / kChunk;
    float total = 0;
    FA_NO_UNROLL
    for (u32 chunk = 0; chunk < count; chunk += kAtOnce) {
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const float next = chunks[min(chunk + k, count - 1)];
        total += chunk + k < count ? next : 0;
      }
    }
    *sum = total;
    return true;
  }
};

// Results of normalise().
struct NormedPart {
  RowState state;
  bool complete; // false: a block of the team failed
};

// Measures a row, whose parts the blocks of its team have, and stores this part in the launch's type where
// that is wanted. An out-of-line function, like put_quantized() and add_residual(): one copy for all kernels
// of a type.
template <class T>
FA_OUTLINED NormedPart normalise(const FaLaunch &launch, const FaFused &norm, RowPart part) {
  const Block block;
  const RowNorm<T> row(norm, part.address, part.range);
  // In a register: each store could change memory.
  const u32 chunks = norm.chunks;
  NormedPart normed;
  normed.complete = row.measure(block, &normed.state, [&](u32 pass, float *sums) {
    block.sync();
    if (part.words == nullptr)
      return true;
    u64 *words = part.words + (pass * norm.rows + part.row) * chunks;
    const u32 first = part.range.begin / kChunk, last = (part.range.end + kChunk - 1) / kChunk;
    block.for_each_in_block(last - first, [&](u32 i) {
      store_relaxed(words + first + i, u64(part.epoch) << 32 | __float_as_uint(sums[first + i]));
    });
    // Other threads still read this block's sums, which stay as they are.
    bool complete = true;
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x; complete && chunk < chunks; chunk += blockDim.x)
      if (chunk < first || chunk >= last)
        complete = wait_for_word<true>(launch, words + chunk, part.epoch, &sums[chunk]);
    return block.all(complete);
  });
  if (normed.complete && norm.normed != 0)
    row.store(block, norm.normed + u64(part.row) * norm.row * sizeof(T), normed.state);
  return normed;
}

// Quantises a part of a row. If the row has one scale, the blocks of a team exchange their greatest
// magnitudes, in words after those of the sums. `is_normed`: the part is normalised. Returns false if a block
// of the team failed.
template <class T>
FA_OUTLINED bool put_quantized(const FaLaunch &launch, const FaFused &norm, RowPart part, RowState state,
                               bool is_normed) {
  const Block block;
  // A row that is stored is not normalised again. Other threads of the block have stored some of it.
  if (!is_normed && norm.normed != 0) {
    part.address = norm.normed + u64(part.row) * norm.row * sizeof(T);
    is_normed = true;
  }
  block.sync();
  const RowNorm<T> row(norm, part.address, part.range);
  const auto pair = [&](u32 i) { return widen<T, 2>(is_normed ? row.two(i) : row.normed(i, state)); };
  const QuantizedRows quantized(norm);
  return quantized.put(block, part.row, part.range, pair, [&](u32 *greatest) {
    if (part.words == nullptr)
      return true;
    u64 *words = part.words + kMostPasses * norm.rows * norm.chunks + part.row * norm.team;
    if (threadIdx.x == 0)
      store_relaxed(words + part.range.begin * sizeof(T) / kPackBytes / norm.block_packs,
                    u64(part.epoch) << 32 | *greatest);
    bool complete = true;
    float other = 0;
    FA_NO_UNROLL
    for (u32 b = threadIdx.x; complete && b < norm.team; b += blockDim.x) {
      complete = wait_for_word<true>(launch, words + b, part.epoch, &other);
      *greatest = max(*greatest, __float_as_uint(other));
    }
    if (!block.all(complete))
      return false;
    *greatest = quantized.greatest_of(block, *greatest);
    return true;
  });
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
      const RowPart all = {rows + u64(row) * norm_.row * sizeof(T), {0, norm_.row}, row, 0, nullptr};
      const NormedPart normed = normalise<T>(launch, norm_, all);
      if (norm_.scaling != FA_NOT_SCALED)
        put_quantized<T>(launch, norm_, all, normed.state, false);
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
