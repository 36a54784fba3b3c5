// One-shot NVLS: every rank has the switch reduce all windows, everything.
//
//   input -> own window | start barrier | multicast sum -> output
//
// As in a staged one-shot pull there is no second barrier. The order of additions is the switch's, and ranks
// ask it each for themselves: nothing says that they get the same bits.
#pragma once

#include "../core/multicast.cuh"

namespace FA_NAMESPACE {

template <class Sum, class Block>
FA_FN void one_shot_nvls(const FaLaunch &launch, Block &block, const Sum &sum) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<true>(launch, block, state))
    return;
  const u64 bytes = message_bytes(launch);
  const Span all = all_packs(bytes);
  copy(block, own_window(launch, state), reinterpret_cast<const u8 *>(launch.input), all, bytes);
  if (!meet_at_windows(launch, block, kStart, state))
    return;
  sum.to_output(launch, block, state, all, bytes);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
