// One-shot pull: every rank reads all inputs and reduces everything.
//
//   staged:      input -> own staging | start barrier | read peers' staging, reduce
//   registered:  start barrier | read peers' inputs, reduce | second barrier
//
// A staged call needs no second barrier: a rank writes generation g of its staging again only two pulls
// later, and it gets there only after every peer has started the pull between, hence finished this one.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

template <class T, class Block, class Op, class WorldT>
FA_FN void one_shot_pull(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = trading(begin_turn(launch, block, true), launch, world.size());
  if (!same_call(launch, block, turn))
    return;
  const Span all = {0, packs_of<T>(launch.count)};
  stage_input<T>(launch, block, all, turn);
  if (!barrier(launch, block, kStart, turn,
               [&] { expect_next_turn(launch, world.size(), turn, launch.count * sizeof(T)); }))
    return;

  const Inputs<T, WorldT> inputs = resolve_inputs<T>(launch, block, world, turn);
  if (!inputs.mapped)
    return record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
  T *output = reinterpret_cast<T *>(launch.output);
  for_each_pack<T>(block, all, launch.count, inputs.vector && pack_aligned(output),
                   [&](u64 offset, u64, auto extent) {
                     store(output + offset, reduce_inputs(inputs, op, world, offset, extent), extent);
                   });

  // All ranks saw all sources, so all agree on whether there is a second barrier.
  if (inputs.direct && !barrier(launch, block, kSecond, turn))
    return;
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
