// Scales of quantised rows, moved in words: a float, or up to four bytes, which are together in every layout.
#pragma once

#include "quantized_rows.cuh"

namespace FA_NAMESPACE {

// Number of bytes of a word of a row's scales.
FA_FN u32 bytes_of_word(const FaScales &scales, u32 word) {
  const u32 left = scales.groups - 4 * word;
  return scales.rule == FA_RULE_F32 || left > 4 ? 4 : left;
}

// Address of a word of a row's scales.
FA_FN u8 *word_address(const FaScales &scales, u32 row, u32 word) {
  return scale_address(scales, row, scales.rule == FA_RULE_F32 ? word : 4 * word);
}

FA_FN u32 load_scales(const FaScales &from, u32 row, u32 word) {
  const u8 *at = word_address(from, row, word);
  const u32 bytes = bytes_of_word(from, word);
  if (bytes == 4 && u64(at) % 4 == 0)
    return *reinterpret_cast<const u32 *>(at);
  u32 scales = 0;
  FA_NO_UNROLL
  for (u32 i = 0; i < bytes; ++i)
    scales |= u32(at[i]) << 8 * i;
  return scales;
}

// Stores a word of a row's scales. `at`: its address.
FA_FN void store_scales(const FaScales &to, u8 *at, u32 word, u32 scales) {
  // In packed columns, the bytes of no group are zeros.
  const u32 bytes = to.layout == FA_LAYOUT_COLUMNS ? 4 : bytes_of_word(to, word);
  if (bytes == 4 && u64(at) % 4 == 0) {
    *reinterpret_cast<u32 *>(at) = scales;
    return;
  }
  FA_NO_UNROLL
  for (u32 i = 0; i < bytes; ++i)
    at[i] = u8(scales >> 8 * i);
}
FA_FN void store_scales(const FaScales &to, u32 row, u32 word, u32 scales) {
  store_scales(to, word_address(to, row, word), word, scales);
}

} // namespace FA_NAMESPACE
