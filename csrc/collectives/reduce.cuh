// Reduce: the root has the ranks' inputs, reduced. A two-shot pull in which only the root gathers: the links
// of the root carry its share of the reduction and the other slices, once each.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

template <class T, class Block, class Op, class WorldT>
FA_FN void reduce(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = walking(begin_turn(launch, block, true), launch);
  if (!same_call(launch, block, turn))
    return;
  const u32 ranks = world.size();
  const u64 packs = packs_of<T>(launch.count);
  for (u32 r = 0; r < ranks; ++r) {
    if (r != launch.rank)
      stage_input<T>(launch, block, slice_of(packs, ranks, r), turn);
  }
  if (!barrier(launch, block, kStart, turn))
    return;

  const Inputs<T, WorldT> inputs = resolve_inputs<T>(launch, block, world, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  const bool root = launch.rank == launch.root;
  T *output = reinterpret_cast<T *>(root ? launch.output : u64(staging(launch, launch.rank, turn)));
  for_each_pack<T>(block, slice_of(packs, ranks, launch.rank), launch.count,
                   inputs.vector && pack_aligned(output), [&](u64 offset, u64, auto extent) {
                     store(output + offset, reduce_inputs(inputs, op, world, offset, extent), extent);
                   });
  // The slices are reduced, and no input is read any more.
  if (!barrier(launch, block, kSecond, turn))
    return;

  for (u32 r = 0; root && r < ranks; ++r) {
    if (r != launch.rank)
      copy(block, output, reinterpret_cast<const T *>(staging(launch, r, turn)), slice_of(packs, ranks, r),
           launch.count);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
