// Quantised transport on a GPU: eight elements for each thread, so four threads for each group. Element type
// and format are selected at run time: the kernel is bound by the links, so one is enough for all.
#pragma once

#include "../core/inputs.cuh"
#include "../reduce/quantized_groups.cuh"

namespace FA_NAMESPACE {

class QuantizedTransport {
  static constexpr u32 kLanes = 8, kThreads = kGroup / kLanes;
  static_assert(kThreads == 4, "largest_magnitude() exchanges in two steps");
  // Number of groups whose loads are in flight together.
  static constexpr u32 kBatch = 4;

  // A thread's elements of a group, quantised or not.
  struct Quantized {
    u32 values[2]; // in words: a GPU has no wider arithmetic
    float scale;
  };
  struct Elements {
    float lane[kLanes];
  };

public:
  FA_FN explicit QuantizedTransport(const FaLaunch &launch)
      : launch_(launch), bytes_(message_bytes(launch)), int8_(launch.transport == FA_TRANSPORT_INT8) {}

  // Quantises this block's share of a slice of the input. The share does not depend on the slice's length.
  template <class Block>
  FA_FN void quantize(const Block &block, const Slices &, Span slice, Groups to) const {
    const u8 *input = reinterpret_cast<const u8 *>(launch_.input);
    block.for_each(slice.length * kThreads,
                   [&](Index i) { put(to, i, quantized(load_elements(input, slice.first * kThreads + i))); });
  }

  template <class Block>
  FA_FN void dequantize(const Block &block, const Slices &, Span slice, Groups from) const {
    u8 *output = reinterpret_cast<u8 *>(launch_.output);
    block.for_each(slice.length * kThreads, [&](Index i) {
      Elements elements = {};
      add(&elements, get(from, i));
      store_elements(output, slice.first * kThreads + i, elements);
    });
  }

  // from(r) and to(r) return the groups of rank r.
  template <class Block, class From, class To>
  FA_FN void sum(const Block &block, const Slices &, Span slice, From from, To to) const {
    block.for_each(slice.length * kThreads, [&](Index i) {
      Elements sum = {};
      FA_NO_UNROLL
      for (u32 r = 0; r < launch_.world; r += kBatch) {
        Quantized inputs[kBatch];
        FA_UNROLL
        for (u32 k = 0; k < kBatch; ++k)
          inputs[k] = get(from(r + k < launch_.world ? r + k : r), i);
        // One loop body for all: the next input moves to the front.
        FA_NO_UNROLL
        for (u32 k = r; k < min(r + kBatch, launch_.world); ++k) {
          add(&sum, inputs[0]);
          FA_UNROLL
          for (u32 next = 1; next < kBatch; ++next)
            inputs[next - 1] = inputs[next];
        }
      }
      const Quantized result = quantized(sum);
      FA_NO_UNROLL
      for (u32 step = 0; step < launch_.world; ++step)
        put(to((launch_.rank + step) % launch_.world), i, result);
    });
  }

private:
  const FaLaunch &launch_;
  u64 bytes_;
  bool int8_;

  static FA_FN Quantized get(Groups from, Index i) {
    __builtin_assume(__isGlobal(from.values));
    __builtin_assume(__isGlobal(from.scales));
    const uint2 values = reinterpret_cast<const uint2 *>(from.values)[i];
    return {{values.x, values.y}, scale_of(from.scales[i / kThreads])};
  }

  static FA_FN void put(Groups to, Index i, const Quantized &quantized) {
    __builtin_assume(__isGlobal(to.values));
    __builtin_assume(__isGlobal(to.scales));
    reinterpret_cast<uint2 *>(to.values)[i] = make_uint2(quantized.values[0], quantized.values[1]);
    if (i % kThreads == 0)
      to.scales[i / kThreads] = scale_bits(quantized.scale);
  }

  // The bits of the largest magnitude of a group, on each of its threads. They are adjacent lanes of a warp;
  // either all of them have a part of a slice, or none.
  static FA_FN u32 largest_magnitude(const Elements &elements) {
    u32 most = 0;
    FA_UNROLL
    for (u32 k = 0; k < kLanes; ++k)
      most = max(most, bits_of(elements.lane[k]) & 0x7FFFFFFF);
    const u32 group = 0xFu << (threadIdx.x % 32 / kThreads * kThreads);
    most = max(most, __shfl_xor_sync(group, most, 1));
    return max(most, __shfl_xor_sync(group, most, 2));
  }

  FA_FN Quantized quantized(const Elements &elements) const {
    const u32 magnitude = largest_magnitude(elements);
    const float scale = group_scale(magnitude, int8_ ? Int8::kMost : Float8::kMost);
    return int8_ ? narrow(Int8{}, elements, scale) : narrow(Float8{}, elements, scale);
  }

  template <class Format>
  static FA_FN Quantized narrow(Format format, const Elements &elements, float scale) {
    const float inverse = inverse_of(scale);
    Quantized result = {{0, 0}, scale};
    FA_UNROLL
    for (u32 k = 0; k < kLanes; ++k)
      result.values[k / 4] |= u32(format.narrow(elements.lane[k] * inverse)) << 8 * (k % 4);
    return result;
  }

  FA_FN void add(Elements *sum, const Quantized &input) const {
    if (int8_)
      add(Int8{}, sum, input);
    else
      add(Float8{}, sum, input);
  }

  template <class Format>
  static FA_FN void add(Format format, Elements *sum, const Quantized &input) {
    FA_UNROLL
    for (u32 k = 0; k < kLanes; ++k)
      sum->lane[k] += format.widen(u8(input.values[k / 4] >> 8 * (k % 4))) * input.scale;
  }

  // How much of the pack at byte `at` of the message exists.
  FA_FN Extent extent(u64 at, u64 address) const {
    const u64 left = at < bytes_ ? bytes_ - at : 0;
    return {left < kPackBytes ? u32(left) : kPackBytes, left >= kPackBytes && pack_aligned(address)};
  }

  // Elements kLanes * i to kLanes * i + 7 of the message; zero beyond its end.
  FA_FN Elements load_elements(const u8 *from, Index i) const {
    const u32 granule = granule_of(u64(from) | bytes_);
    const u64 at = u64(i) * kPackBytes * (launch_.dtype == FA_F32 ? 2 : 1);
    const Pack pack = load(from + at, extent(at, u64(from)), granule);
    Elements elements;
    if (launch_.dtype == FA_F32) {
      const u64 next = at + kPackBytes;
      const Pack second = load(from + next, extent(next, u64(from)), granule);
      FA_UNROLL
      for (u32 k = 0; k < kLanes; ++k) {
        const Pack &half = k < kLanes / 2 ? pack : second;
        elements.lane[k] = float_of(half.word[k % 4]);
      }
    } else {
      FA_UNROLL
      for (u32 k = 0; k < kLanes; ++k) {
        const u16 bits = u16(pack.word[k / 2] >> 16 * (k % 2));
        elements.lane[k] = launch_.dtype == FA_F16 ? Convert<F16>::widen(bits) : Convert<Bf16>::widen(bits);
      }
    }
    return elements;
  }

  FA_FN void store_elements(u8 *to, Index i, const Elements &elements) const {
    const u32 granule = granule_of(u64(to) | bytes_);
    const u64 at = u64(i) * kPackBytes * (launch_.dtype == FA_F32 ? 2 : 1);
    Pack pack = {};
    if (launch_.dtype == FA_F32) {
      Pack second = {};
      FA_UNROLL
      for (u32 k = 0; k < kLanes; ++k) {
        const float x = elements.lane[k];
        Pack &half = k < kLanes / 2 ? pack : second;
        half.word[k % 4] = bits_of(x == x ? x : canonical_nan<float>());
      }
      const u64 next = at + kPackBytes;
      store(to + next, second, extent(next, u64(to)), granule);
    } else {
      FA_UNROLL
      for (u32 k = 0; k < kLanes; ++k) {
        const float x = elements.lane[k];
        const u32 bits = launch_.dtype == FA_F16 ? Convert<F16>::narrow(x) : Convert<Bf16>::narrow(x);
        pack.word[k / 2] |= bits << 16 * (k % 2);
      }
    }
    store(to + at, pack, extent(at, u64(to)), granule);
  }
};

} // namespace FA_NAMESPACE
