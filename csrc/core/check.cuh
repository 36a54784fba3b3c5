// Call comparison: before a rank accesses a peer's memory, the ranks compare their calls. On the host every
// launch does it, by a hash in its signals or packets. On a GPU checked launches do it, by a separate
// exchange of announcements; on the host announcements also catch calls that have no signal in common.
#pragma once

#include "wait.cuh"

namespace FA_NAMESPACE {

FA_FN bool is_same(const FaCall &a, const FaCall &b) {
  return a.what == b.what && a.count == b.count && a.digest == b.digest;
}

// Hashes a call to a word. Calls that differ only in `what`, or only in a count below 2^32, have different
// words, since multiplication by an odd number is a bijection. If they differ in several fields, the words
// collide with probability 2^-32. A digest may hold several numbers side by side, whose differences must not
// cancel: the upper half of the product depends on all of its bits. (Counts by rank of fused calls are
// compared by a digest of 24 bits.)
FA_FN u32 word_of(const FaCall &call) {
  // 2^32 and 2^64 divided by the golden ratio.
  return u32(call.what) ^ u32(call.count ^ call.count >> 32) * 0x9E3779B9u ^
         u32(call.digest * 0x9E3779B97F4A7C15u >> 32);
}

FA_FN FaCall load_relaxed(const FaCall *call) {
  return {load_relaxed(&call->what), load_relaxed(&call->count), load_relaxed(&call->digest)};
}

FA_FN void store_relaxed(FaCall *to, const FaCall &call) {
  store_relaxed(&to->what, call.what);
  store_relaxed(&to->count, call.count);
  store_relaxed(&to->digest, call.digest);
}

// Records in the status the call of rank r, which differs from this rank's (zeros if it is not known), and
// returns the failure.
FA_FN Failure mismatch(const FaLaunch &launch, u32 r, const FaCall &theirs) {
  store_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->others[r], theirs);
  return {FA_MISMATCH, 1u << r};
}

// Polls until the flag is `mark`, or until a limit is reached. `rank` is the rank waited for. A 64-bit mark
// has the call above the epoch: with this epoch, a different mark means a different call.
//
// If the mark is the expected one, a single comparison checks both. Another branch on the signal's cache line
// costs 13 ns per call on an AMD EPYC.
template <bool Leaf = false, class Mark>
FA_FN Failure wait_for(const FaLaunch &launch, u32 rank, u32 epoch, const Mark *flag, Mark mark) {
  if constexpr (sizeof(Mark) == sizeof(epoch)) {
    return wait_until<Leaf>(launch, rank, [&] { return load_acquire(flag) == mark; });
  } else {
    Mark seen;
    const auto read = [&] { return (seen = load_acquire(flag)) == mark || u32(seen) == epoch; };
    const Failure failure = wait_until<Leaf>(launch, rank, read);
    // The mark does not say which call the peer makes.
    return failure.none() && seen != mark ? mismatch(launch, rank, FaCall{}) : failure;
  }
}

// Returns, on all threads, whether every peer makes the same call; false if one does not, or if the launch
// fails.
//
// Every block compares for itself, so that no block accesses memory by a count that its peers do not share.
// If ranks have different numbers of blocks, those without a counterpart leave when block 0, which every
// launch has, records the mismatch. An announcement is written again two launches later. A rank gets there
// only after every peer has announced the launch in between, and hence has read this one.
template <class Block>
FA_OUTLINED bool peers_make_same_call(const FaLaunch &launch, Block &block, u32 epoch) {
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaAnnouncement *announced = &region_head(launch, r)->announced[epoch % 2][block.index()][launch.rank];
    store_relaxed(&announced->call, launch.call);
    // Release: the call comes before the epoch.
    store_release(&announced->epoch, epoch);
  });
  return block.all_lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return true;
    const FaAnnouncement *announced = &own_head(launch)->announced[epoch % 2][block.index()][r];
    Failure failure = wait_for<true>(launch, r, epoch, &announced->epoch, epoch);
    if (failure.none()) {
      const FaCall theirs = load_relaxed(&announced->call);
      if (!is_same(theirs, launch.call))
        failure = mismatch(launch, r, theirs);
    }
    return succeeded<true>(launch, failure, epoch);
  });
}

// Whether an earlier launch of this rank has failed, where launches run in streams.
FA_FN u32 load_failed(const FaLaunch &launch) {
  return FA_STREAMS ? load_relaxed(&own_head(launch)->failed) : 0;
}

// Returns whether this launch may go on: no earlier launch has failed, and, if it is checked, all peers make
// the same call. Without `Compares` no launch is checked.
// `failed`: what this thread has read by load_failed().
template <bool Compares = true, class Block>
FA_FN bool same_call(const FaLaunch &launch, Block &block, const LaunchState &state, u32 failed) {
  // Another block of this launch may set the word at this moment. The threads agree on one value, because
  // none may leave while others wait for it at a sync.
  if (FA_STREAMS && !block.all(failed == 0))
    return false;
  if (!Compares || !launch.checked)
    return true;
  return peers_make_same_call(launch, block, state.epoch);
}

template <bool Compares = true, class Block>
FA_FN bool same_call(const FaLaunch &launch, Block &block, const LaunchState &state) {
  return same_call<Compares>(launch, block, state, load_failed(launch));
}

// As same_call(), for the threads of a push, which need not agree in a kernel that does not compare: the sync
// would delay what they send. A thread that gets false then takes part in its block's syncs, but neither
// sends nor receives. If an earlier launch has failed, all threads get false, so nothing is sent that it left
// in memory. If another block of this launch fails at this moment, threads may differ; those that wait end by
// the failure or at the limit.
template <bool Compares, class Block>
FA_FN bool may_exchange(const FaLaunch &launch, Block &block, const LaunchState &state) {
  if (FA_CUDA && !Compares)
    return load_relaxed(&own_head(launch)->failed) == 0;
  return same_call<Compares>(launch, block, state);
}

} // namespace FA_NAMESPACE
