// RMSNorm of rows whose elements are divided among the ranks: a push of a few bytes for each row.
//
//   for each row: sums of own squares -> packet to every rank
//   for each row: packets of all ranks -> sums in rank order -> own elements, normalised
//
// A packet has a sum for each part of the row. A rank also sends to itself, so that its own sums need no
// other memory. Two generations suffice, as in a one-shot push: a rank reaches epoch e + 2 only after every
// peer has sent e + 1, and hence has finished e, including its reads of this generation.
#pragma once

#include "../core/packet.cuh"

namespace FA_NAMESPACE {

// A pack with the sums of a row's parts: two floats in a word.
#if FA_CUDA
FA_FN Pack pack_of(u64 sums) { return pack_of(sums, 0); }
FA_FN u64 sums_of(const Pack &pack) { return pack.low(); }
#else
FA_FN Pack pack_of(u64 sums) {
  Pack pack = {};
  __builtin_memcpy(&pack, &sums, sizeof sums);
  return pack;
}
FA_FN u64 sums_of(const Pack &pack) {
  u64 sums;
  __builtin_memcpy(&sums, &pack, sizeof sums);
  return sums;
}
#endif

// Calls body(row) for each row that belongs to this block: the same rows on all ranks.
template <class Block, class Body>
FA_FN void for_each_own_row(const Block &block, u32 rows, Body body) {
#if FA_CUDA
  FA_NO_UNROLL
  for (u32 row = block.index(); row < rows; row += block.count())
    body(row);
#else
  const auto share = block.share(rows);
  for (u32 row = u32(share.first); row < share.last; ++row)
    body(row);
#endif
}

// `rows`: the rows of this rank. squares(block, row) returns the sums of a row's parts on every thread;
// scale(block, row, sums, kept) normalises the parts of a row, with the sums of each rank at sums[rank];
// keep(row) loads what it needs of them before packets come.
template <class Rows, class Block>
FA_FN void sharded_rms_norm(const FaLaunch &launch, Block &block, const Rows &rows) {
  const LaunchState state = begin_launch(launch, block, false);
  const u32 failed = load_failed(launch);
  const u32 world = launch.world;
  const Tag tag = packet_tag(launch, state.epoch);
  const u64 sent = slots_offset(launch, world, state.epoch, 0, 1, launch.rank);
  bool goes_on = true, is_first = true;
  for_each_own_row(block, rows.count(), [&](u32 row) {
    if (!goes_on)
      return;
    // The squares of the first row are computed before the calls are compared: they are read from this rank's
    // own memory alone, and nothing is sent or stored before. On a GPU the launch's state is loaded
    // meanwhile.
    const Pack sums = pack_of(rows.squares(block, row));
    if (is_first) {
      is_first = false;
      goes_on = same_call(launch, block, state, failed);
      if (!goes_on)
        return;
    }
    block.lanes(world, [&](u32 step) {
      const u32 r = wrap_rank(launch.rank + step, world);
      store_packet(reinterpret_cast<Slot *>(launch.regions[r] + sent + u64(row) * sizeof(Slot)), sums, tag);
    });
  });
  // A block without rows.
  if (is_first)
    goes_on = same_call(launch, block, state, failed);
  if (!goes_on)
    return;
  advance_after_sending(launch, block, state, false);
  // Two sets of sums in turn: a thread may still read those of the previous row.
  u64 *const scratch = block.scratch();
  u32 turn = 0;
  bool complete = true;
  for_each_own_row(block, rows.count(), [&](u32 row) {
    if (!complete)
      return;
    const auto kept = rows.keep(row);
    u64 *const sums = scratch + turn * FA_MAX_RANKS;
    turn ^= 1;
    complete = block.all_lanes(world, [&](u32 r) {
      Pack pack;
      const Slot *slot = own_slots_of(launch, world, state.epoch, 0, 1, r) + row;
      if (!wait_packet(launch, slot, r, tag, &pack))
        return false;
      sums[r] = sums_of(pack);
      return true;
    });
    if (complete)
      rows.scale(block, row, sums, kept);
  });
  end_push(launch, block, state, false);
}

} // namespace FA_NAMESPACE
