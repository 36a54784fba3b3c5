// The layout of a region, and the launch state (epoch and number of pulls) that selects a generation.
#pragma once

#include "dependent_launch.cuh"
#include "memory.cuh"

namespace FA_NAMESPACE {

FA_FN FaRegionHead *region_head(const FaLaunch &launch, u32 rank) {
  return reinterpret_cast<FaRegionHead *>(launch.regions[rank]);
}

FA_FN FaRegionHead *own_head(const FaLaunch &launch) { return reinterpret_cast<FaRegionHead *>(launch.own); }

// Translates a source in a registered buffer of `rank` to an address in this process. Returns false if that
// buffer is not known here.
FA_FN bool find_registered(const FaLaunch &launch, u32 rank, u64 source, u64 *address) {
  const u32 index = u32(source >> FA_SOURCE_ID_SHIFT) - 1;
  const u64 *table = reinterpret_cast<const u64 *>(launch.buffers);
  const u64 base = index < u32(launch.buffer_count) ? table[u64(index) * FA_MAX_RANKS + rank] : 0;
  *address = base + (source & ((u64(1) << FA_SOURCE_ID_SHIFT) - 1));
  return base != 0;
}

// Launch counts. The epoch selects the generation of mailboxes; the number of pulls selects the generation
// of staging and signals. Between two pulls of the same generation there must be a barrier, whose release
// and acquire order the first one's reads before the second one's writes. A push in between is not enough,
// because packets are relaxed (lab/litmus/programs/pulls/pull_push_pull.litmus).
struct LaunchState {
  u32 epoch;
  u32 pulls;
  u32 swapped = 0; // 1: the two ranks stage in each other's regions
  u64 slot = 0;    // of the staging ring: bytes from the start of the generation
};

FA_FN u32 staging_generation(const LaunchState &state) {
#if defined(FA_PLANT_ONE_STAGING_GENERATION)
  return 0;
#else
  return state.pulls % 2;
#endif
}

// The offset in a region of the mailboxes of this epoch's generation.
FA_FN u64 mailbox_offset(const FaLaunch &launch, u32 epoch) {
#if defined(FA_PLANT_ONE_MAILBOX_GENERATION)
  epoch = 0;
#endif
  return launch.mailbox_offset + (epoch % 2) * launch.mailbox_bytes;
}

#if FA_CUDA
// That of the mailboxes for sentinel packets. They follow the tagged ones and have as many slots.
FA_FN u64 sentinel_mailbox_offset(const FaLaunch &launch, u32 epoch) {
  const u64 bytes = launch.mailbox_bytes / FA_CUDA_SLOT_BYTES * FA_CUDA_SENTINEL_BYTES;
  return launch.mailbox_offset + 2 * launch.mailbox_bytes + (epoch % 2) * bytes;
}
#endif

// Staging of `rank` in this pull's generation. The region that holds it, and its place in the generation,
// may change from launch to launch, as long as all ranks agree: before any rank writes a generation again,
// all ranks have finished the pull that used it.
FA_FN u8 *staging(const FaLaunch &launch, u32 rank, const LaunchState &state) {
  return reinterpret_cast<u8 *>(launch.regions[rank ^ state.swapped] + launch.staging_offset +
                                staging_generation(state) * launch.staging_bytes + state.slot);
}

// Sets where in a generation, and in whose region, this launch stages. The host decides which calls use the
// ring and which swap (src/call/arguments.rs).
//
// The ring (host): a write to a cache line has to invalidate it in the caches of its last readers. When the
// ring returns to a slot, its lines have been evicted from those caches.
//
// Swapping (two ranks on the host): a cache line is cheapest to write for the rank that read it last. Where
// each rank reads what the other has staged, they swap regions from one use of a generation to the next.
FA_FN void locate_staging(const FaLaunch &launch, LaunchState *state) {
#if !FA_CUDA && !defined(FA_PLANT_ONE_STAGING_GENERATION)
  const u32 uses = state->pulls / 2;
  state->swapped = uses & launch.swaps_staging;
  state->slot = (uses & launch.staging_last_slot) * launch.staging_slot_bytes;
#else
  (void)launch, (void)state;
#endif
}

// Begins a launch of this block. `pull`: the algorithm has barriers and uses staging.
template <class Block>
FA_FN LaunchState begin_launch(const FaLaunch &launch, const Block &block, bool pull) {
  const FaRegionHead *head = own_head(launch);
  const u32 last = head->epoch[block.index()];
  LaunchState state = {last == 0xFFFFFFFFu ? FA_FIRST_EPOCH_AFTER_WRAP : last + 1,
                       head->pulls[block.index()] + pull};
  if (pull)
    locate_staging(launch, &state);
  FA_STAMP(kEpoch);
  return state;
}

// Prefetches this rank's staging of the next pull while it waits, if two ranks on the host swap and the
// message is small. The lines are in the peer's cache, and each store would otherwise wait for one.
FA_FN void prefetch_next_staging(const FaLaunch &launch, LaunchState state, u64 bytes) {
  if (FA_CUDA || !launch.swaps_staging || bytes > FA_SMALL_STAGING_BYTES)
    return;
  ++state.pulls;
  locate_staging(launch, &state);
  const u8 *staged = staging(launch, launch.rank, state);
  for (u64 at = 0; at < bytes; at += 64)
    expect_store(staged + at);
}

// Advances the counts of this block. Block 0 also advances the blocks that this launch does not use, so that
// between launches the counts of all blocks are equal, whatever grids the calls used. Otherwise a fast rank
// could write a slice of a generation that a slow rank, whose block is at another epoch, still reads.
//
// Call it after a sync of the block that follows begin_launch(): all threads have read the old counts. Other
// blocks of the launch read other counts.
template <class Block>
FA_FN void advance_counts(const FaLaunch &launch, Block &block, const LaunchState &state) {
  FaRegionHead *head = own_head(launch);
  if (block.has_one_thread()) {
    // The arrays are whole cache lines.
    block.fill(head->epoch, FA_MAX_BLOCKS, state.epoch);
    block.fill(head->pulls, FA_MAX_BLOCKS, state.pulls);
    return;
  }
  const u32 own = block.index(), others = own == 0 ? block.count() : FA_MAX_BLOCKS;
  block.for_each_in_block(FA_MAX_BLOCKS, [&](u32 i) {
    if (i == own || i >= others) {
      head->epoch[i] = state.epoch;
      head->pulls[i] = state.pulls;
    }
  });
}

// Ends the launch.
template <class Block>
FA_FN void end_launch(const FaLaunch &launch, Block &block, const LaunchState &state) {
  // All threads of this block have read the old counts, and all waits are over.
  block.sync();
  let_next_launch_begin();
  advance_counts(launch, block, state);
}

// On a GPU a push advances the counts while its packets fly: the next launch, which reads them, begins when
// this one has ended. When a communicator is dropped during a capture, the host takes equal epochs of all
// blocks as the end of the launch's sends. So a block's own epoch waits until it has sent everything:
// `sends_later`, until end_push(). A push leaves `pulls` as they are.
template <class Block>
FA_FN void advance_after_sending(const FaLaunch &launch, Block &block, const LaunchState &state,
                                 bool sends_later) {
#if FA_CUDA
  block.sync(); // all threads of this block have read the old count; other blocks read other counts
  const u32 own = block.index(), others = own == 0 ? block.count() : FA_MAX_BLOCKS;
  block.for_each_in_block(FA_MAX_BLOCKS, [&](u32 i) {
    if ((i == own && !sends_later) || i >= others)
      own_head(launch)->epoch[i] = state.epoch;
  });
#else
  (void)launch, (void)block, (void)state, (void)sends_later;
#endif
}

// Ends a push. The thread that stores the epoch has heard from all ranks. What other threads of its block
// still send waits for packets that those ranks sent at the same time, so it is late by microseconds at most;
// the notice that this rank has left takes longer. If the notice came first all the same, a peer's call would
// end with an error, never with wrong data.
template <class Block>
FA_FN void end_push(const FaLaunch &launch, Block &block, const LaunchState &state, bool sends_later) {
#if FA_CUDA
  if (sends_later)
    block.lanes(1, [&](u32) { own_head(launch)->epoch[block.index()] = state.epoch; });
  block.sync();
  let_next_launch_begin();
#else
  (void)sends_later;
  end_launch(launch, block, state);
#endif
}

} // namespace FA_NAMESPACE
