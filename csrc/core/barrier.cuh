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

// What a signal of this launch is recognised by: on a GPU the epoch, on the host also the call.
#if FA_CUDA
using Mark = u32;
FA_FN Mark *mark_of(FaSignal *signal) { return &signal->epoch; }
FA_FN Mark mark_of(const FaLaunch &, u32 epoch) { return epoch; }
#else
using Mark = u64;
FA_FN Mark *mark_of(FaSignal *signal) { return reinterpret_cast<Mark *>(&signal->epoch); }
FA_FN Mark mark_of(const FaLaunch &launch, u32 epoch) { return u64(word_of(launch.call)) << 32 | epoch; }
#endif

// Has the peers know that this rank's launch gives up after its signal of the second barrier, and that its
// caller owns its registered buffer again: what they read of it from now on is not the input of this call.
//
// Ordering: let W be a write of the caller to the buffer, which follows this kernel; a peer's read R that
// sees W; and the fences of `signal_second` on the peer, after R, and here, after the store and before W.
// Were the peer's fence the first of the two, R would be before W in causality order and could not see it. So
// this one is the first, and whoever is signalled by that peer, itself included, sees the store when it looks
// after the barrier (tests/litmus/programs/protocol/revoked.litmus). The read may race with W; what it read
// goes to nobody.
template <class Block>
FA_FN void revoke(const FaLaunch &launch, Block &block) {
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    store_relaxed(&region_head(launch, r)->revoked[launch.rank], 1);
    fence_sc();
  });
}

// True on all threads once every peer's block has come; false on all when the launch gives up.
//
// Ordering: sync() orders the writes of all threads of this block before the lanes' release stores (bar.sync
// is causality order at block scope, release is cumulative). A peer's lane that reads the epoch with acquire
// then sees them, and the closing sync hands that on to its other threads.
// `meanwhile` is done between telling the peers and waiting for them; arrived(r) on the lane that has waited
// for rank r, and on this rank's own. If it is false, the launch gives up.
template <class Block, class Meanwhile, class Arrived>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, Turn turn, Meanwhile meanwhile,
                   Arrived arrived) {
  const Mark mark = mark_of(launch, turn.epoch);
  block.sync();
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaSignal *signal = signal_of(launch, r, stage, turn, block.index(), launch.rank);
    if (stage == kStart)
      store_relaxed(&signal->source, launch.source);
#if defined(FA_PLANT_RELAXED_SECOND_BARRIER)
    if (stage == kSecond) {
      store_relaxed(mark_of(signal), mark);
      return;
    }
#endif
    if (FA_STREAMS && stage == kSecond) {
      // A release as below, which `revoke` wants in the order of its own fence.
      fence_sc();
      store_relaxed(mark_of(signal), mark);
      return;
    }
    // Release: what this block wrote, the source above included, comes before the mark.
    store_release(mark_of(signal), mark);
  });
  meanwhile();
  const bool all = block.all_lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return arrived(r);
    FaSignal *signal = signal_of(launch, launch.rank, stage, turn, block.index(), r);
    // Equality is enough: a peer writes this word again two pulls later, and gets there only after this rank
    // has been through the pull between. Ranks compare here, before anything of a peer is accessed by a count
    // that it may not share.
    if (!wait_for(launch, r, turn.epoch, mark, [&] { return load_acquire(mark_of(signal)); }))
      return false;
    if (FA_STREAMS && stage == kSecond && load_relaxed(&region_head(launch, launch.rank)->revoked[r]) != 0) {
      record_failure(launch, FA_REVOKED, 1u << r, turn.epoch);
      return false;
    }
    return arrived(r);
  });
#if !defined(FA_PLANT_NO_REVOCATION)
  if (FA_STREAMS && stage == kSecond && !all && launch.source != 0)
    revoke(launch, block);
#endif
  return all;
}

template <class Block>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, Turn turn) {
  return barrier(
      launch, block, stage, turn, [] {}, [](u32) { return true; });
}

} // namespace FA_NAMESPACE
