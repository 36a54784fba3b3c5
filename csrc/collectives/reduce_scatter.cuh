// Reduce-scatter: rank r has share r of the ranks' inputs, reduced. The first half of a two-shot pull, with
// the same bits; each remote byte is read once.
//
//   the peers' shares of own input -> own staging, unless it is registered | start barrier | reduce own share
//
// As in a one-shot pull, staged shares need no second barrier.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

// Shares are staged at equal distances, whole packs.
template <class T>
FA_FN u64 staged_share(const FaLaunch &launch) {
  u64 most = 0;
  for (u32 r = 0; r < launch.world; ++r)
    most = launch.shares[r].count > most ? launch.shares[r].count : most;
  return packs_of<T>(most) * kPackLanes<T>;
}

// In place, a rank's output is its own share of its input, which nobody else reads.
template <class T, class Block, class Op, class WorldT>
FA_FN void reduce_scatter(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = trading(begin_turn(launch, block, true), launch, launch.world);
  if (!same_call(launch, block, turn))
    return;
  const u64 distance = staged_share<T>(launch);
  if (launch.source == 0) {
    const T *input = reinterpret_cast<const T *>(launch.input);
    T *staged = reinterpret_cast<T *>(staging(launch, launch.rank, turn));
    for (u32 r = 0; r < launch.world; ++r) {
      const FaShare share = launch.shares[r];
      if (r != launch.rank)
        copy(block, staged + r * distance, input + share.first, {0, packs_of<T>(share.count)}, share.count);
    }
  }
  if (!barrier(launch, block, kStart, turn))
    return;

  const FaShare own = launch.shares[launch.rank];
  const Inputs<T, WorldT> inputs =
      resolve_inputs<T>(launch, block, world, turn, launch.rank * distance, own.first);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  T *output = reinterpret_cast<T *>(launch.output);
  for_each_pack<T>(block, {0, packs_of<T>(own.count)}, own.count, inputs.vector && pack_aligned(output),
                   [&](u64 offset, u64, auto extent) {
                     store(output + offset, reduce_inputs(inputs, op, world, offset, extent), extent);
                   });

  if (inputs.direct && !barrier(launch, block, kSecond, turn))
    return;
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
