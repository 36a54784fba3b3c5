// The arithmetic of quantised transport, specified to the bit in docs/quantized.md. It is the same on every
// device: f32 products and sums, and bit operations.
#pragma once

#include "../core/quantized_layout.cuh"
#include "element.cuh"

namespace FA_NAMESPACE {

FA_FN float float_of(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

FA_FN u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Two's complement integers. Adding a float whose unit in the last place is 1 rounds to nearest, ties to
// even.
struct Int8 {
  static constexpr float kMost = 127;

  FA_FN FloatUnit widen(ByteUnit values) const {
    const FloatBits integers = (words_of(values) ^ 0x80) - 0x80;
    return bit_cast<FloatUnit>(integers + kRounderBits) - kRounder;
  }

  FA_FN ByteUnit narrow(FloatUnit value) const { return bytes_of(bit_cast<FloatBits>(value + kRounder)); }

private:
  static constexpr float kRounder = 12582912; // 1.5 * 2^23
  static constexpr u32 kRounderBits = 0x4B400000;
};

// Never NaN: the group's scale is NaN instead.
struct Float8 : Convert<F8E4M3> {
  static constexpr float kMost = 448;
};

// The scale of a group, from the bits of its largest magnitude: that magnitude divided by the largest value
// of the format, rounded up to 8 bits of significand, and at least the least normal float. If an element is
// not finite, the scale is NaN, which makes the whole group NaN.
FA_FN float group_scale(u32 magnitude, float most) {
  constexpr u32 kInfinity = 0x7F800000, kNan = 0x7FC00000, kLeast = 0x00800000, kDropped = 0xFFFF;
#if FA_CUDA
  const u32 quotient = bits_of(__fdiv_rn(float_of(magnitude), most));
#else
  const u32 quotient = bits_of(float_of(magnitude) / most);
#endif
  const u32 rounded = (quotient + kDropped) & ~kDropped;
  const u32 scale = rounded < kLeast ? kLeast : rounded;
  return float_of(magnitude < kInfinity ? scale : kNan);
}

// The factor by which elements are quantised.
FA_FN float inverse_of(float scale) {
#if FA_CUDA
  return __fdiv_rn(1.0f, scale);
#else
  return 1.0f / scale;
#endif
}

FA_FN u16 scale_bits(float scale) { return u16(bits_of(scale) >> 16); }
FA_FN float scale_of(u16 bits) { return float_of(u32(bits) << 16); }

#if !FA_CUDA

// The typed loops of the host, which the algorithm calls through a table. Each handles consecutive groups.
struct QuantizedLoops {
  // `count` is in elements; the last group may be partial.
  void (*quantize)(const u8 *from, u64 count, Groups to);
  void (*dequantize)(Groups from, u8 *to, u64 count);
  // Sums in the order of the inputs, and quantises.
  void (*sum)(const Groups *from, u32 count, Groups to, u64 groups);
};

#endif

} // namespace FA_NAMESPACE
