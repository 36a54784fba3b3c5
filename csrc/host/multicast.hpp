// In-switch reduction on the host, for tests of the protocols. It adds the windows from the last rank to the
// first, since a switch may use any order.
#pragma once

#include "../core/multicast.cuh"
#include "../reduce/span.cuh"

namespace FA_NAMESPACE {

class MulticastSum {
public:
  MulticastSum(const ReduceSpans &spans, const FaLaunch &launch)
      : loop_(spans.of[FA_SUM][launch.world]), windows_(reinterpret_cast<const u64 *>(launch.multicast)) {}

  void to_output(const FaLaunch &launch, const Block &block, const LaunchState &state, Span span,
                 u64 bytes) const {
    const Span share = PackPartition().share(block, span);
    const u64 at = share.first * kPackBytes, end = at + share.length * kPackBytes;
    if (share.length != 0)
      sum(launch, state, at, (end < bytes ? end : bytes) - at, reinterpret_cast<u8 *>(launch.output) + at);
  }

  // Only whole packs, as on a GPU.
  void to_windows(const FaLaunch &launch, const Block &block, const LaunchState &state, Span span,
                  u64) const {
    const Span share = PackPartition().share(block, span);
    for (u64 i = share.first; i < share.first + share.length; ++i) {
      Pack pack;
      sum(launch, state, i * kPackBytes, kPackBytes, pack.byte);
      for (u32 r = 0; r < launch.world; ++r)
        store(window(launch, state, r) + i * kPackBytes, pack, Whole{}, 1);
    }
  }

private:
  ReduceSpan loop_;
  const u64 *windows_;

  u8 *window(const FaLaunch &launch, const LaunchState &state, u32 r) const {
    return reinterpret_cast<u8 *>(windows_[r] + window_offset(launch, state));
  }

  void sum(const FaLaunch &launch, const LaunchState &state, u64 at, u64 bytes, u8 *to) const {
    u64 inputs[FA_MAX_RANKS];
    for (u32 r = 0; r < launch.world; ++r)
      inputs[launch.world - 1 - r] = u64(window(launch, state, r));
    loop_({inputs, launch.world, launch.world, at, kPackBytes, bytes, to, nullptr, bytes, 1.0});
  }
};

} // namespace FA_NAMESPACE
