// Two-shot pull: rank r reduces slice r into its staging, then everybody gathers all slices.
//
//   (input -> own staging) | start barrier | reduce own slice -> staging | second barrier | gather
//
// After the second barrier nobody reads an input again, so that in place is legal and no third barrier is
// needed. Own slice of own staging is read by nobody before it is reduced: the result may overwrite it.
//
// Between two ranks of the host a slice is reduced where it was staged, in the other rank's staging, which
// nobody but its reducer reads before the second barrier. So a cache line goes over and comes back, and its
// next writer has it.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

// The rank in whose staging slice r lies reduced.
FA_FN u32 keeper_of(u32 world, u32 r) { return trades_lines(world) ? 1 - r : r; }

template <class T, class Block, class Op, class WorldT>
FA_FN void two_shot_pull(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = walking(begin_turn(launch, block, true), launch);
  if (!same_call(launch, block, turn))
    return;
  const u32 ranks = world.size();
  const u64 packs = packs_of<T>(launch.count);
  for (u32 r = 0; r < ranks; ++r) {
    // Slice by slice, so that a block stages what the same block of a peer reads.
    if (r != launch.rank)
      stage_input<T>(launch, block, slice_of(packs, ranks, r), turn);
  }
  if (!barrier(launch, block, kStart, turn))
    return;

  const Inputs<T, WorldT> inputs = resolve_inputs<T>(launch, block, world, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  T *output = reinterpret_cast<T *>(launch.output);
  T *reduced = reinterpret_cast<T *>(staging(launch, keeper_of(ranks, launch.rank), turn));
  for_each_pack<T>(block, slice_of(packs, ranks, launch.rank), launch.count,
                   inputs.vector && pack_aligned(output), [&](u64 offset, u64, auto extent) {
                     const Pack<T> result = reduce_inputs(inputs, op, world, offset, extent);
                     store(reduced + offset, result, extent);
                     store(output + offset, result, extent);
                   });
  if (!barrier(launch, block, kSecond, turn))
    return;

  for (u32 step = 1; step < ranks; ++step) {
    // Each rank begins with its right neighbour, so that no rank is read by all at once.
    const u32 r = (launch.rank + step) % ranks;
    copy(block, output, reinterpret_cast<const T *>(staging(launch, keeper_of(ranks, r), turn)),
         slice_of(packs, ranks, r), launch.count);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
