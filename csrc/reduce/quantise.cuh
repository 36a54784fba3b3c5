// Normalised rows as 8-bit numbers with scales. docs/fused.md has the formulas, which are the same on every
// device.
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

// The largest number of a type.
FA_FN float largest_of(u32 dtype) { return dtype == FA_I8 ? 127.0f : dtype == FA_F8E4M3 ? 448.0f : 57344.0f; }

// The scale of elements of which the greatest magnitude has these bits, so that it becomes the largest
// number. Of at least the least normal float, whose inverse is finite: so zeros stay zeros.
FA_FN float scale_of(u32 greatest, u32 dtype) {
  constexpr float kLeast = 0x1p-126f;
  if (greatest > 0x7F800000)
    return float_of_bits(0x7FFFFFFF);
  const float scale = float_of_bits(greatest) / largest_of(dtype);
  return scale > kLeast ? scale : kLeast;
}

// NaNs stay.
FA_FN FloatUnit clamp(FloatUnit value, float least, float most) {
  value = value > most ? FloatUnit{} + most : value;
  return value < least ? FloatUnit{} + least : value;
}

// To nearest, ties to even; what is beyond the largest number becomes that.
template <class Format>
FA_FN ByteUnit saturate_f8(FloatUnit value, Format format, float largest) {
  return ConvertF8<Format>{format}.narrow(clamp(value, -largest, largest));
}

// The same; a NaN becomes 0. The last place of the sum is 1.
FA_FN ByteUnit saturate_i8(FloatUnit value) {
  const FloatBits bits = bit_cast<FloatBits>(clamp(value, -128.0f, 127.0f) + 0x1.8p23f);
  return bytes_of(value == value ? bits : FloatBits{});
}

} // namespace FA_NAMESPACE
