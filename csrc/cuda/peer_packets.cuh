// Sentinel packets in the hot set, where a rank sends nothing to itself. It reads its own part from its
// input, stores its own result to its output, and leaves the slots of its packets to itself empty. For a
// message of S bytes between n ranks a one-shot then stores 2 S bytes less, and a two-shot 4 S / n. The
// kernels for any number of ranks use those slots, and leave them empty as well. No other rank writes or
// reads them, so ranks may run different kernels.
//
// Accesses to the peers' slots have predicates instead of branches, so that the loads of a poll overlap.
#pragma once

#include "../core/packet.cuh"

namespace FA_NAMESPACE {

// A thread's packets of a section, one of each peer at a time. W: the number of ranks.
template <u32 W>
class PeerPackets {
public:
  // This thread's first packet of rank 0 is at `slot`; each rank's are `distance` slots after the previous
  // one's.
  FA_FN PeerPackets(const FaLaunch &launch, const Slot *slot, u32 distance) : launch_(launch) {
    FA_UNROLL
    for (u32 r = 0; r < W; ++r) {
      at_[r] = u64(slot + r * distance);
      asm volatile("" : "+l"(at_[r])); // here, not in the loop over packs
    }
  }

  // Waits for the packet of each peer. All are polled together, so that the loads overlap. `own` takes this
  // rank's place, like a packet that has come. Returns false if not all came.
  FA_FN bool wait(const Pack &own, Tag tag, Pack (&packs)[W]) const {
    FA_UNROLL
    for (u32 r = 0; r < W; ++r)
      packs[r] = own;
    Backoff<> backoff;
    FA_NO_UNROLL
    for (;;) {
      u32 least = ~0u;
      FA_UNROLL
      for (u32 r = 0; r < W; ++r) {
        u64 low = packs[r].low(), high = packs[r].high();
        load_relaxed_pair_unless(r, launch_.rank, slot(r)->word, &low, &high);
        packs[r] = pack_of(low, high);
        least = min(least, min(packs[r].word[1], packs[r].word[3]));
      }
      if (least != 0)
        return true;
      const Failure failure = backoff.pause(launch_, [&] {
        u32 late = 0;
        FA_UNROLL
        for (u32 r = W; r-- > 0;)
          late = is_filled(packs[r]) ? late : r;
        return late;
      });
      if (!succeeded(launch_, failure, tag.epoch))
        return false;
    }
  }

  // Empties the packets, and goes on to those `stride` slots later.
  FA_FN void next(Index stride) {
    FA_UNROLL
    for (u32 r = 0; r < W; ++r)
      store_relaxed_pair_unless(r, launch_.rank, slot(r)->word, 0, 0);
    FA_UNROLL
    for (u32 r = 0; r < W; ++r)
      at_[r] += u64(stride) * sizeof(Slot);
  }

private:
  const FaLaunch &launch_;
  u64 at_[W];

  FA_FN Slot *slot(u32 r) const { return reinterpret_cast<Slot *>(at_[r]); }
};

} // namespace FA_NAMESPACE
