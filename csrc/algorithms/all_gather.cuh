// All-gather: every rank gets the concatenation of all ranks' shares. Each remote byte is read once. A GPU
// reads up to kPeersAtOnce peers together.
//
//   own input -> own staging, unless it is registered | start barrier | copy the peers' shares
//
// As in a one-shot pull, staged shares need no second barrier.
#pragma once

#include "../core/inputs.cuh"

namespace FA_NAMESPACE {

// If the call is in place, a rank's input is its own share of the output, which no other copy overwrites.
template <class Block>
FA_FN void all_gather(const FaLaunch &launch, Block &block) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call(launch, block, state))
    return;
  const u32 element = element_bytes(launch.dtype);
  const u64 bytes = message_bytes(launch);
  const Span own = all_packs(bytes);
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  u8 *kept = output + launch.shares[launch.rank].first * element;
  stage_and_copy(launch, block, own, state, bytes, kept);
  if (!exchange_inputs(launch, block, state))
    return;

  const Inputs inputs(block.scratch(), launch.world);
  copy_unstaged(launch, block, own, bytes, kept);
#if FA_CUDA
  if (launch.world == 2) {
    copy_runs<1>(block, [&](u32 k) { return run_of_share(launch, inputs, 1 + k, element); });
  } else {
    FA_NO_UNROLL
    for (u32 step = 1; step < launch.world; step += kPeersAtOnce)
      copy_runs<kPeersAtOnce>(block, [&](u32 k) { return run_of_share(launch, inputs, step + k, element); });
  }
#else
  FA_NO_UNROLL
  for (u32 step = 1; step < launch.world; ++step) {
    // Each rank begins with its right neighbour, so that the ranks do not all read one rank at once.
    const u32 r = (launch.rank + step) % launch.world;
    const u64 first = launch.shares[r].first * element, share = launch.shares[r].count * element;
    copy_out(block, output + first, inputs.at(r), all_packs(share), share);
  }
#endif

  if (inputs.any_registered() && !barrier(launch, block, kSecond, state))
    return;
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
