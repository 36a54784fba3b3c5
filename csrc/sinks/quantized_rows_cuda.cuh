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

// The maximum over `lanes` consecutive lanes of a warp, a power of two; each lane of the warp calls it. Not
// by one redux for each group: its result is in a register of the whole warp, so that groups would take
// turns.
FA_FN u32 greatest_of_lanes(u32 value, u32 lanes) {
  FA_NO_UNROLL
  for (u32 half = lanes / 2; half > 0; half /= 2)
    value = max(value, __shfl_xor_sync(0xFFFFFFFF, value, half));
  return value;
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

constexpr u32 kInfinity = 0x7F800000; // the bits of a float

// Whether the GPU converts to 8-bit floats. Only finite numbers: what it makes of a NaN is not specified for
// e5m2.
FA_FN constexpr bool has_narrow_four() {
#if __CUDA_ARCH__ >= 890
  return true;
#else
  return false;
#endif
}

// Four 8-bit floats, rounded to nearest, ties to even, and saturated, as by NumberFormat::narrow(): e4m3, or
// e5m2.
FA_FN u32 narrow_four_f8(bool is_e4m3, const float *x) {
  u32 word = 0;
#if __CUDA_ARCH__ >= 890
#define FA_NARROW_FOUR(pair, word)                                                                           \
  asm("{ .reg .b16 low, high;\n"                                                                             \
      "cvt.rn.satfinite." pair ".f32 low, %2, %1;\n"                                                         \
      "cvt.rn.satfinite." pair ".f32 high, %4, %3;\n"                                                        \
      "mov.b32 %0, {low, high}; }"                                                                           \
      : "=r"(word)                                                                                           \
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]))
  u32 other = 0;
  FA_NARROW_FOUR("e4m3x2", word);
  FA_NARROW_FOUR("e5m2x2", other);
  word = is_e4m3 ? word : other; // without a branch, which takes longer
#undef FA_NARROW_FOUR
#else
  (void)is_e4m3, (void)x;
#endif
  return word;
}

// Quantises packs of a normalised row.
template <class T>
class PackQuantizer {
  static constexpr u32 kEach = kPackBytes / sizeof(T);

public:
  PackQuantizer() = default;
  // Loads all operands at once.
  FA_FN PackQuantizer(const FaFused &norm, u32 row)
      : scales_(norm.scales), end_(norm.row), bits_(has_halves(norm) ? 4 : 8),
        is_given_(norm.scaling == FA_SCALE_GIVEN), integers_(bits_ == 8 && norm.dtype == FA_I8),
        floats_(bits_ == 8 && norm.dtype != FA_I8), format_(format_of(norm)), to_(numbers_of_row(norm, row)),
        whole_(u64(to_) % (kEach * bits_ / 8) == 0) {
    const u64 scale = is_given_ ? norm.scales.scales : norm.global_scale;
    load_if(scale != 0, reinterpret_cast<const u8 *>(scale), reinterpret_cast<u32 *>(&scale_));
  }

  // Quantises the pack from element i on. All lanes of a warp call it, with consecutive packs that begin at a
  // whole group; elements beyond the end of the row are zeros. `greatest`: the greatest magnitude of the row,
  // if it has one scale; of the pack, if that is given. `scale_to`: that of scale_of_pack(). Rows of 4-bit
  // numbers are whole bytes.
  FA_FN void put(u32 i, const Pack &pack, u32 greatest, u8 *scale_to) const {
    auto x = widened_pack<T>(pack);
    const u32 group = scales_.group;
    if (group != 0)
      greatest = greatest_of_lanes(greatest_of_pack<T>(pack), group / kEach);
    GroupScale scale = {0, 0};
    if (is_given_)
      scale.inverse = reciprocal(scale_);
    else
      scale = scale_of_group(scales_.rule, integers_ ? 127.0f : format_.largest, scale_, greatest);
    if (i >= end_)
      return;
    x = map(x, [&](float value) { return value * scale.inverse; });
    u32 words[2] = {};
    if (has_narrow_four() && floats_ & (max(greatest, magnitude_of(scale.inverse)) < kInfinity)) {
      // No product is a NaN.
      FA_UNROLL
      for (u32 e = 0; e < kEach; e += 4)
        words[e / 4] = narrow_four_f8(format_.mantissa == e4m3().mantissa, x.unit + e);
    } else if (integers_) {
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        words[e / 4] |= u32(saturate_i8(x.unit[e])) << e % 4 * 8;
    } else {
      FA_UNROLL
      for (u32 e = 0; e < kEach; ++e)
        words[e / 4] |= format_.narrow(x.unit[e]) << e % 4 * bits_;
    }
    if (bits_ == 4)
      words[0] |= words[1] << 16;
    store_numbers(i, words);
    if (scale_to != nullptr)
      store_scale(scales_, scale_to, group == 0 ? 0 : i >> (31 - __clz(group)), scale.bits);
  }

private:
  FaScales scales_;
  u32 end_, bits_;
  bool is_given_, integers_, floats_;
  NumberFormat format_;
  u8 *to_;
  bool whole_;      // whether whole packs are stored in one access
  float scale_ = 0; // given, or the global one

  FA_FN void store_numbers(u32 i, const u32 (&words)[2]) const {
    u8 *to = to_ + i * bits_ / 8;
    if (whole_ & (end_ - i >= kEach)) {
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
