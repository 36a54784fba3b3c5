// Time stamps, in cycles, of thread 0 at certain points of a call. Include this first: the algorithms use
// FA_STAMP, which is empty elsewhere.
#pragma once

#define FA_STAMP(point) stamp(point)

#include "../core/memory.cuh"

namespace FA_NAMESPACE {

// In the order of src/device/cuda/probes.rs.
enum Stamp : u32 {
  kBegin,
  kEpoch,                  // the launch state has been read
  kPhase,                  // pull: phases 0 to 2 are done
  kSignalled = kPhase + 3, // pull: signals of its two barriers have been sent
  kMet = kSignalled + 2,   // pull: its two barriers have completed
  kSent = kMet + 2,        // push: packets of the inputs have been sent
  kReduced,                // push: results have been stored; in a two-shot those of all ranks
  kEnd,
  kStamps,
};

__shared__ u64 fa_stamps[kStamps];

FA_FN void stamp(u32 point) {
  if (threadIdx.x == 0)
    asm volatile(
        "{\n\t.reg .u64 now;\n\tmov.u64 now, %%clock64;\n\tst.volatile.shared.u64 [%0], now;\n\t}" ::"l"(
            __cvta_generic_to_shared(&fa_stamps[point]))
        : "memory");
}

// Adds the times since the beginning of the iteration. A point that the iteration did not pass adds nothing.
FA_FN void add_stamps(u64 *sums) {
  const volatile u64 *stamps = fa_stamps;
  FA_ROLL
  for (u32 point = kEpoch; point < kStamps; ++point) {
    if (stamps[point] >= stamps[kBegin])
      sums[point] += stamps[point] - stamps[kBegin];
  }
  sums[kBegin] += 1;
}

} // namespace FA_NAMESPACE
