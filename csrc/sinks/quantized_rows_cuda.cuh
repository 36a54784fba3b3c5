// Quantised rows on GPUs: stores normalised rows, or packs of them, as 8-bit or 4-bit numbers with scales.
#pragma once

#include "../core/block.cuh"
#include "../reduce/quantized_rows.cuh"
#include "../reduce/rows.cuh"

namespace FA_NAMESPACE {

FA_FN u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

// The maximum over all threads of a warp.
FA_FN u32 greatest_of_warp(u32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFF, value);
#else
  FA_UNROLL
  for (u32 half = 16; half > 0; half /= 2)
    value = max(value, __shfl_xor_sync(0xFFFFFFFF, value, half));
  return value;
#endif
}

// The maximum over all threads of a block. The block must sync before it calls this again.
template <class Block>
FA_FN u32 greatest_of(const Block &block, u32 value) {
  constexpr u32 kWarp = 32;
  __shared__ u32 warps[kWarp];
  value = greatest_of_warp(value);
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

// Where the lane with the pack from element i on stores the scale of a group: the lane with the group's first
// element. Null for other lanes, and where there are no scales. Groups are powers of two.
FA_FN u8 *scale_of_pack(const FaFused &norm, u32 row, u32 i) {
  const u32 group = norm.scales.group;
  const bool has_scales = norm.scaling != FA_NOT_SCALED && norm.scaling != FA_SCALE_GIVEN;
  if (!has_scales || i >= norm.row || (group == 0 ? i : i & (group - 1)) != 0)
    return nullptr;
  return scale_address(norm.scales, row, group == 0 ? 0 : i >> (31 - __clz(group)));
}

// Quantises packs of a normalised row.
template <class T>
class PackQuantizer {
  static constexpr u32 kEach = kPackBytes / sizeof(T);

public:
  // Loads all operands at once.
  FA_FN PackQuantizer(const FaFused &norm, u32 row)
      : scales_(norm.scales), scaling_(norm.scaling), end_(norm.row), bits_(has_halves(norm) ? 4 : 8),
        integers_(bits_ == 8 && norm.dtype == FA_I8), format_(format_of(norm)),
        to_(numbers_of_row(norm, row)) {
    const float *scale = reinterpret_cast<const float *>(is_given() ? norm.scales.scales : norm.global_scale);
    scale_ = scale == nullptr ? 0 : *scale;
  }

  // Quantises the pack from element i on. All lanes of a warp call it, with consecutive packs that begin at a
  // whole group; elements beyond the end of the row are zeros. `greatest`: the greatest magnitude of the row,
  // if it has one scale. `scale_to`: that of scale_of_pack(). Rows of 4-bit numbers are whole bytes.
  FA_FN void put(u32 i, const Pack &pack, u32 greatest, u8 *scale_to) const {
    const auto x = widened_pack<T>(pack);
    const u32 group = scales_.group;
    if (group != 0) {
      greatest = greatest_of_pack<T>(pack);
      FA_NO_UNROLL
      for (u32 half = group / kEach / 2; half > 0; half /= 2)
        greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFF, greatest, half));
    }
    GroupScale scale = {0, 0};
    if (is_given())
      scale.inverse = 1.0f / scale_;
    else
      scale = scale_of_group(scales_.rule, integers_ ? 127.0f : format_.largest, scale_, greatest);
    if (i >= end_)
      return;
    u32 words[2] = {};
    if (integers_) {
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        words[e / 4] |= u32(saturate_i8(x.unit[e] * scale.inverse)) << e % 4 * 8;
    } else {
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        words[e / 4] |= format_.narrow(x.unit[e] * scale.inverse) << e % 4 * bits_;
    }
    if (bits_ == 4)
      words[0] |= words[1] << 16;
    store_numbers(i, words);
    if (scale_to != nullptr)
      store_scale(scales_, scale_to, group == 0 ? 0 : i >> (31 - __clz(group)), scale.bits);
  }

private:
  const FaScales scales_;
  const u32 scaling_, end_, bits_;
  const bool integers_;
  const NumberFormat format_;
  u8 *const to_;
  float scale_; // given, or the global one

  FA_FN bool is_given() const { return scaling_ == FA_SCALE_GIVEN; }

  FA_FN void store_numbers(u32 i, const u32 (&words)[2]) const {
    u8 *to = to_ + i * bits_ / 8;
    if (end_ - i >= kEach && u64(to) % (kEach * bits_ / 8) == 0) {
      if (bits_ == 8 && kEach == 8)
        *reinterpret_cast<uint2 *>(to) = {words[0], words[1]};
      else if (bits_ == 4 && kEach == 4)
        *reinterpret_cast<u16 *>(to) = u16(words[0]);
      else
        *reinterpret_cast<u32 *>(to) = words[0];
      return;
    }
    u64 bytes = u64(words[1]) << 32 | words[0];
    FA_NO_UNROLL
    for (u32 left = min(end_ - i, kEach) * bits_ / 8; left > 0; --left, bytes >>= 8)
      *to++ = u8(bytes);
  }
};

} // namespace FA_NAMESPACE
