// Packets: data and epoch stored together, so that arrival of the data is its own signal.
//
// A slot holds one pack. Every layout of a mailbox puts its slots on one grid, so that a tag word of one
// launch is a tag word of every launch, and old data is never read as a tag. On the host the tag also has a
// hash of the call, which tells ranks apart that make different ones.
#pragma once

#include "check.cuh"
#include "pack.cuh"

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

FA_FN void store_packet(Slot *slot, const Pack &pack, Tag tag) {
  const u64 high = u64(tag) << 32;
  store_relaxed_words(slot->word, high | u32(pack.low), high | pack.low >> 32, high | u32(pack.high),
                      high | pack.high >> 32);
}

// A look at a packet. False: not all of it has come.
FA_FN bool load_packet(const Slot *slot, Tag tag, Pack *pack) {
  u64 a, b, c, d;
  load_relaxed_words(slot->word, &a, &b, &c, &d);
  *pack = {b << 32 | u32(a), d << 32 | u32(c)};
  return ((u32(a >> 32) ^ tag) | (u32(b >> 32) ^ tag) | (u32(c >> 32) ^ tag) | (u32(d >> 32) ^ tag)) == 0;
}

FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack *pack) {
  return succeeded(launch, wait_until(launch, from, [&] { return load_packet(slot, tag, pack); }), tag);
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

FA_FN void store_packet(Slot *slot, const Pack &pack, Tag tag) {
  __builtin_memcpy(slot->data, &pack, kPackBytes);
  store_release(&slot->tag, tag);
}

// Until the data of the packet may be read.
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag) {
  return succeeded(launch, wait_for(launch, from, u32(tag), &slot->tag, tag), u32(tag));
}

FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack *pack) {
  if (!wait_packet(launch, slot, from, tag))
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
FA_FN u32 mailbox_share(const FaLaunch &launch, u32 world) {
  // A division of 32 bits: that of 64 is a function on a GPU.
  return u32(launch.mailbox_bytes / sizeof(Slot)) / world;
}

FA_FN Slot *slots_of(const FaLaunch &launch, u32 world, u32 owner, u32 epoch, u32 part, u32 parts, u32 from) {
  const u32 share = mailbox_share(launch, world);
  return reinterpret_cast<Slot *>(mailbox(launch, owner, epoch)) + from * share + part * (share / parts);
}

// The parts of a sender's share in a two-shot.
constexpr u32 kInputs = 0, kResults = 1, kParts = 2;

// Sends a span of packs of this rank's input to one peer, whose slots begin with the first of them.
template <class Block, class Reduce, class Partition>
FA_STEP void send_packets(const FaLaunch &launch, const Block &block, const Reduce &reduce, const u8 *from,
                          Span span, u64 bytes, Slot *slots, u32 epoch, Partition partition) {
  const Tag tag = packet_tag(launch, epoch);
  const u32 granule = granule_of(u64(from) | bytes);
  for_each_pack(
      block, span, bytes, pack_aligned(u64(from)),
      [&](u64 at, Index i, auto extent) {
        store_packet(slots + (i - span.first), reduce.own(from + at, extent, granule), tag);
      },
      partition);
}

// Sends each slice of this rank's input to its owner, as inputs of a two-shot.
template <class Partition, class Block, class Reduce>
FA_FN void send_slices(Partition partition, const FaLaunch &launch, const Block &block, const Reduce &reduce,
                       const u8 *from, const Slices &slices, u64 bytes, u32 world, u32 epoch) {
  FA_ROLL
  for (u32 step = kFirstStep; step < world; ++step) {
    // Each rank writes to one peer at a time, a different one from its peers.
    const u32 r = (launch.rank + step) % world;
    send_packets(launch, block, reduce, from, slices.of(r), bytes,
                 slots_of(launch, world, r, epoch, kInputs, kParts, launch.rank), epoch, partition);
  }
}

#if FA_CUDA
// Packs of an index of several slices are loaded before one is sent, so that no load of them waits for
// another.
template <u32 W, class Block, class Reduce>
FA_FN void send_slices(WholePacks<W> partition, const FaLaunch &launch, const Block &block, const Reduce &,
                       const u8 *from, const EqualSlices &slices, u64, u32, u32 epoch) {
  // Between more ranks a kernel with the code for it would be larger than 8 KiB.
  constexpr u32 kBatch = W < 5 ? W : 1;
  const Tag tag = packet_tag(launch, epoch);
  partition.for_each(block, slices.of(0), [&](Index i) {
    FA_ROLL
    for (u32 step = 0; step < W; step += kBatch) {
      Pack packs[kBatch];
      FA_UNROLL
      for (u32 k = 0; k < kBatch; ++k)
        packs[k] = load(from + u64((launch.rank + step + k) % W * slices.each + i) * kPackBytes, Whole{}, 0);
      // One body for all: the next one moves to the front.
      FA_ROLL
      for (u32 k = step; k < (W % kBatch == 0 ? step + kBatch : min(step + kBatch, W)); ++k) {
        const u32 r = (launch.rank + k) % W;
        store_packet(slots_of(launch, W, r, epoch, kInputs, kParts, launch.rank) + i, packs[0], tag);
        FA_UNROLL
        for (u32 next = 1; next < kBatch; ++next)
          packs[next - 1] = packs[next];
        // The last stays: without this its copies are of nothing at the end.
        asm volatile("" : "+l"(packs[kBatch - 1].low), "+l"(packs[kBatch - 1].high));
      }
    }
  });
}
#endif

// Sends one pack to all ranks, at an index of the same part.
FA_FN void send_to_all(const FaLaunch &launch, u32 world, u32 epoch, u32 part, u32 parts, Index i,
                       const Pack &pack) {
  const Tag tag = packet_tag(launch, epoch);
  FA_ROLL
  for (u32 step = kFirstStep; step < world; ++step) {
    // Each rank writes to one peer at a time, a different one from its peers.
    const u32 r = (launch.rank + step) % world;
    store_packet(slots_of(launch, world, r, epoch, part, parts, launch.rank) + i, pack, tag);
  }
}

// Stores the packets of a span of a message that one peer sends. False: not all came.
template <class Block, class Partition = Parts>
FA_STEP bool receive_packets(const FaLaunch &launch, const Block &block, u8 *to, Span span, u64 bytes,
                             const Slot *slots, u32 from, u32 epoch, Partition partition = {}) {
  const Tag tag = packet_tag(launch, epoch);
  const u32 granule = granule_of(u64(to) | bytes);
  bool complete = true;
  for_each_pack(
      block, span, bytes, pack_aligned(u64(to)),
      [&](u64 at, Index i, auto extent) {
        Pack pack;
        complete = complete && wait_packet(launch, slots + (i - span.first), from, tag, &pack);
        if (complete)
          store(to + at, pack, extent, granule);
      },
      partition);
  return complete;
}

// Stores the peers' slices of a message, which each sends as `part`.
template <class Block, class Partition = Parts>
FA_FN bool receive_slices(const FaLaunch &launch, const Block &block, u8 *to, const Slices &slices, u64 bytes,
                          u32 world, u32 epoch, u32 part, u32 parts, Partition partition = {}) {
  bool complete = true;
  FA_ROLL
  for (u32 step = kFirstStep; step < world && complete; ++step) {
    const u32 r = (launch.rank + step) % world;
    complete =
        receive_packets(launch, block, to, slices.of(r), bytes,
                        slots_of(launch, world, launch.rank, epoch, part, parts, r), r, epoch, partition);
  }
  return complete;
}

} // namespace FA_NAMESPACE
