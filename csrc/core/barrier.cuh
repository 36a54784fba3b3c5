// All ranks' equal blocks meet.
#pragma once

#include "signal.cuh"

namespace FA_NAMESPACE {

// Has the peers know that this rank's launch gives up after its signal of the second barrier, and that its
// caller owns its registered buffer again: what they read of it from now on is not the input of this call.
//
// Ordering: let W be a write of the caller to the buffer, which follows this kernel; a peer's read R that
// sees W; and the fences of `send_signal` on the peer, after R, and here, after the store and before W.
// Were the peer's fence the first of the two, R would be before W in causality order and could not see it. So
// this one is the first, and whoever is signalled by that peer, itself included, sees the store when it looks
// after that signal (lab/litmus/programs/protocol/revoked.litmus, revoked_slice.litmus). The read may race
// with W; what it read goes to nobody.
template <class Block>
FA_FN void revoke(const FaLaunch &launch, Block &block) {
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    store_relaxed(&region_head(launch, r)->revoked[launch.rank], 1);
    fence_sc();
  });
}

// A rank that has revoked what it named to this one, as a bit; 0: none has. Whoever has a peer's signal looks
// at all: what that peer read may have been any rank's, which had come to the barrier long before it gave up.
FA_FN u32 revoked_by(const FaLaunch &launch, u32 world) {
  const u32 *words = region_head(launch, launch.rank)->revoked;
#if FA_CUDA
  // At once: that there is one is the end of a communicator.
  bool any = false;
  FA_UNROLL
  for (u32 r = 0; r < FA_MAX_RANKS; r += 4)
    if (r < world)
      any |= load_relaxed_any(words + r);
  if (!any)
    return 0;
#endif
  FA_ROLL
  for (u32 r = 0; r < world; ++r)
    if (load_relaxed(words + r) != 0)
      return 1u << r;
  return 0;
}

// True on all threads once every peer's block has come; false on all when the launch gives up.
//
// Ordering: sync() orders the writes of all threads of this block before the lanes' signals (bar.sync is
// causality order at block scope, releases are cumulative). A peer's lane that reads a signal with acquire
// then sees them, and the closing sync hands that on to its other threads. `meanwhile` is done between
// telling the peers and waiting for them; arrived(r, Arrival) on the lane that has waited for rank r, and on
// this rank's own. The launch gives up for a failure that it returns.
template <class Block, class Meanwhile, class Arrived>
FA_FN bool barrier(const FaLaunch &launch, Block &block, u32 world, BarrierStage stage,
                   const LaunchState &state, Meanwhile meanwhile, Arrived arrived) {
  block.sync();
  block.lanes(world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaSignal *signal = signal_of(launch, r, stage, state, block.index(), launch.rank);
    send_signal(launch, signal, stage, state.epoch);
  });
  FA_STAMP(kSignalled + stage);
  meanwhile();
  const bool all = block.all_lanes(world, [&](u32 r) {
    Failure failure;
    Arrival arrival;
    if (r != launch.rank)
      failure = wait_for_signal(launch, r, state.epoch,
                                signal_of(launch, launch.rank, stage, state, block.index(), r), &arrival);
    if (failure.none()) {
#if defined(FA_PLANT_ONE_LOOK)
      const u32 revoked = revoked_by(launch, world) & 1u << r;
#else
      const u32 revoked = FA_STREAMS && stage == kSecond ? revoked_by(launch, world) : 0;
#endif
      failure = revoked != 0 ? Failure(FA_REVOKED, revoked) : arrived(r, arrival);
    }
    return succeeded(launch, failure, state.epoch);
  });
  FA_STAMP(kMet + stage);
#if !defined(FA_PLANT_NO_REVOCATION)
  if (FA_STREAMS && stage == kSecond && !all && launch.source != 0)
    revoke(launch, block);
#endif
  return all;
}

// The phases of a pull, phase(0) to phase(2), with the start barrier and the second one between them. A phase
// that is false is the last. True on all threads once all that is done; false on all when the launch gives
// up. `meanwhile` is for the start barrier, arrived(stage, r, Arrival) as above.
template <class Block, class Meanwhile, class Arrived, class Phase>
FA_FN bool run_phases(const FaLaunch &launch, Block &block, u32 world, const LaunchState &state,
                      Meanwhile meanwhile, Arrived arrived, Phase phase) {
#if FA_CUDA
  // One body of a barrier, and of what phases have in common: a call begins by fetching its code.
  FA_ROLL
  for (u32 number = 0;; ++number) {
    const bool more = phase(number);
    FA_STAMP(kPhase + number);
    if (!more)
      return true;
    const BarrierStage stage = BarrierStage(number);
    if (!barrier(launch, block, world, stage, state, meanwhile,
                 [&](u32 r, const Arrival &arrival) { return arrived(stage, r, arrival); }))
      return false;
  }
#else
  if (!phase(0))
    return true;
  if (!barrier(launch, block, world, kStart, state, meanwhile,
               [&](u32 r, const Arrival &arrival) { return arrived(kStart, r, arrival); }))
    return false;
  if (!phase(1))
    return true;
  if (!barrier(
          launch, block, world, kSecond, state, [] {},
          [&](u32 r, const Arrival &arrival) { return arrived(kSecond, r, arrival); }))
    return false;
  phase(2);
  return true;
#endif
}

template <class Block>
FA_FN bool barrier(const FaLaunch &launch, Block &block, BarrierStage stage, const LaunchState &state) {
  return barrier(
      launch, block, launch.world, stage, state, [] {}, [](u32, const Arrival &) { return Failure{}; });
}

} // namespace FA_NAMESPACE
