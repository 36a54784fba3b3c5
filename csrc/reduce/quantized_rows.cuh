// Arithmetic and layout of quantised rows: 8-bit and 4-bit numbers with scales. docs/fused.md has the
// formulas, which are the same on every device.
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

FA_FN float float_of_bits(u32 bits) {
#if FA_CUDA
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Whether each block of FA_SCALED_BLOCK elements has a scale and a byte holds two numbers: all formats of 4
// bits.
FA_FN bool has_scale_blocks(const FaFused &norm) { return norm.number_bits == 4; }

// Address of the quantised numbers of a row of the launch.
FA_FN u8 *numbers_of_row(const FaFused &norm, u32 row) {
  return reinterpret_cast<u8 *>(norm.numbers) + row * u64(has_scale_blocks(norm) ? norm.row / 2 : norm.row);
}

// Address of the scales of a row of the launch, in formats without blocks.
FA_FN float *scales_of_row(const FaFused &norm, u32 row) {
  float *scales = reinterpret_cast<float *>(norm.scales);
  const u64 number = norm.first_row + row;
  switch (norm.scaling) {
  case FA_SCALE_PER_ROW: return scales + number;
  case FA_SCALE_PER_GROUP: return scales + number * ((norm.row + FA_SCALED_GROUP - 1) / FA_SCALED_GROUP);
  default: return scales;
  }
}

// Address of the scale of a block. Tiled scales are laid out as matrix products of that format expect
// (cuBLAS, "1D Block Scaling Factors Layout"): a tile has 128 rows by 4 blocks; tiles of the same rows are
// consecutive; in a tile, rows that are equal modulo 32 are together.
FA_FN u8 *scale_of_block(const FaFused &norm, u32 row, u32 block) {
  u8 *scales = reinterpret_cast<u8 *>(norm.scales);
  const u64 number = norm.first_row + row;
  const u32 blocks = norm.row / FA_SCALED_BLOCK;
  if (norm.scaling == FA_SCALE_NVFP4)
    return scales + number * blocks + block;
  const u64 tile = number / 128 * ((blocks + 3) / 4) + block / 4;
  return scales + tile * 512 + number % 32 * 16 + number / 32 % 4 * 4 + block % 4;
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

// The scale of a block from the bits of its greatest magnitude, such that the magnitude, divided by the scale
// and multiplied by the global scale, is 6. It multiplies by the float nearest to 1/6.
FA_FN ByteUnit scale_of_e2m1(u32 greatest, float global) {
  return saturate_f8(FloatUnit{} + float_of_bits(greatest) * 0x1.555556p-3f * global, E4M3{},
                     largest_of(FA_F8E4M3));
}

// The factor by which the elements of a block are quantised; 0 if the scale is 0.
FA_FN FloatUnit inverse_of_e2m1(ByteUnit scale, float global) {
  const FloatUnit value = ConvertF8<E4M3>{}.widen(scale);
  return value == 0 ? FloatUnit{} : (FloatUnit{} + global) / value;
}

} // namespace FA_NAMESPACE
