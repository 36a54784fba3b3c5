// Barriers between blocks of the same index on all ranks, and the phases of a pull that they separate.
#pragma once

#include "signal.cuh"

namespace FA_NAMESPACE {

// Revokes this rank's registered buffer: tells the peers that this launch failed after it signalled the
// second barrier, so that the caller owns the buffer again. What peers read of it from now on is not the
// input of this call.
//
// Ordering: let W be a write of the caller to the buffer, after this kernel, and R a peer's read that sees W.
// The peer has the fence of `send_signal` after R; this rank has one here, after the store and before W. If
// the peer's fence came first in the total order, R would precede W in causality order and could not see W.
// So this fence comes first, and every rank that is signalled by that peer, itself included, sees the store
// when it checks after that signal (lab/litmus/programs/pulls/revoked.litmus, revoked_slice.litmus). R may
// race with W; the data that it read is discarded.
template <class Block>
FA_FN void revoke(const FaLaunch &launch, Block &block) {
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    store_relaxed(&region_head(launch, r)->revoked[launch.rank], 1);
    fence_sc();
  });
}

// Returns the bit of a rank that has revoked its buffer; 0 if no rank has. It checks every rank's word,
// whichever peer's signal has come: that peer may have read the buffer of any rank that reached the barrier
// long before it failed.
FA_FN u32 revoked_by(const FaLaunch &launch, u32 world) {
  const u32 *words = own_head(launch)->revoked;
#if FA_CUDA
  // Loads all words without branches: only the case without a revocation must be fast, since a revocation
  // ends the communicator.
  bool any = false;
  FA_UNROLL
  for (u32 r = 0; r < FA_MAX_RANKS; r += 4)
    if (r < world)
      any |= load_relaxed_any(words + r);
  if (!any)
    return 0;
#endif
  FA_NO_UNROLL
  for (u32 r = 0; r < world; ++r)
    if (load_relaxed(words + r) != 0)
      return 1u << r;
  return 0;
}

// Returns true on all threads once every peer's block has arrived; false on all if the launch fails.
//
// Ordering: sync() orders the writes of all threads of this block before the lanes' signals (bar.sync is
// causality order at block scope, and releases are cumulative). A peer's lane that reads a signal with
// acquire sees them, and the closing sync passes that on to its other threads. meanwhile() runs between
// signalling and waiting. arrived(r, Arrival) runs on the lane that has waited for rank r, and for this rank
// itself; a failure that it returns fails the launch.
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

// Runs the phases of a pull, phase(0) to phase(2), with the start barrier and the second barrier between
// them. A phase that returns false is the last. Returns true on all threads when all is done; false on all if
// the launch fails. meanwhile() runs at the start barrier; arrived(stage, r, Arrival) as in barrier().
template <class Block, class Meanwhile, class Arrived, class Phase>
FA_FN bool run_phases(const FaLaunch &launch, Block &block, u32 world, const LaunchState &state,
                      Meanwhile meanwhile, Arrived arrived, Phase phase) {
#if FA_CUDA
  // One copy of the barrier and of code that phases share: a call begins by fetching its code.
  FA_NO_UNROLL
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
