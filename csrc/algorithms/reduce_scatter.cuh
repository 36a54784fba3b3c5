// Reduce-scatter: rank r gets share r of the reduction. This is the first half of a two-shot pull, with the
// same bits. Each remote byte is read once.
//
//   the peers' shares of own input -> own staging, unless it is registered | start barrier | reduce own share
//
// As in a one-shot pull, staged shares need no second barrier.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

// Returns the distance in bytes between staged shares: the size of the largest one, in whole packs.
FA_FN u64 staged_share(const FaLaunch &launch, u32 element) {
  u64 most = 0;
  FA_NO_UNROLL
  for (u32 r = 0; r < launch.world; ++r)
    most = launch.shares[r].count > most ? launch.shares[r].count : most;
  return packs_of(most * element) * kPackBytes;
}

// If the call is in place, a rank's output is its own share of its input, which no other rank reads.
template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void reduce_scatter(const FaLaunch &launch, Block &block, const Reduce &reduce,
                          const Epilogue &epilogue = {}) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 element = element_bytes(launch.dtype);
  const u64 distance = staged_share(launch, element);
  const auto partition = epilogue.partition(launch, reduce);
  if (launch.source == 0) {
    const u8 *input = reinterpret_cast<const u8 *>(launch.input);
    u8 *staged = staging(launch, launch.rank, state);
    FA_NO_UNROLL
    for (u32 r = 0; r < launch.world; ++r) {
      const u64 first = launch.shares[r].first * element, bytes = launch.shares[r].count * element;
      if (r != launch.rank || reduce.computes_input())
        reduce.stage(block, staged + r * distance, input + first, partition.all(bytes), bytes, partition);
    }
  }
  const FaShare own = launch.shares[launch.rank];
  if (!exchange_inputs(launch, block, state, reduce.computes_input(), launch.rank * distance,
                       own.first * element))
    return;

  const Inputs inputs(block.scratch(), reduce.world());
  const u64 bytes = own.count * element;
  // On a GPU, the packs of four ranks are loaded together, except of integers.
  reduce.template inputs<4>(launch, block, inputs, partition, partition.all(bytes), bytes,
                            epilogue.into_rows(Store(reinterpret_cast<u8 *>(launch.output))));
  if (inputs.any_registered() && !barrier(launch, block, kSecond, state))
    return;
  epilogue.finish(launch, block, partition, bytes, 1);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
