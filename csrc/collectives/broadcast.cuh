// Broadcast, in two forms.
//
//   at once:    root's input -> its staging | start barrier | everybody copies all of it
//   scattered:  root's input -> its staging | start barrier | rank r copies slice r, and stages it
//               | second barrier | everybody copies the other slices from their ranks
//
// Scattered, each link of the root carries 2/world of the message instead of all of it: the scatter and the
// all-gather of van de Geijn's broadcast (Barnett et al., "Interprocessor collective communication library",
// 1994). Either way all ranks hear from all, by the start barrier.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

template <class T, class Block>
FA_FN void broadcast(const FaLaunch &launch, Block &block) {
  const Turn turn = walking(begin_turn(launch, block, true), launch);
  if (!same_call(launch, block, turn))
    return;
  const Span all = {0, packs_of<T>(launch.count)};
  const bool root = launch.rank == launch.root;
  T *output = reinterpret_cast<T *>(launch.output);
  if (root)
    stage_and_keep(launch, block, all, turn, output);
  if (!barrier(launch, block, kStart, turn))
    return;

  const Inputs<T, AnyWorld> inputs = resolve_inputs<T>(launch, block, AnyWorld{launch.world}, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  if (root)
    keep_unstaged(launch, block, all, output);
  else
    copy(block, output, inputs.at[launch.root], all, launch.count);
  if (inputs.direct && !barrier(launch, block, kSecond, turn))
    return;
  end_turn(launch, block, turn);
}

template <class T, class Block>
FA_FN void scattered_broadcast(const FaLaunch &launch, Block &block) {
  const Turn turn = walking(begin_turn(launch, block, true), launch);
  if (!same_call(launch, block, turn))
    return;
  const u32 ranks = launch.world;
  const u64 packs = packs_of<T>(launch.count);
  const bool root = launch.rank == launch.root;
  T *output = reinterpret_cast<T *>(launch.output);
  for (u32 r = 0; root && r < ranks; ++r)
    // Slice by slice, so that a block stages what the same block of a peer reads.
    stage_and_keep(launch, block, slice_of(packs, ranks, r), turn, output);
  if (!barrier(launch, block, kStart, turn))
    return;

  const Inputs<T, AnyWorld> inputs = resolve_inputs<T>(launch, block, AnyWorld{ranks}, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  if (root) {
    keep_unstaged(launch, block, {0, packs}, output);
  } else {
    const T *input = inputs.at[launch.root];
    T *staged = reinterpret_cast<T *>(staging(launch, launch.rank, turn));
    for_each_pack<T>(block, slice_of(packs, ranks, launch.rank), launch.count,
                     pack_aligned(input) && pack_aligned(output), [&](u64 offset, u64, auto extent) {
                       const Pack<T> pack = load(input + offset, extent);
                       store(staged + offset, pack, extent);
                       store(output + offset, pack, extent);
                     });
    copy(block, output, input, slice_of(packs, ranks, launch.root), launch.count);
  }
  // The slices are staged, and the root's input is read no more.
  if (!barrier(launch, block, kSecond, turn))
    return;

  for (u32 step = 1; !root && step < ranks; ++step) {
    const u32 r = (launch.rank + step) % ranks;
    if (r != launch.root)
      copy(block, output, reinterpret_cast<const T *>(staging(launch, r, turn)), slice_of(packs, ranks, r),
           launch.count);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
