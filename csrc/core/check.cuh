// Comparing calls: before they touch anything of a peer, ranks compare what they are about to do. On the host
// every launch does, by a word that comes with its signals or packets. On a GPU checked launches do, by
// an exchange of announcements of their own; on the host that tells calls apart which have no signal in
// common.
#pragma once

#include "wait.cuh"

namespace FA_NAMESPACE {

FA_FN bool is_same(const FaCall &a, const FaCall &b) {
  return a.what == b.what && a.count == b.count && a.digest == b.digest;
}

// A call in a word. Of calls that differ only in what they are, or only in a count below 2^32, the words
// differ, since to multiply by an odd number is a bijection; of calls that differ in more, but for one of
// 2^32. A digest may have numbers side by side, of which two that differ must not cancel out: the upper half
// of a product depends on all of its bits.
FA_FN u32 word_of(const FaCall &call) {
  // The fraction of the golden ratio.
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

// That rank r makes another call, for which its place in the status says which; an empty one where it is not
// known.
FA_FN Failure mismatch(const FaLaunch &launch, u32 r, const FaCall &theirs) {
  store_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->others[r], theirs);
  return {FA_MISMATCH, 1u << r};
}

// Polls until a flag is `mark`, or the limits of the launch. `rank` is whom it waits for. The upper half of a
// mark of 64 bits is the call, the lower the epoch: of this epoch, another mark is another call.
//
// One comparison for both, where the mark is as it should be: another branch on what the line of a signal
// holds takes 13 ns of a call on an AMD EPYC.
template <bool Here = false, class Mark>
FA_FN Failure wait_for(const FaLaunch &launch, u32 rank, u32 epoch, const Mark *flag, Mark mark) {
  if constexpr (sizeof(Mark) == sizeof(epoch)) {
    return wait_until<Here>(launch, rank, [&] { return load_acquire(flag) == mark; });
  } else {
    Mark seen;
    const auto read = [&] { return (seen = load_acquire(flag)) == mark || u32(seen) == epoch; };
    const Failure failure = wait_until<Here>(launch, rank, read);
    // Which call it makes the mark does not say.
    return failure.none() && seen != mark ? mismatch(launch, rank, FaCall{}) : failure;
  }
}

// True on all threads if every peer makes the same call; false on all when a peer's is another, or the launch
// gives up.
//
// Every block compares for itself, so that no block of a rank accesses memory by a count that its peers do
// not share. Where ranks have different numbers of blocks, those without counterparts leave when block 0,
// which every launch has, records the mismatch. A word of an announcement is written again two launches
// later, and a rank gets there only after every peer has announced the launch between, hence read this one.
template <class Block>
FA_CALL bool peers_make_same_call(const FaLaunch &launch, Block &block, u32 epoch) {
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
    const FaAnnouncement *announced =
        &region_head(launch, launch.rank)->announced[epoch % 2][block.index()][r];
    Failure failure = wait_for<true>(launch, r, epoch, &announced->epoch, epoch);
    if (failure.none()) {
      const FaCall theirs = load_relaxed(&announced->call);
      if (!is_same(theirs, launch.call))
        failure = mismatch(launch, r, theirs);
    }
    return succeeded<true>(launch, failure, epoch);
  });
}

// The same, or this launch is not checked; false as well when one before it has given up.
//
// Without `Compares` no launch is checked.
template <bool Compares = true, class Block>
FA_FN bool same_call(const FaLaunch &launch, Block &block, const LaunchState &state) {
  // Another block of this launch may set the word now. So threads agree on what they read: none may leave
  // while others wait for it at a sync.
  if (FA_STREAMS && !block.all(load_relaxed(&region_head(launch, launch.rank)->failed) == 0))
    return false;
  if (!Compares || !launch.checked)
    return true;
  return peers_make_same_call(launch, block, state.epoch);
}

} // namespace FA_NAMESPACE
