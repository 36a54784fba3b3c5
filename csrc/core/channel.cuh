// Channels: one in each direction between any two ranks, of FA_CHANNEL_SLOTS chunks in the receiver's region.
//
// A chunk's slot belongs to the sender until it sets the chunk's number, and to the receiver from then until
// it gives credit. Both counts live in the region and never go back, so that launches follow each other
// without a rendezvous, and only the two ranks of a message take part in it.
//
// Ordering: the sender's data, then its release of the number; the receiver's acquire of it, then its reads,
// then its release of the credit; the sender's acquire of that, then its next data in the slot. A sync on
// both sides of each flag joins the threads of a block to the one that accesses it.
#pragma once

#include "pack.cuh"
#include "wait.cuh"

namespace FA_NAMESPACE {

// Most bytes of a chunk.
FA_FN u64 chunk_bytes(const FaLaunch &launch) {
  const u64 slots = u64(launch.world - 1) * FA_CHANNEL_SLOTS;
  return launch.channel_bytes / slots / 128 * 128;
}

// The slot for chunk `number` in the region of `receiver`.
FA_FN u8 *chunk_slot(const FaLaunch &launch, u32 receiver, u32 sender, u32 number) {
  // No rank has a channel to itself.
  const u64 channel = sender < receiver ? sender : sender - 1;
  const u64 slot = channel * FA_CHANNEL_SLOTS + number % FA_CHANNEL_SLOTS;
  return reinterpret_cast<u8 *>(launch.regions[receiver] + launch.channel_offset) +
         slot * chunk_bytes(launch);
}

FA_FN FaChunk *chunk_signal(const FaLaunch &launch, u32 receiver, u32 sender, u32 number) {
  return &region_head(launch, receiver)->chunks[number % FA_CHANNEL_SLOTS][sender];
}

// Copies bytes by the threads of this block alone.
template <class Block>
FA_STEP void copy_bytes(const Block &block, u64 to, u64 from, u64 bytes) {
  u8 *target = reinterpret_cast<u8 *>(to);
  const u8 *source = reinterpret_cast<const u8 *>(from);
  const u32 granule = granule_of(to | from | bytes);
  block.for_each_alone(packs_of(bytes), [&](u64 i) {
    with_extent(i, bytes, pack_aligned(to | from), [&](u64 at, u64, auto extent) {
      store(target + at, load(source + at, extent, granule), extent, granule);
    });
  });
}

} // namespace FA_NAMESPACE
