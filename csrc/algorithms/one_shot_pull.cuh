// One-shot pull: every rank reads all inputs and reduces the whole message.
//
//   staged:      input -> own staging | start barrier | read peers' staging, reduce
//   registered:  start barrier | read peers' inputs, reduce | second barrier
//
// A staged call needs no second barrier: a rank writes a generation of its staging again two pulls later. It
// gets there only after every peer has started the pull in between, and hence has finished this one.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void one_shot_pull(const FaLaunch &launch, Block &block, const Reduce &reduce,
                         const Epilogue &epilogue = {}) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const auto meanwhile = [&] { prefetch_next_staging(launch, state, bytes); };
  const auto arrived = [&](BarrierStage stage, u32 r, const Arrival &arrival) {
    return stage == kStart ? set_input(launch, block, stage, r, arrival, staging(launch, r, state),
                                       reduce.computes_input())
                           : Failure{};
  };
  const bool complete = run_phases(launch, block, reduce.world(), state, meanwhile, arrived, [&](u32 phase) {
    if (phase == 0) {
      stage_reduced(launch, block, reduce, partition.all(bytes), state, bytes, partition);
      return true;
    }
    if (phase == 2)
      return false;
    const Inputs inputs(block.scratch(), reduce.world());
    reduce.inputs(launch, block, inputs, partition, partition.all(bytes), bytes,
                  epilogue.into_rows(Store(reinterpret_cast<u8 *>(launch.output))));
    // All ranks have seen all sources, so they agree on whether there is a second barrier.
    return inputs.any_registered();
  });
  if (!complete)
    return;
  epilogue.finish(launch, block, partition, bytes, 1);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
