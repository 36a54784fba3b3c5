// All-gather: every rank has all ranks' shares, one after the other. Each remote byte is read once.
//
//   own input -> own staging, unless it is registered | start barrier | copy the peers' shares
//
// As in a one-shot pull, staged shares need no second barrier.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

// In place, a rank's input is its own share of the output: nobody else's copy touches it.
template <class T, class Block>
FA_FN void all_gather(const FaLaunch &launch, Block &block) {
  const Turn turn = trading(begin_turn(launch, block, true), launch, launch.world);
  if (!same_call(launch, block, turn))
    return;
  const AnyWorld world = {launch.world};
  const Span own = {0, packs_of<T>(launch.count)};
  T *output = reinterpret_cast<T *>(launch.output);
  stage_and_keep(launch, block, own, turn, output + launch.shares[launch.rank].first);
  if (!barrier(launch, block, kStart, turn))
    return;

  const Inputs<T, AnyWorld> inputs = resolve_inputs<T>(launch, block, world, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  keep_unstaged(launch, block, own, output + launch.shares[launch.rank].first);
  for (u32 step = 1; step < launch.world; ++step) {
    // Each rank begins with its right neighbour's, so that no rank is read by all at once.
    const u32 r = (launch.rank + step) % launch.world;
    const FaShare share = launch.shares[r];
    copy(block, output + share.first, inputs.at[r], {0, packs_of<T>(share.count)}, share.count);
  }

  if (inputs.direct && !barrier(launch, block, kSecond, turn))
    return;
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
