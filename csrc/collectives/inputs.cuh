// The inputs of a pull: where each rank's are, and copying one's own to where peers can read it.
#pragma once

#include "../core/barrier.cuh"
#include "../core/reduce.cuh"

namespace FA_NAMESPACE {

// Where every rank's input is, after the start barrier has brought the sources.
template <class T, class WorldT>
struct Inputs {
  const T *at[WorldT::most];
  bool vector; // all can be read by vector accesses
  bool direct; // some rank's own buffer is read, so nobody may return before all have read
  bool mapped; // false: a peer names a buffer that this rank does not have
};

// `staged` and `whole` are the elements to skip: in what a rank staged, and in an input that is read where it
// is.
template <class T, class WorldT, class Block>
FA_FN Inputs<T, WorldT> resolve_inputs(const FaLaunch &launch, Block &block, WorldT world, Turn turn,
                                       u64 staged = 0, u64 whole = 0) {
  Inputs<T, WorldT> inputs;
  inputs.vector = true;
  inputs.direct = launch.source != 0;
  inputs.mapped = true;
  const u64 *sources = block.scratch();
  for_each_rank(world, [&](u32 r) {
    const u8 *address;
    if (r == launch.rank) {
      address = reinterpret_cast<const u8 *>(launch.input) + whole * sizeof(T);
    } else if (sources[r] == 0) {
      address = staging(launch, r, turn) + staged * sizeof(T);
    } else {
      const u64 id = sources[r] >> FA_SOURCE_ID_SHIFT;
      const u64 offset = sources[r] & ((u64(1) << FA_SOURCE_ID_SHIFT) - 1);
      const u64 *table = reinterpret_cast<const u64 *>(launch.buffers);
      const u64 base = id - 1 < launch.buffer_count ? table[(id - 1) * FA_MAX_RANKS + r] : 0;
      inputs.mapped = inputs.mapped && base != 0;
      inputs.direct = true;
      address = reinterpret_cast<const u8 *>(base + offset) + whole * sizeof(T);
    }
    inputs.at[r] = reinterpret_cast<const T *>(address);
    inputs.vector = inputs.vector && pack_aligned(address);
  });
  return inputs;
}

// Copies a span of packs of a message of `count` elements.
template <class T, class Block>
FA_STEP void copy(const Block &block, T *to, const T *from, Span span, u64 count) {
  const bool vector = pack_aligned(to) && pack_aligned(from);
  for_each_pack<T>(block, span, count, vector, [&](u64 offset, u64, auto extent) {
    store(to + offset, load(from + offset, extent), extent);
  });
}

// Copies a span of this rank's input to its staging, unless peers read the input itself.
template <class T, class Block>
FA_FN void stage_input(const FaLaunch &launch, const Block &block, Span span, Turn turn) {
  if (launch.source == 0)
    copy(block, reinterpret_cast<T *>(staging(launch, launch.rank, turn)),
         reinterpret_cast<const T *>(launch.input), span, launch.count);
}

// The same, and copies it to this rank's output as well, unless it is there. What peers read where it is must
// still be copied there: they need not wait for that.
template <class T, class Block>
FA_STEP void stage_and_keep(const FaLaunch &launch, const Block &block, Span span, Turn turn, T *output) {
  const T *input = reinterpret_cast<const T *>(launch.input);
  if (launch.source != 0 || input == output)
    return stage_input<T>(launch, block, span, turn);
  T *staged = reinterpret_cast<T *>(staging(launch, launch.rank, turn));
  for_each_pack<T>(block, span, launch.count, pack_aligned(input) && pack_aligned(output),
                   [&](u64 offset, u64, auto extent) {
                     const Pack<T> pack = load(input + offset, extent);
                     store(staged + offset, pack, extent);
                     store(output + offset, pack, extent);
                   });
}

template <class T, class Block>
FA_FN void keep_unstaged(const FaLaunch &launch, const Block &block, Span span, T *output) {
  const T *input = reinterpret_cast<const T *>(launch.input);
  if (launch.source != 0 && input != output)
    copy(block, output, input, span, launch.count);
}

// All ranks' packs at one offset, reduced in rank order.
template <class T, class Op, class WorldT, class Extent>
FA_FN Pack<T> reduce_inputs(const Inputs<T, WorldT> &inputs, Op op, WorldT world, u64 offset, Extent extent) {
  // Plain loads, so that where the world is known the compiler may issue them all before the first addition.
  Reduction<T, Op> reduction(op, world.size());
  for_each_rank(world, [&](u32 r) { reduction.add(load(inputs.at[r] + offset, extent)); });
  return reduction.finish();
}

} // namespace FA_NAMESPACE
