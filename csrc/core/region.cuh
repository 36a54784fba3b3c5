// Where things are in a region, and the epoch that selects among them.
#pragma once

#include "memory.cuh"

namespace FA_NAMESPACE {

FA_FN FaRegionHead *region_head(const FaLaunch &launch, u32 rank) {
  return reinterpret_cast<FaRegionHead *>(launch.regions[rank]);
}

// Address in this process of what a source names in a registered buffer of `rank`; 0 where it has no such.
FA_FN u64 registered_address(const FaLaunch &launch, u32 rank, u64 source) {
  const u64 id = source >> FA_SOURCE_ID_SHIFT, offset = source & ((u64(1) << FA_SOURCE_ID_SHIFT) - 1);
  const u64 *table = reinterpret_cast<const u64 *>(launch.buffers);
  const u64 base = id - 1 < launch.buffer_count ? table[(id - 1) * FA_MAX_RANKS + rank] : 0;
  return base == 0 ? 0 : base + offset;
}

// Which launch this is. The generation of mailboxes goes by the epoch, that of staging and signals by the
// number of pulls: between two pulls of one generation there must be a barrier, whose release and acquire
// order the reads of the one before the writes of the other. A push in between would not do, as packets are
// relaxed (tests/litmus/programs/protocol/pull_push_pull.litmus).
struct Turn {
  u32 epoch;
  u32 pulls;
  bool failed = false; // a launch of this rank has failed: this one leaves, see `same_call`
  u32 traded = 0;      // 1: the two ranks stage in each other's regions
  u64 place = 0;       // bytes from the start of the generation of staging
};

// Between two ranks of the host, a cache line of staging is best written next by the rank that last accessed
// it, which need not fetch it then. Between GPUs a rank stages in its own memory.
FA_FN constexpr bool trades_lines(u32 world) { return !FA_CUDA && world == 2; }

// Mailboxes of `rank` of this epoch's generation.
FA_FN u8 *mailbox(const FaLaunch &launch, u32 rank, u32 epoch) {
#if defined(FA_PLANT_ONE_MAILBOX_GENERATION)
  epoch = 0;
#endif
  return reinterpret_cast<u8 *>(launch.regions[rank] + launch.mailbox_offset +
                                (epoch % 2) * launch.mailbox_bytes);
}

// Staging of `rank` of this pull's generation. Whose region it is in, and where in the generation, may differ
// from turn to turn, as long as all ranks agree on it: before anybody writes a generation again, all have
// finished the pull that used it.
FA_FN u8 *staging(const FaLaunch &launch, u32 rank, Turn turn) {
#if defined(FA_PLANT_ONE_STAGING_GENERATION)
  turn.pulls = 0;
  turn.place = 0;
#endif
  return reinterpret_cast<u8 *>(launch.regions[rank ^ turn.traded] + launch.staging_offset +
                                (turn.pulls % 2) * launch.staging_bytes + turn.place);
}

// Begins a launch of this block. `pull`: the algorithm has barriers, and uses staging.
template <class Block>
FA_FN Turn begin_turn(const FaLaunch &launch, const Block &block, bool pull) {
  const FaRegionHead *head = region_head(launch, launch.rank);
  const u32 last = head->epoch[block.index()];
  return {last == 0xFFFFFFFFu ? FA_FIRST_EPOCH_AFTER_WRAP : last + 1, head->pulls[block.index()] + pull,
          FA_STREAMS && load_relaxed(&head->failed) != 0};
}

// The turn of a pull that stages in the next place of its generation. On the host, to write a line waits for
// the caches of those who read it last; by the time that all places have been used, it has left them.
FA_FN Turn walking(Turn turn, const FaLaunch &launch) {
  if (!FA_CUDA)
    turn.place = (turn.pulls / 2 & launch.last_place) * launch.place_bytes;
  return turn;
}

// The turn of a pull in which two ranks read what they staged for each other. In one place, they trade
// regions from one use of a generation to the next, so that each stages where it has just read.
FA_FN Turn trading(Turn turn, const FaLaunch &launch, u32 world) {
  if (!trades_lines(world) || launch.last_place != 0)
    return walking(turn, launch);
  turn.traded = turn.pulls / 2 % 2;
  return turn;
}

// While two ranks of the host wait for each other, asks for the staging that this one writes in its next
// pull, if that is as small: the other has the lines, and to write each would wait for it.
FA_FN void expect_next_turn(const FaLaunch &launch, u32 world, Turn turn, u64 bytes) {
  constexpr u64 kMostBytes = 8192;
  if (!trades_lines(world) || bytes > kMostBytes)
    return;
  ++turn.pulls;
  const u8 *staged = staging(launch, launch.rank, trading(turn, launch, world));
  for (u64 at = 0; at < bytes; at += 64)
    expect_store(staged + at);
}

// Ends it. Block 0 also advances the blocks that this launch did not use: the counts of all blocks are equal
// between launches, whatever grids the calls used. Otherwise a fast rank could write a slice of a generation
// that a slow one, at another epoch of that block, still reads.
template <class Block>
FA_FN void end_turn(const FaLaunch &launch, Block &block, Turn turn) {
  FaRegionHead *head = region_head(launch, launch.rank);
  // The threads of this block have all read the old counts.
  block.sync();
  if (block.is_alone()) {
    // All are whole cache lines.
    block.fill(head->epoch, FA_MAX_BLOCKS, turn.epoch);
    block.fill(head->pulls, FA_MAX_BLOCKS, turn.pulls);
    return;
  }
  const u32 own = block.index(), others = own == 0 ? block.count() : FA_MAX_BLOCKS;
  block.for_each_alone(FA_MAX_BLOCKS, [&](u32 i) {
    if (i == own || i >= others) {
      head->epoch[i] = turn.epoch;
      head->pulls[i] = turn.pulls;
    }
  });
}

} // namespace FA_NAMESPACE
