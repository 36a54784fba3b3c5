// Where things are in a region, and the epoch that selects among them.
#pragma once

#include "memory.cuh"

namespace FA_NAMESPACE {

FA_FN FaRegionHead *region_head(const FaLaunch &launch, u32 rank) {
  return reinterpret_cast<FaRegionHead *>(launch.regions[rank]);
}

// Mailboxes of `rank` of this epoch's generation.
FA_FN u8 *mailbox(const FaLaunch &launch, u32 rank, u32 epoch) {
  return reinterpret_cast<u8 *>(launch.regions[rank] + launch.mailbox_offset +
                                (epoch % 2) * launch.mailbox_bytes);
}

// Staging of `rank` of this epoch's generation.
FA_FN u8 *staging(const FaLaunch &launch, u32 rank, u32 epoch) {
  return reinterpret_cast<u8 *>(launch.regions[rank] + launch.staging_offset +
                                (epoch % 2) * launch.staging_bytes);
}

// The epoch of the launch that this block is in.
template <class Block>
FA_FN u32 current_epoch(const FaLaunch &launch, const Block &block) {
  const u32 last = region_head(launch, launch.rank)->epoch[block.index()];
  return last == 0xFFFFFFFFu ? FA_FIRST_EPOCH_AFTER_WRAP : last + 1;
}

// Ends a launch. Block 0 also advances the blocks that this launch did not use: epochs of all blocks are
// equal between launches, whatever grids the calls used. Otherwise a fast rank could write a slice of a
// generation that a slow one, at another epoch of that block, still reads.
template <class Block>
FA_FN void advance_epoch(const FaLaunch &launch, Block &block, u32 epoch) {
  u32 *epochs = region_head(launch, launch.rank)->epoch;
  // The threads of this block have all read the old epoch.
  block.sync();
  block.lanes(1, [&](u32) { epochs[block.index()] = epoch; });
  if (block.index() == 0) {
    const u32 used = block.count();
    block.lanes(FA_MAX_BLOCKS - used, [&](u32 i) { epochs[used + i] = epoch; });
  }
}

}  // namespace FA_NAMESPACE
