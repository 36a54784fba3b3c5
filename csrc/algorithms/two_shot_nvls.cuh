// Two-shot NVLS: rank r lets the switch reduce slice r from all windows, and store the result to all windows.
//
//   input -> own window | start barrier | multicast sum of own slice -> all windows | second barrier
//   | own window -> output
//
// A slice is reduced once, so all ranks get the same bits; the switch determines the order of additions.
// After the start barrier only rank r reads slice r, so the result may replace the inputs: the thread that
// stores a pack has loaded it.
#pragma once

#include "../core/multicast.cuh"

namespace FA_NAMESPACE {

template <class Sum, class Block>
FA_FN void two_shot_nvls(const FaLaunch &launch, Block &block, const Sum &sum) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<true>(launch, block, state))
    return;
  const u32 ranks = launch.world;
  const u64 bytes = message_bytes(launch);
  const PackPartition partition;
  const Slices slices = partition.slices(bytes, ranks);
  // Slice by slice, so that a block stages and gathers what the same block of a peer reduces.
  const auto copy_all = [&](u8 *to, u64 from) {
    FA_ROLL
    for (u32 r = 0; r < ranks; ++r)
      copy(block, to, reinterpret_cast<const u8 *>(from), slices.of(r), bytes);
  };
  u8 *const window = own_window(launch, state);
  copy_all(window, launch.input);
  if (!window_barrier(launch, block, kStart, state))
    return;
  sum.to_windows(launch, block, state, slices.of(launch.rank), bytes);
  if (!window_barrier(launch, block, kSecond, state))
    return;
  copy_all(reinterpret_cast<u8 *>(launch.output), u64(window));
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
