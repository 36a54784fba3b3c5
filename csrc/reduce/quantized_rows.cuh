// Arithmetic and layout of quantised rows: 8-bit and 4-bit numbers with scales. docs/quantized-rows.md has
// the formulas, which are the same on every device.
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
// FA_LAYOUT_COLUMNS has columns of floats, or of words with the bytes of four groups. FA_LAYOUT_128X4 is what
// matrix products read (cuBLAS, "1D Block Scaling Factors Layout"): a tile has 128 rows by 4 groups; tiles of
// the same rows are consecutive; in a tile, rows that are equal modulo 32 are together.
FA_FN u8 *scale_address(const FaScales &scales, u32 row, u32 group) {
  const u64 r = scales.first_row + row, fours = (scales.groups + 3) / 4;
  const u32 bytes = scale_bytes(scales), four = group / 4, of_four = group % 4;
  u64 at = 0;
  switch (FaScaleLayout(scales.layout)) {
  case FA_LAYOUT_ROWS: at = r * scales.groups + group; break;
  case FA_LAYOUT_COLUMNS:
    at = bytes == 4 ? group * scales.stride + r : (four * scales.stride + r) * 4 + of_four;
    break;
  case FA_LAYOUT_128X4: at = (r / 128 * fours + four) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + of_four; break;
  case FA_LAYOUT_8X4: at = (r / 8 * fours + four) * 32 + r % 8 * 4 + of_four; break;
  }
  return reinterpret_cast<u8 *>(scales.scales) + at * bytes;
}

// Stores the scale of a group: the bits of a float, or a byte. The last group of a row also fills its word of
// a column with zeros, which a matrix product multiplies with zeros: the bytes of a NaN would make them NaNs.
// `to`: its address.
FA_FN void store_scale(const FaScales &scales, u8 *to, u32 group, u32 bits) {
  if (scales.rule == FA_RULE_F32) {
    *reinterpret_cast<u32 *>(to) = bits;
    return;
  }
  *to = u8(bits);
  if (scales.layout != FA_LAYOUT_COLUMNS || group + 1 != scales.groups)
    return;
  FA_NO_UNROLL
  while (++group % 4 != 0)
    *++to = 0;
}
FA_FN void store_scale(const FaScales &scales, u32 row, u32 group, u32 bits) {
  store_scale(scales, scale_address(scales, row, group), group, bits);
}

// The scale that maps the greatest magnitude, given by its bits, to the largest number. It is at least the
// least normal float, so that its inverse is finite and zeros stay zero.
FA_FN float scale_of(u32 greatest, float largest) {
  constexpr float kLeast = 0x1p-126f;
  if (greatest > 0x7F800000)
    return float_of_bits(0x7FFFFFFF);
  const float scale = float_of_bits(greatest) / largest;
  return scale > kLeast ? scale : kLeast;
}

// NaNs are kept.
FA_FN FloatUnit clamp(FloatUnit value, float least, float most) {
  value = value > most ? FloatUnit{} + most : value;
  return value < least ? FloatUnit{} + least : value;
}

// A float format of quantised rows: its numbers have `bits` bits.
struct NumberFormat {
  u32 mantissa, bias, bits;
  float largest;

  // Rounds to nearest, ties to even, and saturates, as ConvertF8::narrow() of a clamped value: what is at
  // most `largest` needs fewer operations. A NaN becomes the number with all bits set except the sign.
  FA_FN FloatBits narrow(FloatUnit value) const {
    const u32 dropped = 23 - mantissa;
    const FloatBits all = bit_cast<FloatBits>(value), most = FloatBits{} + bits_of_float(largest);
    const FloatBits own = all & 0x7FFFFFFF, magnitude = own < most ? own : most;
    const FloatBits normal =
        (magnitude + ((1u << (dropped - 1)) - 1 - ((127 - bias) << 23)) + ((magnitude >> dropped) & 1)) >>
        dropped;
    const u32 rounder = (151 - bias - mantissa) << 23;
    const FloatUnit sum = bit_cast<FloatUnit>(magnitude) + float_of_bits(rounder);
    const FloatBits code = magnitude < ((128 - bias) << 23) ? bit_cast<FloatBits>(sum) - rounder : normal;
    const FloatBits with_sign = code | ((all >> (32 - bits)) & (1u << (bits - 1)));
    return value == value ? with_sign : FloatBits{} + ((1u << (bits - 1)) - 1);
  }
};
FA_FN constexpr NumberFormat e4m3() { return {3, 7, 8, 448}; }
FA_FN constexpr NumberFormat e5m2() { return {2, 15, 8, 57344}; }
// E2M1 of the OCP Microscaling Formats Specification 1.0: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. A NaN
// becomes the largest number.
FA_FN constexpr NumberFormat e2m1() { return {1, 1, 4, 6}; }

// The format of numbers that are not integers. Chosen field by field: on a GPU a choice between constants
// would load them from memory.
FA_FN NumberFormat format_of(const FaFused &norm) {
  NumberFormat format = e5m2();
  const auto use = [&](bool is_used, const NumberFormat &other) {
    format = {is_used ? other.mantissa : format.mantissa, is_used ? other.bias : format.bias,
              is_used ? other.bits : format.bits, is_used ? other.largest : format.largest};
  };
  use(norm.dtype == FA_F8E4M3, e4m3());
  use(has_halves(norm), e2m1());
  return format;
}

// Rounds to nearest, ties to even, and saturates; a NaN becomes 0. The unit in the last place of the sum is
// 1.
FA_FN ByteUnit saturate_i8(FloatUnit value) {
  const FloatBits bits = bit_cast<FloatBits>(clamp(value, -128.0f, 127.0f) + 0x1.8p23f);
  return bytes_of(value == value ? bits : FloatBits{});
}

// The largest number of quantised rows.
FA_FN float largest_of(const FaFused &norm) {
  return !has_halves(norm) && norm.dtype == FA_I8 ? 127.0f : format_of(norm).largest;
}

// The scales of groups of e2m1 from their greatest magnitudes, such that a magnitude, divided by
// the scale and multiplied by the global scale, is 6. It multiplies by the float nearest to 1/6.
FA_FN ByteUnit scales_of_e2m1(FloatUnit greatest, float global) {
  return bytes_of(e4m3().narrow(greatest * 0x1.555556p-3f * global));
}

// E8M0 is the exponent of a power of two, with the bias of a float; 255 is NaN, which infinities become, too.
// These are operations on integers, which are the same on every device.
//
// The least power of two that is not below the quotient by which scale_of() divides.
FA_FN u32 e8m0_up(u32 greatest, float largest) {
  const u32 code = (bits_of_float(scale_of(greatest, largest)) + 0x7FFFFF) >> 23;
  return code < 255 ? code : 255;
}

// OCP's rule: the largest power of two that is not above the greatest magnitude, divided by that of the
// largest number.
FA_FN u32 e8m0_floor(u32 greatest, float largest) {
  const u32 exponent = greatest >> 23, subtracted = (bits_of_float(largest) >> 23) - 127;
  return exponent == 255 ? 255 : exponent > subtracted ? exponent - subtracted : 0;
}

// A scale in its type, and the factor by which elements are quantised.
struct GroupScale {
  u32 bits;
  float inverse;
};

// The inverse of a scale below 2^127, as all scales of finite elements are, is a normal float.
FA_FN GroupScale power_of_two(u32 code) {
  return {code, float_of_bits(code == 255 ? 0x7FFFFFFF : (254 - code) << 23)};
}

// The scale of a group from the bits of its greatest magnitude. `global`: the global scale of FA_RULE_E4M3.
FA_FN GroupScale scale_of_group(u32 rule, float largest, float global, u32 greatest) {
  switch (FaScaleRule(rule)) {
  case FA_RULE_F32: {
    const float scale = scale_of(greatest, largest);
    return {bits_of_float(scale), reciprocal(scale)};
  }
  case FA_RULE_E4M3: {
    const ByteUnit scale = scales_of_e2m1(FloatUnit{} + float_of_bits(greatest), global);
    const float value = first_of(ConvertF8<E4M3>{}.widen(scale));
    // 0 if the scale is 0.
    return {first_of(scale), value == 0 ? 0 : global / value};
  }
  case FA_RULE_E8M0_UP: return power_of_two(e8m0_up(greatest, largest));
  case FA_RULE_E8M0_FLOOR: return power_of_two(e8m0_floor(greatest, largest));
  }
  return {};
}

FA_FN GroupScale scale_of_group(const FaFused &norm, u32 greatest) {
  const float *global = reinterpret_cast<const float *>(norm.global_scale);
  return scale_of_group(norm.scales.rule, largest_of(norm), global == nullptr ? 0 : *global, greatest);
}

// The factor for a scale that is given.
FA_FN float given_inverse(const FaFused &norm) {
  return reciprocal(*reinterpret_cast<const float *>(norm.scales.scales));
}

} // namespace FA_NAMESPACE
