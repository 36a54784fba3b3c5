// Normalised rows as numbers of fewer bits with scales, on GPUs: of a row that one block has, or of what each
// of several has of it.
#pragma once

#include "../core/block.cuh"
#include "../reduce/quantise.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA

// Of a row.
struct ElementRange {
  u32 begin, end;
};

class QuantisedRows {
  static constexpr u32 kWarp = 32;

public:
  FA_FN explicit QuantisedRows(const FaRmsNorm &norm) : norm_(norm) {}

  // What a row is from one even element on to another, which are whole groups or blocks but for the row's
  // last. pair(i) has elements i and i + 1 as floats. meet(&greatest) makes of the greatest of these
  // elements, on every thread, that of the row; false: it cannot, and so cannot this.
  template <class Block, class Pair, class Meet>
  FA_FN bool put(const Block &block, u32 row, ElementRange range, const Pair &pair, const Meet &meet) const {
    u8 *to = reinterpret_cast<u8 *>(norm_.normed) + row * normed_bytes(norm_, 0);
    if (has_blocks(norm_)) {
      put_blocks(row, range, to, pair);
      return true;
    }
    const bool groups = norm_.scaling == FA_SCALE_OF_GROUP;
    const u32 each = groups ? u32(FA_SCALED_GROUP) : norm_.row, warp = threadIdx.x / kWarp;
    const u32 thread = groups ? threadIdx.x % kWarp : threadIdx.x, threads = groups ? kWarp : blockDim.x;
    float *scales = scales_of_row(norm_, row);
    // What has a scale is all threads', or if it is a group a warp's, an element pair a thread's.
    FA_ROLL
    for (u32 first = range.begin + (groups ? warp * each : 0); first < range.end;
         first += blockDim.x / kWarp * each) {
      const u32 end = min(range.end, first + each);
      float own = 0;
      if (norm_.scaling == FA_SCALE_GIVEN) {
        own = *scales;
      } else {
        u32 greatest = 0;
        FA_ROLL
        for (u32 i = first + 2 * thread; i < end; i += 2 * threads) {
          const auto x = pair(i);
          greatest = max(greatest, __float_as_uint(x.unit[0]) & 0x7FFFFFFF);
          if (i + 1 < end)
            greatest = max(greatest, __float_as_uint(x.unit[1]) & 0x7FFFFFFF);
        }
        greatest = groups ? greatest_of_lanes(greatest) : greatest_of(block, greatest);
        if (!groups && !meet(&greatest))
          return false;
        own = scale_of(greatest, norm_.dtype);
        if (thread == 0 && (groups || first == 0))
          scales[first / each] = own;
      }
      const float inverse = __fdiv_rn(1.0f, own);
      FA_ROLL
      for (u32 i = first + 2 * thread; i < end; i += 2 * threads) {
        const auto x = pair(i);
        to[i] = narrow(x.unit[0] * inverse);
        if (i + 1 < end)
          to[i + 1] = narrow(x.unit[1] * inverse);
      }
      if (!groups)
        break;
    }
    return true;
  }

  // Of all threads. Before a block writes there again it has met.
  template <class Block>
  static FA_FN u32 greatest_of(const Block &block, u32 value) {
    __shared__ u32 warps[kWarp];
    value = greatest_of_lanes(value);
    if (threadIdx.x % kWarp == 0)
      warps[threadIdx.x / kWarp] = value;
    block.sync();
    value = 0;
    FA_ROLL
    for (u32 warp = 0; warp < blockDim.x / kWarp; ++warp)
      value = max(value, warps[warp]);
    return value;
  }

private:
  const FaRmsNorm &norm_;

  // In blocks that have a scale each: a block is eight lanes', an element pair a lane's.
  template <class Pair>
  FA_FN void put_blocks(u32 row, ElementRange range, u8 *to, const Pair &pair) const {
    const float global = *reinterpret_cast<const float *>(norm_.global_scale);
    const u32 lane = threadIdx.x % kWarp;
    // All lanes of a warp go round together: they meet.
    FA_ROLL
    for (u32 first = range.begin + 2 * (threadIdx.x - lane); first < range.end; first += 2 * blockDim.x) {
      const u32 i = first + 2 * lane;
      decltype(pair(i)) x = {};
      if (i < range.end)
        x = pair(i);
      const u32 even = __float_as_uint(x.unit[0]) & 0x7FFFFFFF, odd = __float_as_uint(x.unit[1]) & 0x7FFFFFFF;
      const u8 own = scale_of_e2m1(greatest_of_lanes<FA_SCALED_BLOCK / 2>(max(even, odd)), global);
      if (i >= range.end)
        continue;
      const float inverse = inverse_of_e2m1(own, global);
      to[i / 2] = u8(saturate_e2m1(x.unit[0] * inverse) | saturate_e2m1(x.unit[1] * inverse) << 4);
      if (i % FA_SCALED_BLOCK == 0)
        *scale_of_block(norm_, row, i / FA_SCALED_BLOCK) = own;
    }
  }

  FA_FN u8 narrow(float value) const {
    if (norm_.dtype == FA_I8)
      return saturate_i8(value);
    const AnyFormat format = norm_.dtype == FA_F8E4M3 ? AnyFormat{E4M3::mantissa, E4M3::bias, E4M3::special}
                                                      : AnyFormat{E5M2::mantissa, E5M2::bias, E5M2::special};
    return saturate_f8(value, format, largest_of(norm_.dtype));
  }

  // Of so many lanes beside each other.
  template <u32 Lanes = kWarp>
  static FA_FN u32 greatest_of_lanes(u32 value) {
    FA_UNROLL
    for (u32 half = Lanes / 2; half > 0; half /= 2)
      value = max(value, __shfl_xor_sync(0xFFFFFFFF, value, half));
    return value;
  }
};

#endif

} // namespace FA_NAMESPACE
