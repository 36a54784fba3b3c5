// The arithmetic of rows: adding a residual to a sum, and normalising. docs/fused.md has the formulas and
// their order, which is the same on every device.
#pragma once

#include "../core/pack.cuh"
#include "norms.cuh"
#include "reduction.cuh"

namespace FA_NAMESPACE {

// Squares, and other terms of norms, are summed in chunks of kChunk elements. A chunk has kPartials partial
// sums: partial p adds the elements whose index is p modulo kPartials, in ascending order. Then partial p +
// half is added to partial p, with half = kPartials / 2, kPartials / 4, ..., 1. Chunks are added in ascending
// order. Elements beyond the row count as zero.
constexpr u32 kPartials = 64, kChunk = FA_SQUARES_CHUNK, kRuns = kChunk / kPartials;
constexpr u32 kMostChunks = FA_MAX_ROW / kChunk;

// Rounds once, to nearest, ties to even. NaNs become canonical.
template <class T, u32 N>
FA_FN Elements<T, N> narrow(LanesOf<T, N> lanes) {
  using A = typename Element<T>::Accumulate;
  using U = typename Unit<A>::type;
  if constexpr (!kNarrowsToCanonicalNan<T>)
    lanes = map(lanes, [](U u) { return u == u ? u : canonical_nan<A>(); });
  Elements<T, N> elements;
  narrow_into(Convert<T>{}, lanes, &elements);
  return elements;
}

#if FA_CUDA

template <class T, u32 N>
FA_FN LanesOf<T, N> widen(const Elements<T, N> &elements) {
  LanesOf<T, N> lanes;
  FA_UNROLL
  for (u32 i = 0; i < Elements<T, N>::units; ++i)
    lanes.unit[i] = Convert<T>::widen(elements.unit[i]);
  return lanes;
}

template <class T, u32 N>
FA_FN Elements<T, N> add(const Elements<T, N> &sum, const Elements<T, N> &residual) {
  using A = typename Element<T>::Accumulate;
  return narrow<T, N>(map(widen<T, N>(sum), widen<T, N>(residual), Arithmetic<A>::add));
}

// What is added to each weight. Where a row has no weights, they are loaded as +0 and become 1. Neither a
// product with 1 nor a sum with -0 changes a number, so that no case needs a branch.
FA_FN float weight_offset(const FaFused &norm) {
  return norm.weight == 0 || norm.unit_offset != 0 ? 1.0f : -0.0f;
}

// The factors of normalised elements: a pack of the weights, to which the offset has been added.
template <class T>
using Factors = LanesOf<T, kPackBytes / sizeof(T)>;
template <class T>
FA_FN Factors<T> factors_of(const Pack &weight, float offset) {
  using All = Elements<T, kPackBytes / sizeof(T)>;
  using U = typename Unit<float>::type;
  return map(widen<T, kPackBytes / sizeof(T)>(*reinterpret_cast<const All *>(&weight)),
             [&](U w) { return w + offset; });
}

// Adds a pack of the residual to a pack of sums.
template <class T>
FA_FN Pack added_pack(const Pack &sum, const Pack &residual) {
  using All = Elements<T, kPackBytes / sizeof(T)>;
  const All result = add<T>(*reinterpret_cast<const All *>(&sum), *reinterpret_cast<const All *>(&residual));
  return *reinterpret_cast<const Pack *>(&result);
}

// Normalises a pack of a row. Without `shifts`, the mean is +0 and there is no bias: both steps are left out,
// which gives the same bits.
template <class T>
FA_FN Pack normed_pack(const Pack &row, const RowState &state, const Factors<T> &factors, const Pack &bias,
                       bool shifts = true) {
  constexpr u32 kEach = kPackBytes / sizeof(T);
  using All = Elements<T, kEach>;
  using U = typename Unit<float>::type;
  const auto times = [](U x, U factor) { return x * factor; };
  const Factors<T> x = widen<T, kEach>(*reinterpret_cast<const All *>(&row));
  All normed;
  if (shifts)
    normed =
        narrow<T, kEach>(map(map(map(x, [&](U u) { return state.apply(u); }), factors, times),
                             widen<T, kEach>(*reinterpret_cast<const All *>(&bias)), Arithmetic<float>::add));
  else
    normed = narrow<T, kEach>(map(map(x, [&](U u) { return u * state.scale; }), factors, times));
  return *reinterpret_cast<const Pack *>(&normed);
}

// Zeros that change no sum, in place of a bias.
template <class T, class Many>
FA_FN Many no_bias() {
  Many many;
  FA_UNROLL
  for (u32 word = 0; word < sizeof(Many) / 4; ++word)
    reinterpret_cast<u32 *>(&many)[word] = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
  return many;
}

// Sum over a chunk, by a warp. Lane l, that of thread l modulo 32, has partials 2l and 2l + 1.
class ChunkSum {
public:
  FA_FN void add(float even, float odd) {
    even_ += even;
    odd_ += odd;
  }

  // On every lane.
  FA_FN float sum(u32 thread) const {
    // Lanes below 16 continue with the even partials, the others with the odd ones.
    const bool upper = thread % 32 >= 16;
    float sum = upper ? odd_ : even_;
    sum += __shfl_xor_sync(0xFFFFFFFF, upper ? even_ : odd_, 16);
    FA_UNROLL
    for (u32 half = 8; half > 0; half /= 2)
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, half);
    return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 16);
  }

private:
  float even_ = 0, odd_ = 0;
};

// What a chunk of `length` elements contributes to its row, by a warp. `twos`: this lane's elements, one pair
// of each run of kPartials; zeros beyond the end of the row. `thread`: threadIdx.x.
template <class T>
FA_FN ChunkTerms terms_of_chunk(const Elements<T, 2> (&twos)[kRuns], u32 thread, u32 norm, u32 length) {
  LanesOf<T, 2> x[kRuns];
  FA_UNROLL
  for (u32 run = 0; run < kRuns; ++run)
    x[run] = widen<T, 2>(twos[run]);
  float mean = 0;
  if (is_centred(norm)) {
    ChunkSum sum;
    FA_UNROLL
    for (const auto &two : x)
      sum.add(two.unit[0], two.unit[1]);
    mean = chunk_mean(sum.sum(thread), length);
    // The difference of an element that is missing is 0.
    if (length != kChunk) {
      FA_UNROLL
      for (u32 run = 0; run < kRuns; ++run) {
        const u32 i = run * kPartials + thread % 32 * 2;
        x[run].unit[0] = i < length ? x[run].unit[0] : mean;
        x[run].unit[1] = i + 1 < length ? x[run].unit[1] : mean;
      }
    }
  }
  ChunkSum terms;
  with_terms(norm, [&](auto of) {
    FA_UNROLL
    for (const auto &two : x)
      terms.add(of.term(two.unit[0] - mean), of.term(two.unit[1] - mean));
  });
  return {terms.sum(thread), mean};
}

#else

// The typed loops of the host, which the epilogue calls through a table.
struct AddedSpan {
  const u8 *sum;
  const u8 *residual;
  u8 *to;
  u8 *also; // second destination, or null
  u64 bytes;
  // null, or adds the squares of the results to it; then `bytes` is whole chunks, or reaches a row's end
  float *squares;
};

struct NormedRow {
  const FaFused &norm;
  u32 number; // in the launch
  const u8 *row;
  float squares; // sum of the row's squares
};

// A part of an input that is computed from experts' rows.
struct GatheredSpan {
  const FaFused &norm;
  const u8 *rows; // the experts' rows
  u64 at;         // first byte of the part in the input
  u64 bytes;
  u8 *to;
};

struct RowLoops {
  void (*add)(const AddedSpan &);
  // copies a row, unless `to` is null, and returns the sum of its squares
  float (*copy)(u8 *to, const u8 *row, u64 bytes);
  void (*norm)(const NormedRow &);
  void (*gather)(const GatheredSpan &);
};

#endif

} // namespace FA_NAMESPACE
