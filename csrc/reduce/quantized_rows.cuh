// Arithmetic and layout of quantised rows: 8-bit and 4-bit numbers with scales. docs/fused.md has the
// formulas, which are the same on every device.
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA
FA_FN float float_of_bits(u32 bits) { return __uint_as_float(bits); }
FA_FN u32 bits_of_float(float value) { return __float_as_uint(value); }
template <class U>
FA_FN U first_of(U unit) {
  return unit;
}
#else
FA_FN float float_of_bits(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
FA_FN u32 bits_of_float(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
// The first lane of a unit.
template <class U>
FA_FN auto first_of(U unit) {
  return unit[0];
}
#endif

// Whether a byte holds two numbers.
FA_FN bool has_halves(const FaFused &norm) { return norm.number_bits == 4; }

// Address of the quantised numbers of a row of the launch.
FA_FN u8 *numbers_of_row(const FaFused &norm, u32 row) {
  return reinterpret_cast<u8 *>(norm.numbers) + row * u64(has_halves(norm) ? norm.row / 2 : norm.row);
}

FA_FN u32 scale_bytes(const FaScales &scales) { return scales.rule == FA_RULE_F32 ? 4 : 1; }

// Address of the scale of a group of a row of the launch.
//
// FA_LAYOUT_128X4 is what matrix products read (cuBLAS, "1D Block Scaling Factors Layout"): a tile has 128
// rows by 4 groups; tiles of the same rows are consecutive; in a tile, rows that are equal modulo 32 are
// together.
FA_FN u8 *scale_address(const FaScales &scales, u32 row, u32 group) {
  const u64 r = scales.first_row + row;
  u64 at = r * scales.groups + group;
  if (scales.layout == FA_LAYOUT_128X4)
    at = (r / 128 * ((scales.groups + 3) / 4) + group / 4) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + group % 4;
  return reinterpret_cast<u8 *>(scales.scales) + at * scale_bytes(scales);
}

// Stores the scale of a group: the bits of a float, or a byte.
FA_FN void store_scale(const FaScales &scales, u32 row, u32 group, u32 bits) {
  u8 *to = scale_address(scales, row, group);
  if (scales.rule == FA_RULE_F32)
    *reinterpret_cast<u32 *>(to) = bits;
  else
    *to = u8(bits);
}

// The largest number of a type.
FA_FN float largest_of(u32 dtype) { return dtype == FA_I8 ? 127.0f : dtype == FA_F8E4M3 ? 448.0f : 57344.0f; }

// The scale that maps the greatest magnitude, given by its bits, to the largest number. It is at least the
// least normal float, so that its inverse is finite and zeros stay zero.
FA_FN float scale_of(u32 greatest, u32 dtype) {
  constexpr float kLeast = 0x1p-126f;
  if (greatest > 0x7F800000)
    return float_of_bits(0x7FFFFFFF);
  const float scale = float_of_bits(greatest) / largest_of(dtype);
  return scale > kLeast ? scale : kLeast;
}

// NaNs are kept.
FA_FN FloatUnit clamp(FloatUnit value, float least, float most) {
  value = value > most ? FloatUnit{} + most : value;
  return value < least ? FloatUnit{} + least : value;
}

// Rounds to nearest, ties to even, and saturates.
template <class Format>
FA_FN ByteUnit saturate_f8(FloatUnit value, Format format, float largest) {
  return ConvertF8<Format>{format}.narrow(clamp(value, -largest, largest));
}

// Rounds to nearest, ties to even, and saturates; a NaN becomes 0. The unit in the last place of the sum is
// 1.
FA_FN ByteUnit saturate_i8(FloatUnit value) {
  const FloatBits bits = bit_cast<FloatBits>(clamp(value, -128.0f, 127.0f) + 0x1.8p23f);
  return bytes_of(value == value ? bits : FloatBits{});
}

// E2M1 of the OCP Microscaling Formats Specification 1.0: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. Values
// are clamped to the largest before conversion.
struct E2M1 {
  static constexpr u32 mantissa = 1, bias = 1, special = 8;
};

constexpr float kLargestE2M1 = 6;

// Moves the sign next to the three other bits, into the lower half of the byte.
FA_FN ByteUnit half_byte(ByteUnit code) { return (code & 7) | (code >> 4 & 8); }

// Rounds to nearest, ties to even, and saturates, in the lower halves of bytes. A NaN becomes the largest
// number.
FA_FN ByteUnit saturate_e2m1(FloatUnit value) { return half_byte(saturate_f8(value, E2M1{}, kLargestE2M1)); }

// The scale of a group of e2m1 from the bits of its greatest magnitude, such that the magnitude, divided by
// the scale and multiplied by the global scale, is 6. It multiplies by the float nearest to 1/6.
FA_FN ByteUnit scale_of_e2m1(u32 greatest, float global) {
  return saturate_f8(FloatUnit{} + float_of_bits(greatest) * 0x1.555556p-3f * global, E4M3{},
                     largest_of(FA_F8E4M3));
}

// A scale in its type, and the factor by which elements are quantised.
struct GroupScale {
  u32 bits;
  float inverse;
};

// The scale of a group from the bits of its greatest magnitude.
FA_FN GroupScale scale_of_group(const FaFused &norm, u32 greatest) {
  if (norm.scales.rule == FA_RULE_F32) {
    const float scale = scale_of(greatest, norm.dtype);
    return {bits_of_float(scale), 1.0f / scale};
  }
  const float global = *reinterpret_cast<const float *>(norm.global_scale);
  const ByteUnit scale = scale_of_e2m1(greatest, global);
  const float value = first_of(ConvertF8<E4M3>{}.widen(scale));
  // 0 if the scale is 0.
  return {first_of(scale), value == 0 ? 0 : global / value};
}

// The factor for a scale that is given.
FA_FN float given_inverse(const FaFused &norm) {
  return 1.0f / *reinterpret_cast<const float *>(norm.scales.scales);
}

} // namespace FA_NAMESPACE
