// Windows: memory that each rank has its own of, two generations of staging, and one address in every process
// that means all of them. What is loaded there is the sum over all windows, and what is stored there goes to
// all: the switch between the GPUs does both (NVLS; PTX ISA, multimem.ld_reduce and multimem.st). On the host
// that address is of a list of the windows' own, by rank, as whoever stands in for a switch gives it.
//
// A window has two addresses then, which are virtual aliases of one memory. Accesses by different aliases of
// a location are not ordered by base causality order alone: there must be an alias proxy fence along its path
// (PTX ISA, Memory Consistency Model: Proxies, and proxy-preserved base causality order). Every path from
// what a block has accessed to what any block accesses after a barrier goes through the lanes that signal:
// they have the fence (lab/litmus/programs/protocol/nvls_*.litmus). It is a membar.gl, too dear for every
// thread.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

// Bytes from the start of a window to where this pull stages: generations alternate, as those of staging.
FA_FN u64 window_offset(const FaLaunch &launch, const LaunchState &state) {
  return staging_generation(state) * launch.staging_bytes;
}

// This rank's own.
FA_FN u8 *own_window(const FaLaunch &launch, const LaunchState &state) {
  return reinterpret_cast<u8 *>(launch.window + window_offset(launch, state));
}

// Orders accesses by one address of a window with those by another, for all that it is between.
FA_FN void fence_alias() {
#if FA_CUDA
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

// A barrier between accesses to windows by different addresses.
template <class Block>
FA_FN bool meet_at_windows(const FaLaunch &launch, Block &block, BarrierStage stage,
                           const LaunchState &state) {
  block.sync();
  block.lanes(launch.world, [](u32) { fence_alias(); });
  return barrier(launch, block, stage, state);
}

} // namespace FA_NAMESPACE
