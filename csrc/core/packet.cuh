// Packets: data and epoch stored together, so that arrival of the data is its own signal.
//
// A slot holds one pack. Every layout of a mailbox puts its slots on one grid, so that a tag word of one
// launch is a tag word of every launch, and old data is never read as a tag. On the host the tag also has a
// hash of the call, which tells ranks apart that make different ones.
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

// What marks a packet of this launch: the epoch.
using Tag = u32;
FA_FN Tag packet_tag(const FaLaunch &, u32 epoch) { return epoch; }

template <class T>
FA_FN void store_packet(Slot *slot, const Pack<T> &pack, Tag tag) {
  const uint4 data = *reinterpret_cast<const uint4 *>(&pack);
  const u64 high = u64(tag) << 32;
  store_relaxed_pair(&slot->word[0], high | data.x, high | data.y);
  store_relaxed_pair(&slot->word[2], high | data.z, high | data.w);
}

template <class T>
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack<T> *pack) {
  u64 a, b, c, d;
  const bool here = wait_until(launch, from, tag, [&] {
    load_relaxed_pair(&slot->word[0], &a, &b);
    load_relaxed_pair(&slot->word[2], &c, &d);
    return u32(a >> 32) == tag && u32(b >> 32) == tag && u32(c >> 32) == tag && u32(d >> 32) == tag;
  });
  *reinterpret_cast<uint4 *>(pack) = make_uint4(u32(a), u32(b), u32(c), u32(d));
  return here;
}

#else

// A cache line of data, then its tag, released after it.
struct Slot {
  u8 data[FA_HOST_SLOT_BYTES - sizeof(u64)];
  u64 tag;
};
static_assert(sizeof(Slot) == FA_HOST_SLOT_BYTES && sizeof(Slot::data) >= kPackBytes, "as abi.h says");

// What marks a packet of this launch: the call, above the epoch.
using Tag = u64;
FA_FN Tag packet_tag(const FaLaunch &launch, u32 epoch) { return u64(word_of(launch.call)) << 32 | epoch; }

template <class T>
FA_FN void store_packet(Slot *slot, const Pack<T> &pack, Tag tag) {
  __builtin_memcpy(slot->data, &pack, kPackBytes);
  store_release(&slot->tag, tag);
}

template <class T>
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack<T> *pack) {
  if (!wait_for(launch, from, u32(tag), tag, [&] { return load_acquire(&slot->tag); }))
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
