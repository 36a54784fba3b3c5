// The sink that also sends a result to all peers, as packets.
#pragma once

#include "../core/packet.cuh"
#include "store.cuh"

namespace FA_NAMESPACE {

class StoreAndSend : public Store {
public:
  // Packets go to `part` of `parts` of the mailboxes, the first of them for pack `first` of the message.
  FA_FN StoreAndSend(u8 *to, const FaLaunch &launch, u32 epoch, u32 part, u32 parts, u64 first)
      : Store(to), launch_(launch), tag_(packet_tag(launch, epoch)), epoch_(epoch), part_(part),
        parts_(parts), first_(first) {}

#if FA_CUDA
  template <class Extent>
  FA_FN void put(u64 at, u64 i, const Pack &pack, Extent extent, u32 granule) const {
    send(i, pack);
    Store::put(at, i, pack, extent, granule);
  }
#else
  FA_FN void done(Span span, u64 bytes) const {
    for (u64 i = span.first; i < span.first + span.length; ++i)
      with_extent(i, bytes, true, [&](u64 at, u64, auto extent) { send(i, load(to() + at, extent, 1)); });
  }
#endif

private:
  const FaLaunch &launch_;
  Tag tag_;
  u32 epoch_, part_, parts_;
  u64 first_;

  FA_FN void send(u64 i, const Pack &pack) const {
    FA_ROLL
    for (u32 step = 1; step < launch_.world; ++step) {
      const u32 r = (launch_.rank + step) % launch_.world;
      store_packet(slots_of(launch_, r, epoch_, part_, parts_, launch_.rank) + (i - first_), pack, tag_);
    }
  }
};

} // namespace FA_NAMESPACE
