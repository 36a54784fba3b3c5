// When a call's thread 0 came to certain points of it, in cycles. Included first: the algorithms stamp by
// FA_STAMP, which is nothing elsewhere.
#pragma once

#define FA_STAMP(point) stamp(point)

#include "../core/memory.cuh"

namespace FA_NAMESPACE {

// In the order of src/device/cuda/probes.rs.
enum Stamp : u32 {
  kBegin,
  kEpoch,                  // the launch's state was read
  kPhase,                  // of a pull: phases 0 to 2 are done
  kSignalled = kPhase + 3, // its barriers: signals are sent,
  kMet = kSignalled + 2,   // and have come
  kSent = kMet + 2,        // of a push: packets of the inputs
  kReduced,                // and what came of them, in a two-shot with the results of all
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

// Since the beginning of the turn; a point that was not passed in it stays as it is.
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
