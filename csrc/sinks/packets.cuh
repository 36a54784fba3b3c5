// The sink that sends a result to all ranks as packets.
#pragma once

#include "../core/packet.cuh"
#include "store.cuh"

namespace FA_NAMESPACE {

// W: the number of ranks if it is known, else 0.
template <u32 W = 0>
class Packets : public Store {
public:
  // Packets go to `section` of `sections` of the mailboxes; the section's first slot is for pack `first` of
  // the message. `to` is where this rank stores the result: on a GPU, if W is 0, when it receives its packets
  // to itself.
  FA_FN Packets(u8 *to, const Recipients<W> &recipients, const FaLaunch &launch, u32 world, u32 epoch,
                u32 section, u32 sections, Index first, Tag tag)
      : Store(to), recipients_(recipients),
        slots_(SenderSlots(launch, world, section, sections, tag).of(epoch) - u64(first) * sizeof(Slot)),
        tag_(tag) {}

#if FA_CUDA
  FA_FN u64 addresses() const { return 0; }

  template <class Extent>
  FA_FN void put(u64 at, Index i, const Pack &pack, Extent extent, u32 granule) const {
    send(i, pack);
    if constexpr (W != 0)
      Store::put(at, i, pack, extent, granule);
  }
#else
  FA_FN void done(Span span, u64 bytes) const {
    for (Index i = span.first; i < span.first + span.length; ++i)
      with_extent(i, bytes, true, [&](u64 at, Index, auto extent) { send(i, load(to() + at, extent, 1)); });
  }
#endif

private:
  const Recipients<W> &recipients_;
  u64 slots_; // the offset of the slot for pack 0 of the message, in each region
  Tag tag_;

  FA_FN void send(Index i, const Pack &pack) const {
    recipients_.send(slots_ + u64(i) * sizeof(Slot), pack, tag_);
  }
};

} // namespace FA_NAMESPACE
