// Windows, for in-switch reduction (NVLS): each rank has a window (memory for two generations of staging),
// and one multicast address in every process stands for all windows. A load from it returns the sum over
// all windows, and a store to it stores to all: the NVSwitch does both (PTX ISA, multimem.ld_reduce and
// multimem.st). On the host, where tests stand in for a switch, the multicast address is a list of the
// windows' addresses by rank.
//
// A window thus has two addresses, which are virtual aliases of the same memory. Base causality order alone
// does not order accesses through different aliases: the path between them needs an alias proxy fence (PTX
// ISA, Memory Consistency Model: Proxies, and proxy-preserved base causality order). Every path from one
// block's accesses to any block's accesses after a barrier goes through the lanes that signal, so those
// lanes execute the fence (lab/litmus/programs/windows/nvls_*.litmus). It is a membar.gl, too expensive for
// every thread.
#pragma once

#include "inputs.cuh"

namespace FA_NAMESPACE {

// Offset in a window at which this pull stages: generations alternate, like those of staging.
FA_FN u64 window_offset(const FaLaunch &launch, const LaunchState &state) {
  return staging_generation(state) * launch.staging_bytes;
}

// This rank's window, by its own address.
FA_FN u8 *own_window(const FaLaunch &launch, const LaunchState &state) {
  return reinterpret_cast<u8 *>(launch.window + window_offset(launch, state));
}

// Orders accesses through one alias of a window before the fence with those through another after it.
FA_FN void fence_alias() {
#if FA_CUDA
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

// A barrier between accesses to windows through different aliases.
template <class Block>
FA_FN bool window_barrier(const FaLaunch &launch, Block &block, BarrierStage stage,
                          const LaunchState &state) {
  block.sync();
  block.lanes(launch.world, [](u32) { fence_alias(); });
  return barrier(launch, block, stage, state);
}

} // namespace FA_NAMESPACE
