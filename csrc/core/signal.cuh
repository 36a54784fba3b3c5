// Signals of a barrier: each says that a peer's block has arrived, and where that peer's input is.
#pragma once

#include "check.cuh"

namespace FA_NAMESPACE {

enum BarrierStage : u32 {
  kStart = 0,  // inputs are ready to be read
  kSecond = 1, // two-shot: slices are reduced; one-shot: inputs are no longer read
};

FA_FN FaSignal *signal_of(const FaLaunch &launch, u32 owner, BarrierStage stage, const LaunchState &state,
                          u32 block, u32 sender) {
  // In 32 bits: a GPU has no wider integer multiplication.
  const u32 at = ((stage * 2 + state.pulls % 2) * FA_MAX_BLOCKS + block) * FA_MAX_RANKS + sender;
  return reinterpret_cast<FaSignal *>(launch.regions[owner] + offsetof(FaRegionHead, inbox) +
                                      at * sizeof(FaSignal));
}

// Comparing for equality is enough: a peer writes a signal again two pulls later, and gets there only after
// this rank has finished the pull in between.

#if FA_CUDA

// Content of a peer's signal: two words that both carry the epoch, as in a packet. So the source needs no
// ordering of its own; sending the epoch after it would cost another round trip to the peer.
struct Arrival {
  u64 low, high;

  FA_FN u64 source() const { return high << 32 | u32(low); }
};

// Release: everything that this block did comes before the signal. At the second barrier, `revoke` relies on
// the total order of the fence. At the start barrier, the fence is needed for data staged in this launch.
// Inputs that peers read in registered buffers were written by earlier kernels of the stream. That those are
// complete system-wide is an axiom (lab/litmus/programs/pulls/registered_start.litmus), on which every
// launch relies: staging is written again because the kernels that read it have ended.
FA_FN void send_signal(const FaLaunch &launch, FaSignal *signal, BarrierStage stage, u32 epoch) {
  if (stage == kSecond)
    fence_sc();
  else if (launch.source == 0)
    fence_release();
  const u64 mark = u64(epoch) << 32;
  store_relaxed_pair(reinterpret_cast<u64 *>(signal), mark | u32(launch.source), mark | launch.source >> 32);
}

FA_FN Failure wait_for_signal(const FaLaunch &launch, u32 rank, u32 epoch, const FaSignal *signal,
                              Arrival *arrival) {
  return wait_until(launch, rank, [&] {
    load_acquire_pair(reinterpret_cast<const u64 *>(signal), &arrival->low, &arrival->high);
    return ((u32(arrival->low >> 32) ^ epoch) | (u32(arrival->high >> 32) ^ epoch)) == 0;
  });
}

#else

// Content of a peer's signal.
struct Arrival {
  const FaSignal *signal = nullptr;

  FA_FN u64 source() const { return load_relaxed(&signal->source); }
};

// A signal is recognised by the epoch and the call, in one word. So ranks compare calls here, before a peer's
// memory is accessed by a count that it may not share.
FA_FN u64 mark_of(const FaLaunch &launch, u32 epoch) { return u64(word_of(launch.call)) << 32 | epoch; }

// Release: everything that this block did, the source included, comes before the mark.
FA_FN void send_signal(const FaLaunch &launch, FaSignal *signal, BarrierStage stage, u32 epoch) {
  u64 *word = reinterpret_cast<u64 *>(&signal->epoch);
  const u64 mark = mark_of(launch, epoch);
  store_relaxed(&signal->source, launch.source);
#if defined(FA_PLANT_RELAXED_SECOND_BARRIER)
  if (stage == kSecond)
    return store_relaxed(word, mark);
#endif
  // As on GPUs: `revoke` relies on the total order.
  if (FA_STREAMS && stage == kSecond)
    fence_sc();
  store_release(word, mark);
}

FA_FN Failure wait_for_signal(const FaLaunch &launch, u32 rank, u32 epoch, const FaSignal *signal,
                              Arrival *arrival) {
  arrival->signal = signal;
  return wait_for(launch, rank, epoch, reinterpret_cast<const u64 *>(&signal->epoch), mark_of(launch, epoch));
}

#endif

} // namespace FA_NAMESPACE
