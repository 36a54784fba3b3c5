// Quantised rows on GPUs: stores normalised rows, or a block's range of one, as 8-bit or 4-bit numbers with
// scales.
#pragma once

#include "../core/block.cuh"
#include "../reduce/quantized_rows.cuh"

namespace FA_NAMESPACE {

// Elements of a row.
struct ElementRange {
  u32 begin, end;
};

class QuantizedRows {
  static constexpr u32 kWarp = 32;

public:
  FA_FN explicit QuantizedRows(const FaFused &norm) : norm_(norm) {}

  // Quantises a range of a row that begins at an even element and consists of whole groups or blocks,
  // except at the row's end. pair(i) returns elements i and i + 1 as floats. combine(&greatest) turns the
  // greatest magnitude of this range into that of the row, on every thread. If it returns false, it has
  // failed, and put() returns false.
  template <class Block, class Pair, class Combine>
  FA_FN bool put(const Block &block, u32 row, ElementRange range, const Pair &pair,
                 const Combine &combine) const {
    u8 *to = numbers_of_row(norm_, row);
    const bool blocks = has_scale_blocks(norm_), warps = blocks || norm_.scaling == FA_SCALE_PER_GROUP;
    const bool given = norm_.scaling == FA_SCALE_GIVEN;
    // Elements that share a scale are handled together: a row by all threads, a group by a warp; a thread
    // handles one pair at a time. With blocks of elements, a warp handles as many blocks as its threads
    // cover: eight lanes for each.
    const u32 each = blocks ? 2 * kWarp : warps ? u32(FA_SCALED_GROUP) : norm_.row;
    const u32 thread = warps ? threadIdx.x % kWarp : threadIdx.x, threads = warps ? kWarp : blockDim.x;
    FA_NO_UNROLL
    for (u32 first = range.begin + (warps ? threadIdx.x / kWarp * each : 0); first < range.end;
         first += blockDim.x / kWarp * each) {
      const u32 end = min(range.end, first + each);
      u32 greatest = 0;
      float inverse = given ? __fdiv_rn(1.0f, *scales_of_row(norm_, row)) : 0;
      decltype(pair(first)) x = {};
      // Pass 0 finds the greatest magnitude, unless the scale is given; pass 1 stores the numbers. One loop,
      // because the code of pair() is long.
      FA_NO_UNROLL
      for (u32 pass = given; pass < 2; ++pass) {
        FA_NO_UNROLL
        for (u32 i = first + 2 * thread; i < end; i += 2 * threads) {
          // With blocks of elements a thread has one pair, which it keeps.
          if (pass == 0 || !blocks)
            x = pair(i);
          const bool has_second = i + 1 < end;
          if (pass == 0)
            greatest = max(max(greatest, magnitude_of(x.unit[0])), has_second ? magnitude_of(x.unit[1]) : 0);
          else
            put_two(to, i, x, inverse, blocks, has_second);
        }
        if (pass != 0)
          continue;
        greatest = warps ? greatest_of_lanes(greatest, blocks ? FA_SCALED_BLOCK / 2 : kWarp)
                         : greatest_of(block, greatest);
        if (!warps && !combine(&greatest))
          return false;
        inverse = blocks ? scale_block(row, first + 2 * thread, end, greatest)
                         : scale_elements(row, first / each, thread == 0 && (warps || first == 0), greatest);
      }
      if (!warps)
        break;
    }
    return true;
  }

  // The maximum over all threads. The block must sync before it calls this again.
  template <class Block>
  static FA_FN u32 greatest_of(const Block &block, u32 value) {
    __shared__ u32 warps[kWarp];
    value = greatest_of_lanes(value, kWarp);
    if (threadIdx.x % kWarp == 0)
      warps[threadIdx.x / kWarp] = value;
    block.sync();
    value = 0;
    FA_NO_UNROLL
    for (u32 warp = 0; warp < blockDim.x / kWarp; ++warp)
      value = max(value, warps[warp]);
    return value;
  }

private:
  const FaFused &norm_;

  static FA_FN u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

  // Returns the inverse of the scale of a row or group; one thread stores the scale.
  FA_FN float scale_elements(u32 row, u32 group, bool stores, u32 greatest) const {
    const float own = scale_of(greatest, norm_.dtype);
    if (stores)
      scales_of_row(norm_, row)[group] = own;
    return __fdiv_rn(1.0f, own);
  }

  // Returns the inverse of the scale of the block of elements that contains i; the thread that has the
  // block's first element stores the scale.
  FA_FN float scale_block(u32 row, u32 i, u32 end, u32 greatest) const {
    const float global = *reinterpret_cast<const float *>(norm_.global_scale);
    const u8 own = scale_of_e2m1(greatest, global);
    if (i % FA_SCALED_BLOCK == 0 && i < end)
      *scale_of_block(norm_, row, i / FA_SCALED_BLOCK) = own;
    return inverse_of_e2m1(own, global);
  }

  // Stores elements i and i + 1, or only the first if `has_second` is false. In blocks, both share a byte.
  template <class Two>
  FA_FN void put_two(u8 *to, u32 i, const Two &x, float inverse, bool blocks, bool has_second) const {
    u32 both = 0;
    FA_NO_UNROLL
    for (u32 k = 0; k <= has_second; ++k) {
      const u32 code = narrow((k == 0 ? x.unit[0] : x.unit[1]) * inverse, blocks);
      if (blocks)
        both |= code << 4 * k;
      else
        to[i + k] = u8(code);
    }
    if (blocks)
      to[i / 2] = u8(both);
  }

  FA_FN u8 narrow(float value, bool blocks) const {
    if (!blocks && norm_.dtype == FA_I8)
      return saturate_i8(value);
    const u8 code = saturate_f8(value,
                                blocks                     ? any_format<E2M1>()
                                : norm_.dtype == FA_F8E4M3 ? any_format<E4M3>()
                                                           : any_format<E5M2>(),
                                blocks ? kLargestE2M1 : largest_of(norm_.dtype));
    return blocks ? half_byte(code) : code;
  }

  // The maximum over `lanes` adjacent lanes.
  static FA_FN u32 greatest_of_lanes(u32 value, u32 lanes) {
    FA_NO_UNROLL
    for (u32 half = lanes / 2; half > 0; half /= 2)
      value = max(value, __shfl_xor_sync(0xFFFFFFFF, value, half));
    return value;
  }
};

} // namespace FA_NAMESPACE
