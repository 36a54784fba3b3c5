// Quantised rows on GPUs: stores normalised rows, or packs of them, as 8-bit or 4-bit numbers with scales.
#pragma once

#include "../core/block.cuh"
#include "../reduce/quantized_rows.cuh"
#include "../reduce/rows.cuh"

namespace FA_NAMESPACE {

FA_FN u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

// The maximum over all threads of a block. The block must sync before it calls this again.
template <class Block>
FA_FN u32 greatest_of(const Block &block, u32 value) {
  constexpr u32 kWarp = 32;
  __shared__ u32 warps[kWarp];
  value = __reduce_max_sync(0xFFFFFFFF, value);
  if (threadIdx.x % kWarp == 0)
    warps[threadIdx.x / kWarp] = value;
  block.sync();
  value = 0;
  FA_NO_UNROLL
  for (u32 warp = 0; warp < blockDim.x / kWarp; ++warp)
    value = max(value, warps[warp]);
  return value;
}

template <class T>
FA_FN LanesOf<T, kPackBytes / sizeof(T)> widened_pack(const Pack &pack) {
  constexpr u32 kEach = kPackBytes / sizeof(T);
  return widen<T, kEach>(*reinterpret_cast<const Elements<T, kEach> *>(&pack));
}

// The bits of the greatest magnitude of a pack.
template <class T>
FA_FN u32 greatest_of_pack(const Pack &pack) {
  u32 greatest = 0;
  for (float x : widened_pack<T>(pack).unit)
    greatest = max(greatest, magnitude_of(x));
  return greatest;
}

// Quantises a pack of a normalised row, from element i on. All lanes of a warp call it, with consecutive
// packs that begin at a whole group; elements beyond the end of the row are zeros. `greatest`: the greatest
// magnitude of the row, if it has one scale. Rows of 4-bit numbers are whole bytes.
template <class T>
FA_OUTLINED void put_pack(const FaFused &norm, u32 row, u32 i, Pack pack, u32 greatest) {
  constexpr u32 kEach = kPackBytes / sizeof(T);
  // In registers, at once.
  const FaScales scales = norm.scales;
  const u32 scaling = norm.scaling, group = scales.group, end = norm.row;
  const bool halves = has_halves(norm), integers = !halves & (norm.dtype == FA_I8);
  const NumberFormat format = format_of(norm);
  u8 *to = numbers_of_row(norm, row);
  const float *given = reinterpret_cast<const float *>(scaling == FA_SCALE_GIVEN ? scales.scales : norm.global_scale);
  const float from_memory = given == nullptr ? 0 : *given;
  const auto x = widened_pack<T>(pack);
  GroupScale scale = {0, 1.0f / from_memory};
  if (scaling != FA_SCALE_GIVEN) {
    if (group != 0) {
      greatest = 0;
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        greatest = max(greatest, magnitude_of(x.unit[e]));
      FA_NO_UNROLL
      for (u32 half = group / kEach / 2; half > 0; half /= 2)
        greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFF, greatest, half));
    }
    scale = scale_of_group(scales.rule, integers ? 127.0f : format.largest, from_memory, greatest);
  }
  if (i >= end)
    return;
  u32 words[2] = {};
  const u32 bits = halves ? 4 : 8;
  if (integers) {
    FA_UNROLL
    for (u32 e = 0; e < kEach; ++e)
      words[e / 4] |= u32(saturate_i8(x.unit[e] * scale.inverse)) << e % 4 * 8;
  } else {
    FA_UNROLL
    for (u32 e = 0; e < kEach; ++e)
      words[e / 4] |= format.narrow(x.unit[e] * scale.inverse) << e % 4 * bits;
  }
  to += i * bits / 8;
  if (halves)
    words[0] |= words[1] << 16;
  if (end - i >= kEach && u64(to) % (kEach * bits / 8) == 0) {
    if (!halves && kEach == 8)
      *reinterpret_cast<uint2 *>(to) = {words[0], words[1]};
    else if (halves && kEach == 4)
      *reinterpret_cast<u16 *>(to) = u16(words[0]);
    else
      *reinterpret_cast<u32 *>(to) = words[0];
  } else {
    u64 bytes = u64(words[1]) << 32 | words[0];
    FA_NO_UNROLL
    for (u32 left = min(end - i, kEach) * bits / 8; left > 0; --left, bytes >>= 8)
      *to++ = u8(bytes);
  }
  // The lane that has a group's first element. Groups are powers of two.
  if (scaling != FA_SCALE_GIVEN && (group == 0 ? i : i & (group - 1)) == 0)
    store_scale(scales, row, group == 0 ? 0 : i >> (31 - __clz(group)), scale.bits);
}

} // namespace FA_NAMESPACE
