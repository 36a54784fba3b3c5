// Packets: data and epoch stored together, so that arrival of the data is its own signal.
//
// A slot holds one pack. Every layout of a mailbox puts its slots on one grid, so that a tag word of one
// launch is a tag word of every launch, and old data is never read as a tag.
#pragma once

#include "check.cuh"
#include "packed.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA

// Four words of (32 bits of data, 32 bits of epoch), as NCCL's LL protocol. Each word is one single-copy
// atomic access, so no order between them is needed.
struct Slot {
  u64 word[4];
};
static_assert(sizeof(Slot) == FA_CUDA_SLOT_BYTES, "as abi.h says");

template <class T>
FA_FN void store_packet(Slot *slot, const Pack<T> &pack, u32 epoch) {
  const uint4 data = *reinterpret_cast<const uint4 *>(&pack);
  const u64 tag = u64(epoch) << 32;
  store_relaxed_pair(&slot->word[0], tag | data.x, tag | data.y);
  store_relaxed_pair(&slot->word[2], tag | data.z, tag | data.w);
}

template <class T>
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, u32 epoch, Pack<T> *pack) {
  u64 a, b, c, d;
  const bool here = wait_until(launch, from, epoch, [&] {
    load_relaxed_pair(&slot->word[0], &a, &b);
    load_relaxed_pair(&slot->word[2], &c, &d);
    return u32(a >> 32) == epoch && u32(b >> 32) == epoch && u32(c >> 32) == epoch && u32(d >> 32) == epoch;
  });
  *reinterpret_cast<uint4 *>(pack) = make_uint4(u32(a), u32(b), u32(c), u32(d));
  return here;
}

#else

// A cache line of data, then its tag, released after it.
struct Slot {
  u8 data[kPackBytes];
  u32 tag;
  u8 padding[FA_HOST_SLOT_BYTES - kPackBytes - sizeof(u32)];
};
static_assert(sizeof(Slot) == FA_HOST_SLOT_BYTES, "as abi.h says");

template <class T>
FA_FN void store_packet(Slot *slot, const Pack<T> &pack, u32 epoch) {
  __builtin_memcpy(slot->data, &pack, kPackBytes);
  store_release(&slot->tag, epoch);
}

template <class T>
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, u32 epoch, Pack<T> *pack) {
  if (!wait_until(launch, from, epoch, [&] { return load_acquire(&slot->tag) == epoch; }))
    return false;
  __builtin_memcpy(pack, slot->data, kPackBytes);
  return true;
}

#endif

// The slots in `owner`'s mailbox for what `from` sends. `part` of `parts` is the phase of the algorithm.
//
// A sender has the same share whatever the algorithm: with one sender to a word, coherence alone orders its
// packets. Two senders' packets would be ordered by nothing, as packets are relaxed, and an older one could
// stay (tests/litmus/programs/protocol/mailbox_layouts.litmus).
FA_FN Slot *slots_of(const FaLaunch &launch, u32 owner, u32 epoch, u32 part, u32 parts, u32 from) {
  const u64 share = launch.mailbox_bytes / sizeof(Slot) / launch.world;
  return reinterpret_cast<Slot *>(mailbox(launch, owner, epoch)) + from * share + part * (share / parts);
}

} // namespace FA_NAMESPACE
