// Two-shot pull: rank r reduces slice r into its staging, then every rank gathers all slices.
//
//   (input -> own staging) | start barrier | reduce own slice -> staging | second barrier | gather
//
// After the second barrier no rank reads an input again, so the output may be in place, and no third barrier
// is needed. No other rank reads a rank's own slice of its own staging before it is reduced, so the result
// may overwrite it.
//
// Between two ranks on the host, a slice is reduced where it was staged, in the other rank's staging, which
// only its reducer reads before the second barrier. So a cache line moves to the reducer and back, and its
// next writer has it.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"
#include "two_level_pull.cuh"
#if !FA_CUDA
#include "../sinks/streaming.hpp"
#endif

namespace FA_NAMESPACE {

// Returns the rank whose staging holds slice r after the reduction.
FA_FN u32 holder_of(u32 world, u32 r) { return !FA_CUDA && world == 2 ? 1 - r : r; }

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void two_shot_pull(const FaLaunch &launch, Block &block, const Reduce &reduce,
                         const Epilogue &epilogue = {}) {
#if !FA_CUDA
  if constexpr (kIsPlain<Epilogue>)
    if (__builtin_expect(launch.socket_ranks != 0, false))
      return two_level_pull(launch, block, reduce);
#endif
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 rank = launch.rank, ranks = reduce.world();
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const auto slices = partition.slices(bytes, ranks);
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  u64 *addresses = block.scratch();
  const auto arrived = [&](BarrierStage stage, u32 r, const Arrival &arrival) -> Failure {
    const u32 keeper = stage == kStart ? r : holder_of(ranks, r);
    return set_input(launch, block, stage, r, arrival, staging(launch, keeper, state),
                     reduce.computes_input());
  };
  const bool complete = run_phases(
      launch, block, reduce.world(), state, [] {}, arrived,
      [&](u32 phase) {
#if !FA_CUDA
        if constexpr (kIsPlain<Epilogue>) {
          if (__builtin_expect(launch.streams_output != 0, false) && phase == 1) {
            const StreamedStore store(staging(launch, holder_of(ranks, rank), state), output);
            reduce.inputs(launch, block, Inputs(addresses, ranks), partition, slices.of(rank), bytes, store);
            fence_streams();
            return true;
          }
        }
#endif
        if (phase == 1) {
          const Store store(staging(launch, holder_of(ranks, rank), state), FA_CUDA ? nullptr : output);
          reduce.inputs(launch, block, Inputs(addresses, ranks), partition, slices.of(rank), bytes,
                        epilogue.into_rows(store));
        } else if (phase == 0 && reduce.computes_input()) {
          // The own slice as well: it is read from staging.
          FA_NO_UNROLL
          for (u32 r = 0; r < ranks; ++r)
            stage_reduced(launch, block, reduce, slices.of(r), state, bytes, partition);
        } else if (phase == 2 || launch.source == 0) {
          u8 *to = output;
          if (phase == 0) {
            to = staging(launch, rank, state);
            block.lanes(ranks, [&](u32 r) { addresses[r] = launch.input; });
            block.sync();
          }
          // Slice by slice, so that a block stages what the same block of a peer reads. On a GPU, one copy of
          // the code stages and gathers.
          if (!FA_CUDA && phase == 0)
            copy_slices(partition, block, to, addresses, slices, rank, ranks, bytes, Target::kStaging);
          else
            epilogue.gather(launch, block, partition, to, addresses, slices, ranks, bytes);
        }
        return phase < 2;
      });
  if (!complete)
    return;
  epilogue.finish(launch, block, partition, bytes, ranks);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
