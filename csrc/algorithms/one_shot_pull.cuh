// One-shot pull: every rank reads all inputs and reduces everything.
//
//   staged:      input -> own staging | start barrier | read peers' staging, reduce
//   registered:  start barrier | read peers' inputs, reduce | second barrier
//
// A staged call needs no second barrier: a rank writes generation g of its staging again only two pulls
// later, and it gets there only after every peer has started the pull between, hence finished this one.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Reduce, class Block>
FA_FN void one_shot_pull(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const Turn turn = trading(begin_turn(launch, block, true), launch, reduce.world());
  if (!same_call<Reduce::compares>(launch, block, turn))
    return;
  const u64 bytes = message_bytes(launch);
  const Span all = {0, packs_of(bytes)};
  stage_input<typename Reduce::Packs>(launch, block, all, turn, bytes);
  if (!meet_for_inputs(launch, block, turn, 0, 0,
                       [&] { expect_next_turn(launch, reduce.world(), turn, bytes); }))
    return;

  const Inputs inputs(block.scratch(), reduce.world());
  reduce.inputs(launch, block, inputs, all, bytes, Store(reinterpret_cast<u8 *>(launch.output)));

  // All ranks saw all sources, so all agree on whether there is a second barrier.
  if (inputs.direct() && !barrier(launch, block, kSecond, turn))
    return;
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
