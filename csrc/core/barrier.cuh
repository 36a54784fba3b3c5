// All ranks' equal blocks meet.
#pragma once

#include "check.cuh"

namespace FA_NAMESPACE {

enum BarrierStage : u32 {
  kStart = 0,  // inputs are ready to be read
  kSecond = 1, // two-shot: slices are reduced; one-shot: inputs are no longer read
};

FA_FN FaSignal *signal_of(const FaLaunch &launch, u32 owner, BarrierStage stage, const LaunchState &state,
                          u32 block, u32 sender) {
  // In 32 bits: a GPU has no wider multiplication.
  const u32 at = ((stage * 2 + state.pulls % 2) * FA_MAX_BLOCKS + block) * FA_MAX_RANKS + sender;
  return reinterpret_cast<FaSignal *>(launch.regions[owner] + offsetof(FaRegionHead, inbox) +
                                      at * sizeof(FaSignal));
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
// for rank r, and on this rank's own. The launch gives up for a failure that it returns.
template <class Block, class Meanwhile, class Arrived>
FA_FN bool barrier(const FaLaunch &launch, Block &block, u32 world, BarrierStage stage,
                   const LaunchState &state, Meanwhile meanwhile, Arrived arrived) {
  const Mark mark = mark_of(launch, state.epoch);
  block.sync();
  block.lanes(world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaSignal *signal = signal_of(launch, r, stage, state, block.index(), launch.rank);
    store_relaxed(&signal->source, launch.source);
#if defined(FA_PLANT_RELAXED_SECOND_BARRIER)
    if (stage == kSecond) {
      store_relaxed(mark_of(signal), mark);
      return;
    }
#endif
    // Release: what this block wrote, the source above included, comes before the mark. Where launches run in
    // streams `revoke` wants it in the order of its own fence.
#if FA_CUDA
    if (stage == kSecond)
      fence_sc();
    else
      fence_release();
    store_relaxed(mark_of(signal), mark);
#else
    if (FA_STREAMS && stage == kSecond)
      fence_sc();
    store_release(mark_of(signal), mark);
#endif
  });
  meanwhile();
  const bool all = block.all_lanes(world, [&](u32 r) {
    // Equality is enough: a peer writes this word again two pulls later, and gets there only after this rank
    // has been through the pull between. Ranks compare here, before anything of a peer is accessed by a count
    // that it may not share.
    const Mark *signal = mark_of(signal_of(launch, launch.rank, stage, state, block.index(), r));
    Failure failure;
    if (r != launch.rank)
      failure = wait_for(launch, r, state.epoch, signal, mark);
    if (failure.none()) {
      const u32 *revoked = &region_head(launch, launch.rank)->revoked[r];
      if (FA_STREAMS && stage == kSecond && load_relaxed(revoked) != 0)
        failure = {FA_REVOKED, 1u << r};
      else
        failure = arrived(r);
    }
    return succeeded(launch, failure, state.epoch);
  });
#if !defined(FA_PLANT_NO_REVOCATION)
  if (FA_STREAMS && stage == kSecond && !all && launch.source != 0)
    revoke(launch, block);
#endif
  return all;
}

// The phases of a pull, phase(0) to phase(2), with the start barrier and the second one between them. A phase
// that is false is the last. True on all threads once all that is done; false on all when the launch gives
// up. `meanwhile` is for the start barrier, arrived(stage, r) as above.
template <class Block, class Meanwhile, class Arrived, class Phase>
FA_FN bool run_phases(const FaLaunch &launch, Block &block, u32 world, const LaunchState &state,
                      Meanwhile meanwhile, Arrived arrived, Phase phase) {
#if FA_CUDA
  // One body of a barrier, and of what phases have in common: a call begins by fetching its code.
  FA_ROLL
  for (u32 number = 0;; ++number) {
    if (!phase(number))
      return true;
    const BarrierStage stage = BarrierStage(number);
    if (!barrier(launch, block, world, stage, state, meanwhile, [&](u32 r) { return arrived(stage, r); }))
      return false;
  }
#else
  if (!phase(0))
    return true;
  if (!barrier(launch, block, world, kStart, state, meanwhile, [&](u32 r) { return arrived(kStart, r); }))
    return false;
  if (!phase(1))
    return true;
  if (!barrier(
          launch, block, world, kSecond, state, [] {}, [&](u32 r) { return arrived(kSecond, r); }))
    return false;
  phase(2);
  return true;
#endif
}

template <class Block>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, const LaunchState &state) {
  return barrier(
      launch, block, launch.world, stage, state, [] {}, [](u32) { return Failure{}; });
}

} // namespace FA_NAMESPACE
