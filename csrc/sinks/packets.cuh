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
  // the message. `to` is where this rank stores the result: on a GPU, when it receives its packets to itself.
  FA_FN Packets(u8 *to, const FaLaunch &launch, u32 world, u32 epoch, u32 section, u32 sections, Index first,
                Tag tag)
      : Store(to), launch_(launch), world_(world), epoch_(epoch), section_(section), sections_(sections),
        first_(first), tag_(tag) {}

#if FA_CUDA
  FA_FN u64 addresses() const { return 0; }

  template <class Extent>
  FA_FN void put(u64, Index i, const Pack &pack, Extent, u32) const {
    send(i, pack);
  }
#else
  FA_FN void done(Span span, u64 bytes) const {
    for (Index i = span.first; i < span.first + span.length; ++i)
      with_extent(i, bytes, true, [&](u64 at, Index, auto extent) { send(i, load(to() + at, extent, 1)); });
  }
#endif

private:
  const FaLaunch &launch_;
  u32 world_, epoch_, section_, sections_;
  Index first_;
  Tag tag_;

  FA_FN void send(Index i, const Pack &pack) const {
    send_to_all<W>(launch_, world_, epoch_, section_, sections_, i - first_, pack, tag_);
  }
};

} // namespace FA_NAMESPACE
