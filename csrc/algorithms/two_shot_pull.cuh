// Two-shot pull: rank r reduces slice r into its staging, then everybody gathers all slices.
//
//   (input -> own staging) | start barrier | reduce own slice -> staging | second barrier | gather
//
// After the second barrier nobody reads an input again, so that in place is legal and no third barrier is
// needed. Own slice of own staging is read by nobody before it is reduced: the result may overwrite it.
//
// Between two ranks of the host a slice is reduced where it was staged, in the other rank's staging, which
// nobody but its reducer reads before the second barrier. So a cache line goes over and comes back, and its
// next writer has it.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

// The rank in whose staging slice r lies reduced.
FA_FN u32 keeper_of(u32 world, u32 r) { return trades_lines(world) ? 1 - r : r; }

template <class Reduce, class Block>
FA_FN void two_shot_pull(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const Turn turn = walking(begin_turn(launch, block, true), launch);
  if (!same_call<Reduce::compares>(launch, block, turn))
    return;
  const u32 ranks = reduce.world();
  const u64 bytes = message_bytes(launch), packs = packs_of(bytes);
  FA_ROLL
  for (u32 r = 0; r < ranks; ++r) {
    // Slice by slice, so that a block stages what the same block of a peer reads.
    if (r != launch.rank)
      stage_input<typename Reduce::Packs>(launch, block, slice_of(packs, ranks, r), turn, bytes);
  }
  if (!meet_for_inputs(launch, block, turn))
    return;

  u8 *output = reinterpret_cast<u8 *>(launch.output);
  u8 *reduced = staging(launch, keeper_of(ranks, launch.rank), turn);
  reduce.inputs(launch, block, Inputs(block.scratch(), ranks), slice_of(packs, ranks, launch.rank), bytes,
                Store(reduced, output));
  if (!barrier(launch, block, kSecond, turn))
    return;

  FA_ROLL
  for (u32 step = 1; step < ranks; ++step) {
    // Each rank begins with its right neighbour, so that no rank is read by all at once.
    const u32 r = (launch.rank + step) % ranks;
    copy<typename Reduce::Packs>(block, output, staging(launch, keeper_of(ranks, r), turn),
                                 slice_of(packs, ranks, r), bytes);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
