// Inputs that are computed from experts' rows, the end of a mixture of experts: rows are gathered, weighted
// and summed, and a shared expert's row is added. docs/fused.md has the formula. A protocol reads its input
// through the reader as it reads a premultiplied one: once, to stage or send it.
#pragma once

#include "../core/pack.cuh"
#include "../core/wait.cuh"

namespace FA_NAMESPACE {

// Returns, on all threads, whether the input can be read: each entry of the table is a row, or negative.
//
// Every block checks the table of the launch, before the launch sends or writes anything. So a rank with an
// entry that is no row sends nothing in this launch: no rank stores a result that depends on it. Earlier
// pieces of a call that takes several launches are complete on all ranks.
template <class Block>
FA_OUTLINED bool find_experts(const FaLaunch &launch, const FaFused &norm, const Block &block) {
  const FaExperts &experts = norm.experts;
  const i32 *table = reinterpret_cast<const i32 *>(experts.table);
  const u32 entries = norm.rows * experts.top_k;
  const i32 rows = i32(experts.rows);
  u32 missing = entries, first = entries, quads = 0;
#if FA_CUDA
  // From the first aligned entry on, four with each load, several of which are in flight.
  constexpr u32 kEach = kPackBytes / sizeof(i32), kAtOnce = 4;
  first = min(entries, u32(0 - experts.table / sizeof(i32)) % kEach);
  quads = (entries - first) / kEach;
  block.template for_several_in_block<kAtOnce>(quads, [&](u32 quad, u32 stride) {
    Pack packs[kAtOnce];
    const auto entry = [&](u32 k) { return first + min(quad + k * stride, quads - 1) * kEach; };
    FA_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k)
      packs[k] = load(reinterpret_cast<const u8 *>(table + entry(k)), Whole{}, 0);
    FA_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k) {
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        missing = i32(packs[k].word[e]) >= rows ? entry(k) + e : missing;
    }
  });
  quads *= kEach;
#endif
  // The entries before and after those.
  block.for_each_in_block(entries - quads, [&](u32 i) {
    const u32 at = i < first ? i : i + quads;
    missing = table[at] >= rows ? at : missing;
  });
  if (missing != entries)
    record_failure(launch, {FA_NO_EXPERT, 0}, u32(experts.first_entry) + missing);
  return block.all(missing == entries);
}

// Whether the weights are floats, rather than of the launch's type.
FA_FN bool has_float_weights(const FaExperts &experts) {
  return experts.weights == 0 || experts.weights_dtype == FA_F32;
}

// The bits of a weight of 1, where there are none.
constexpr u32 kWeightOne = 0x3F800000;

// The bits of weight i.
template <class T>
FA_FN u32 weight_bits(const FaExperts &experts, u64 i) {
  if (experts.weights == 0)
    return kWeightOne;
  if (sizeof(T) == sizeof(float) || experts.weights_dtype == FA_F32)
    return reinterpret_cast<const u32 *>(experts.weights)[i];
  return reinterpret_cast<const u16 *>(experts.weights)[i];
}

} // namespace FA_NAMESPACE
