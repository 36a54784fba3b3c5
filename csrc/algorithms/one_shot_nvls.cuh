// One-shot NVLS: every rank lets the switch reduce the whole message from all windows.
//
//   input -> own window | start barrier | multicast sum -> output
//
// As in a staged one-shot pull there is no second barrier. The switch determines the order of additions, and
// each rank issues its own reduction, so the ranks may get different bits.
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
  if (!window_barrier(launch, block, kStart, state))
    return;
  sum.to_output(launch, block, state, all, bytes);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
