// The kernel by which ranks check that memory which they share carries data between GPUs.
#pragma once
#include "entry.cuh"

// Writes two words, or copies them if `from` is not 0. One side may be a peer's memory: these are the
// accesses of pushes and of pulls. Where peer access is broken, copies by the driver may work, since it can
// route them through host memory. The other rank reads the words after this kernel has ended, so no access
// orders another.
FA_KERNEL(share_probe)(u64 to, u64 from, u64 first, u64 second) {
  wait_for_launch_before();
  if (blockIdx.x + threadIdx.x != 0)
    return;
  if (from != 0) {
    first = load_relaxed(reinterpret_cast<const u64 *>(from));
    second = load_relaxed(reinterpret_cast<const u64 *>(from) + 1);
  }
  store_relaxed(reinterpret_cast<u64 *>(to), first);
  store_relaxed(reinterpret_cast<u64 *>(to) + 1, second);
}
