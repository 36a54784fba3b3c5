// Quantised transport on the host: runs of groups, by the typed loops of the call.
#pragma once

#include "../core/inputs.cuh"
#include "../reduce/quantized_groups.cuh"

namespace FA_NAMESPACE {

class QuantizedTransport {
public:
  QuantizedTransport(const QuantizedLoops &loops, const FaLaunch &launch)
      : loops_(loops), launch_(launch), element_(element_bytes(launch.dtype)) {}

  // Quantises this block's share of a slice of the input.
  void quantize(const Block &block, const Slices &slices, Span slice, Groups to) const {
    const Span own = share(block, slices, slice);
    const u64 first = (slice.first + own.first) * kGroup;
    loops_.quantize(reinterpret_cast<const u8 *>(launch_.input) + first * element_, elements(slice, own),
                    after(to, own.first));
  }

  void dequantize(const Block &block, const Slices &slices, Span slice, Groups from) const {
    const Span own = share(block, slices, slice);
    const u64 first = (slice.first + own.first) * kGroup;
    loops_.dequantize(after(from, own.first), reinterpret_cast<u8 *>(launch_.output) + first * element_,
                      elements(slice, own));
  }

  // from(r) and to(r) return the groups of rank r.
  template <class From, class To>
  void sum(const Block &block, const Slices &slices, Span slice, From from, To to) const {
    // A run that is copied to the peers stays in the first-level cache.
    constexpr u64 kRun = 64;
    const Span own = share(block, slices, slice);
    for (u64 done = 0; done < own.length; done += kRun) {
      const u64 at = own.first + done, length = own.length - done < kRun ? own.length - done : kRun;
      Groups inputs[FA_MAX_RANKS];
      for (u32 r = 0; r < launch_.world; ++r)
        inputs[r] = after(from(r), at);
      const Groups result = after(to(launch_.rank), at);
      loops_.sum(inputs, launch_.world, result, length);
      for (u32 step = 1; step < launch_.world; ++step) {
        const Groups peers = after(to((launch_.rank + step) % launch_.world), at);
        __builtin_memcpy(peers.values, result.values, length * kGroup);
        __builtin_memcpy(peers.scales, result.scales, length * sizeof(*result.scales));
      }
    }
  }

private:
  const QuantizedLoops &loops_;
  const FaLaunch &launch_;
  u64 element_;

  static Groups after(Groups groups, u64 done) {
    return {groups.values + done * kGroup, groups.scales + done};
  }

  // A block's share does not depend on the slice's length, so that block b of every rank has the same groups.
  static Span share(const Block &block, const Slices &slices, Span slice) {
    const auto share = block.share(slices.each);
    const u64 first = share.first < slice.length ? share.first : slice.length;
    return {first, (share.last < slice.length ? share.last : slice.length) - first};
  }

  // Number of elements in a share of a slice: the message's last group may be partial.
  u64 elements(Span slice, Span own) const {
    const u64 first = (slice.first + own.first) * kGroup, all = own.length * kGroup;
    const u64 left = first < launch_.count ? launch_.count - first : 0;
    return left < all ? left : all;
  }
};

} // namespace FA_NAMESPACE
