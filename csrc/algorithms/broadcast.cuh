// Broadcast, in two forms.
//
//   at once:    root's input -> its staging | start barrier | all ranks copy all of it
//   scattered:  root's input -> its staging | start barrier | rank r copies slice r, and stages it
//               | second barrier | all ranks copy the other slices from the ranks that own them
//
// When scattered, each link of the root carries 2/world of the message instead of all of it: the scatter and
// all-gather of van de Geijn's broadcast (Barnett et al., "Interprocessor collective communication library",
// 1994). In both forms all ranks hear from all, by the start barrier.
#pragma once

#include "../core/inputs.cuh"

namespace FA_NAMESPACE {

template <class Block>
FA_FN void broadcast(const FaLaunch &launch, Block &block) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call(launch, block, state))
    return;
  const u64 bytes = message_bytes(launch);
  const Span all = all_packs(bytes);
  const bool root = launch.rank == launch.root;
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  if (root)
    stage_and_copy(launch, block, all, state, bytes, output);
  if (!exchange_inputs(launch, block, state))
    return;

  const Inputs inputs(block.scratch(), launch.world);
  if (root)
    copy_unstaged(launch, block, all, bytes, output);
  else
    copy(block, output, inputs.at(launch.root), all, bytes);
  if (inputs.any_registered() && !barrier(launch, block, kSecond, state))
    return;
  end_launch(launch, block, state);
}

template <class Block>
FA_FN void scattered_broadcast(const FaLaunch &launch, Block &block) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call(launch, block, state))
    return;
  const u32 ranks = launch.world;
  const u64 bytes = message_bytes(launch);
  const Slices slices(packs_of(bytes), ranks);
  const bool root = launch.rank == launch.root;
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  FA_ROLL
  for (u32 r = 0; root && r < ranks; ++r)
    // Slice by slice, so that a block stages what the same block of a peer reads.
    stage_and_copy(launch, block, slices.of(r), state, bytes, output);
  if (!exchange_inputs(launch, block, state))
    return;

  if (root) {
    copy_unstaged(launch, block, all_packs(bytes), bytes, output);
  } else {
    const u8 *input = Inputs(block.scratch(), ranks).at(launch.root);
    copy_twice(block, staging(launch, launch.rank, state), output, input, slices.of(launch.rank), bytes);
    copy(block, output, input, slices.of(launch.root), bytes);
  }
  // Afterwards the slices are staged, and the root's input is not read any more.
  if (!barrier(launch, block, kSecond, state))
    return;

  FA_ROLL
  for (u32 step = 1; !root && step < ranks; ++step) {
    const u32 r = (launch.rank + step) % ranks;
    if (r != launch.root)
      copy(block, output, staging(launch, r, state), slices.of(r), bytes);
  }
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
