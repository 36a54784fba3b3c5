// All ranks' equal blocks meet.
#pragma once

#include "check.cuh"

namespace FA_NAMESPACE {

enum BarrierStage : u32 {
  kStart = 0,  // inputs are ready to be read
  kSecond = 1, // two-shot: slices are reduced; one-shot: inputs are no longer read
};

FA_FN FaSignal *signal_of(const FaLaunch &launch, u32 owner, BarrierStage stage, Turn turn, u32 block,
                          u32 sender) {
  return &region_head(launch, owner)->inbox[stage][turn.pulls % 2][block][sender];
}

// True on all threads once every peer's block has come; false on all when the launch gives up.
//
// Ordering: sync() orders the writes of all threads of this block before the lanes' release stores (bar.sync
// is causality order at block scope, release is cumulative). A peer's lane that reads the epoch with acquire
// then sees them, and the closing sync hands that on to its other threads.
// `meanwhile` is done between telling the peers and waiting for them.
template <class Block, class Meanwhile>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, Turn turn, Meanwhile meanwhile) {
  block.sync();
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaSignal *signal = signal_of(launch, r, stage, turn, block.index(), launch.rank);
    if (stage == kStart)
      store_relaxed(&signal->source, launch.source);
#if defined(FA_PLANT_RELAXED_SECOND_BARRIER)
    if (stage == kSecond) {
      store_relaxed(&signal->epoch, turn.epoch);
      return;
    }
#endif
    // Release: what this block wrote, the source above included, comes before the epoch.
    store_release(&signal->epoch, turn.epoch);
  });
  meanwhile();
  return block.all_lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return true;
    FaSignal *signal = signal_of(launch, launch.rank, stage, turn, block.index(), r);
    // Equality is enough: a peer writes this word again two pulls later, and gets there only after this rank
    // has been through the pull between.
    if (!wait_until(launch, r, turn.epoch, [&] { return load_acquire(&signal->epoch) == turn.epoch; })) {
      return false;
    }
    // The source likewise.
    if (stage == kStart)
      block.scratch()[r] = load_relaxed(&signal->source);
    return true;
  });
}

template <class Block>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, Turn turn) {
  return barrier(launch, block, stage, turn, [] {});
}

} // namespace FA_NAMESPACE
