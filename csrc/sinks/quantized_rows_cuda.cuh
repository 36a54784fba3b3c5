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
  FA_FN explicit QuantizedRows(const FaFused &norm)
      : norm_(norm), halves_(has_halves(norm)), integers_(!halves_ && norm.dtype == FA_I8),
        format_(format_of(norm)), largest_(largest_of(norm)) {}

  // Quantises a range of a row that begins at an even element and consists of whole groups, except at the
  // row's end. pair(i) returns elements i and i + 1 as floats. combine(&greatest) turns the
  // greatest magnitude of this range into that of the row, on every thread. If it returns false, it has
  // failed, and put() returns false.
  template <class Block, class Pair, class Combine>
  FA_FN bool put(const Block &block, u32 row, ElementRange range, const Pair &pair,
                 const Combine &combine) const {
    u8 *to = numbers_of_row(norm_, row);
    const bool warps = norm_.scales.group != 0, given = norm_.scaling == FA_SCALE_GIVEN;
    // Elements that share a scale are handled together: a row by all threads, a group by a warp; a thread
    // handles one pair at a time. Of small groups a warp handles as many as its threads cover.
    const u32 group = warps ? norm_.scales.group : norm_.row;
    const bool one_pair = warps && group <= 2 * kWarp;
    const u32 each = one_pair ? 2 * kWarp : group;
    const u32 thread = warps ? threadIdx.x % kWarp : threadIdx.x, threads = warps ? kWarp : blockDim.x;
    FA_NO_UNROLL
    for (u32 first = range.begin + (warps ? threadIdx.x / kWarp * each : 0); first < range.end;
         first += blockDim.x / kWarp * each) {
      const u32 end = min(range.end, first + each);
      u32 greatest = 0;
      float inverse = given ? given_inverse(norm_) : 0;
      decltype(pair(first)) x = {};
      // Pass 0 finds the greatest magnitude, unless the scale is given; pass 1 stores the numbers. One loop,
      // because the code of pair() is long.
      FA_NO_UNROLL
      for (u32 pass = given; pass < 2; ++pass) {
        FA_NO_UNROLL
        for (u32 i = first + 2 * thread; i < end; i += 2 * threads) {
          // A thread that has one pair keeps it.
          if (pass == 0 || !one_pair)
            x = pair(i);
          const bool has_second = i + 1 < end;
          if (pass == 0)
            greatest = max(max(greatest, magnitude_of(x.unit[0])), has_second ? magnitude_of(x.unit[1]) : 0);
          else
            put_two(to, i, x, inverse, has_second);
        }
        if (pass != 0)
          continue;
        greatest =
            warps ? greatest_of_lanes(greatest, one_pair ? group / 2 : kWarp) : greatest_of(block, greatest);
        if (!warps && !combine(&greatest))
          return false;
        const GroupScale scale = scale_of_group(norm_, greatest);
        inverse = scale.inverse;
        // The thread that has a group's first element stores the scale.
        const u32 i = first + 2 * thread;
        if (i < end && i % group == 0)
          store_scale(norm_.scales, row, i / group, scale.bits);
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
  // What narrow() needs, in registers: each store of a number could change memory.
  const bool halves_, integers_;
  const AnyFormat format_;
  const float largest_;

  // Chosen field by field: a choice between constants would load them from memory.
  static FA_FN AnyFormat format_of(const FaFused &norm) {
    AnyFormat format = any_format<E5M2>();
    const auto use = [&](bool is_used, AnyFormat other) {
      format = {is_used ? other.mantissa : format.mantissa, is_used ? other.bias : format.bias,
                is_used ? other.special : format.special};
    };
    use(norm.dtype == FA_F8E4M3, any_format<E4M3>());
    use(has_halves(norm), any_format<E2M1>());
    return format;
  }

  static FA_FN u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

  // Stores elements i and i + 1, or only the first if `has_second` is false.
  template <class Two>
  FA_FN void put_two(u8 *to, u32 i, const Two &x, float inverse, bool has_second) const {
    const u32 code = narrow(x.unit[0] * inverse), second = narrow(x.unit[1] * inverse);
    if (halves_) {
      to[i / 2] = u8(code | (has_second ? second << 4 : 0));
      return;
    }
    to[i] = u8(code);
    if (has_second)
      to[i + 1] = u8(second);
  }

  FA_FN u8 narrow(float value) const {
    if (integers_)
      return saturate_i8(value);
    const u8 code = saturate_f8(value, format_, largest_);
    return halves_ ? half_byte(code) : code;
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
