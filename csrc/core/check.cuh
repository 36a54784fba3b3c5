// Checked launches: before they touch anything, ranks compare what they are about to do.
#pragma once

#include "wait.cuh"

namespace FA_NAMESPACE {

// True on all threads if this launch is not checked, or every peer makes the same call; false on all when a
// peer's is another, or the launch gives up.
//
// Every block compares for itself, so that no block of a rank accesses memory by a count that its peers do
// not share. Where ranks have different numbers of blocks, those without counterparts leave when block 0,
// which every launch has, records the mismatch. A word of an announcement is written again two launches
// later, and a rank gets there only after every peer has announced the launch between, hence read this one.
template <class Block>
FA_FN bool same_call(const FaLaunch &launch, Block &block, u32 epoch) {
  if (!launch.checked)
    return true;
  block.lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return;
    FaAnnouncement *announced = &region_head(launch, r)->announced[epoch % 2][block.index()][launch.rank];
    store_relaxed(&announced->call.what, launch.call.what);
    store_relaxed(&announced->call.count, launch.call.count);
    // Release: the call comes before the epoch.
    store_release(&announced->epoch, epoch);
  });
  return block.all_lanes(launch.world, [&](u32 r) {
    if (r == launch.rank)
      return true;
    const FaAnnouncement *announced =
        &region_head(launch, launch.rank)->announced[epoch % 2][block.index()][r];
    if (!wait_until(launch, r, epoch, [&] { return load_acquire(&announced->epoch) == epoch; }))
      return false;
    const FaCall call = {load_relaxed(&announced->call.what), load_relaxed(&announced->call.count)};
    if (call.what == launch.call.what && call.count == launch.call.count)
      return true;
    FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
    store_relaxed(&status->others[r].what, call.what);
    store_relaxed(&status->others[r].count, call.count);
    record_failure(launch, FA_MISMATCH, 1u << r, epoch);
    return false;
  });
}

} // namespace FA_NAMESPACE
