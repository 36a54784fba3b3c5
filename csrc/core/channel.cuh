// Channels: one in each direction between any two ranks, a ring of slots in the receiver's region.
//
// A slot belongs to the sender until it sets the number of the chunk in it, and to the receiver from then
// until it gives credit. Both counts live in the region and never go back, so that launches follow each other
// without a rendezvous, and only the two ranks of a message take part in it.
//
// On the host a ring is larger than the second-level caches: when a slot is written again, its lines have
// left the cache of the receiver, which they would have to be taken from.
//
// Ordering: the sender's data, then its release of the number; the receiver's acquire of it, then its reads,
// then its release of the credit; the sender's acquire of that, then its next data in the slot. A sync on
// both sides of each flag joins the threads of a block to the one that accesses it.
#pragma once

#include "pack.cuh"
#include "wait.cuh"

namespace FA_NAMESPACE {

// The slot for chunk `number` in the region of `receiver`: the signal, and its data behind it.
FA_FN FaChunk *chunk_slot(const FaLaunch &launch, u32 receiver, u32 sender, u32 number) {
  // No rank has a channel to itself.
  const u64 channel = sender < receiver ? sender : sender - 1;
  const u64 slot = channel * launch.channel_slots + (number & (launch.channel_slots - 1));
  return reinterpret_cast<FaChunk *>(launch.regions[receiver] + launch.channel_offset +
                                     slot * (sizeof(FaChunk) + launch.chunk_bytes));
}

FA_FN u64 chunk_data(FaChunk *slot) { return u64(slot + 1); }

// Whether the receiver gives credit after chunk `number`. A sender that reads a credit takes its line from
// the receiver, so credit comes for a quarter of the slots at once: the others are enough to go on.
FA_FN bool gives_credit(const FaLaunch &launch, u32 number) {
  const u32 each = launch.channel_slots < 8 ? 1 : launch.channel_slots / 4;
  return ((number + 1) & (each - 1)) == 0;
}

// Copies bytes by the threads of this block alone, as a part of `all` bytes.
template <class Block>
FA_STEP void copy_bytes(const Block &block, u64 to, u64 from, u64 bytes, u64 all = 0) {
  u8 *target = reinterpret_cast<u8 *>(to);
  const u8 *source = reinterpret_cast<const u8 *>(from);
#if FA_CUDA
  (void)all;
  const u32 granule = granule_of(to | from | bytes);
  block.for_each_alone(packs_of(bytes), [&](u64 i) {
    with_extent(i, bytes, pack_aligned(to | from), [&](u64 at, u64, auto extent) {
      store(target + at, load(source + at, extent, granule), extent, granule);
    });
  });
#else
  // As in `copy_out`. It is ordered as plain stores are: the C library ends stores that bypass caches by a
  // fence.
  if ((bytes > all ? bytes : all) >= kLongCopy) {
    __builtin_memcpy(target, source, bytes);
    return;
  }
  const u64 whole = bytes / kPackBytes;
  block.for_each_alone(whole, [&](u64 i) {
    store(target + i * kPackBytes, load(source + i * kPackBytes, Whole{}, 1), Whole{}, 1);
  });
  const u64 at = whole * kPackBytes;
  if (at < bytes)
    __builtin_memcpy(target + at, source + at, bytes - at);
#endif
}

} // namespace FA_NAMESPACE
