// Reduce: the root gets the reduction of all ranks' inputs. A two-shot pull in which only the root gathers:
// the root's links carry its slice of the inputs and the other slices' results, once each.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void reduce(const FaLaunch &launch, Block &block, const Reduce &reduce, const Epilogue &epilogue = {}) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 ranks = reduce.world();
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const auto slices = partition.slices(bytes, ranks);
  FA_NO_UNROLL
  for (u32 r = 0; r < ranks; ++r) {
    if (r != launch.rank || reduce.computes_input())
      stage_reduced(launch, block, reduce, slices.of(r), state, bytes, partition);
  }
  if (!exchange_inputs(launch, block, state, reduce.computes_input()))
    return;

  const bool root = launch.rank == launch.root;
  u8 *output = root ? reinterpret_cast<u8 *>(launch.output) : staging(launch, launch.rank, state);
  reduce.inputs(launch, block, Inputs(block.scratch(), ranks), partition, slices.of(launch.rank), bytes,
                epilogue.into(Store(output)));
  // Afterwards the slices are reduced, and no input is read any more.
  if (!barrier(launch, block, kSecond, state))
    return;

  FA_NO_UNROLL
  for (u32 r = 0; root && r < ranks; ++r) {
    if (r != launch.rank)
      copy(block, output, staging(launch, r, state), slices.of(r), bytes, partition);
  }
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
