// Integers of any width and sign, told at run time: all of them share a kernel on GPUs. A word of 64 bits has
// eight elements, two or one, its fields, and is reduced as a whole, by arithmetic that carries nothing from
// a field into the next (Lamport, "Multiple byte processing with full-word instructions", 1975; Warren,
// "Hacker's Delight", chapter 2). The bits are those of the reductions by type in reduce/reduction.cuh.
#pragma once

#include "../core/inputs.cuh"
#include "../reduce/reduction.cuh"

namespace FA_NAMESPACE {

// A word of them.
struct AnyInteger {
  u64 fields;
};

// N words.
template <u32 N>
class Reduction<AnyInteger, AnyOp, N> {
public:
  FA_FN Reduction(AnyOp op, u32 world) : op_(op.code()), world_(world), bits_(8 * element_bytes(op.dtype)) {
    constexpr u32 kSigned = 1u << FA_I8 | 1u << FA_I32 | 1u << FA_I64;
    const bool ordered = op_ == FA_MIN || op_ == FA_MAX || op_ == FA_AVG;
    flip_ = ordered && (kSigned >> op.dtype & 1) != 0 ? highest() : 0;
    const u64 neutral = op_ == FA_PROD ? lowest() : op_ == FA_MIN || op_ == FA_BAND ? ~u64(0) : 0;
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      value_[i] = neutral;
      odd_[i] = 0;
    }
  }

  FA_FN void add(const Elements<AnyInteger, N> &elements) {
    u64 x[N];
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      x[i] = elements.unit[i].fields ^ flip_;
    switch (op_) {
    case FA_PROD: return multiply(x);
    case FA_MIN:
    case FA_MAX:
      return each(x, [&](u64 a, u64 b) {
        const u64 take = op_ == FA_MIN ? less(b, a) : less(a, b);
        return (b & take) | (a & ~take);
      });
    case FA_BAND: return each(x, [](u64 a, u64 b) { return a & b; });
    case FA_BOR: return each(x, [](u64 a, u64 b) { return a | b; });
    case FA_BXOR: return each(x, [](u64 a, u64 b) { return a ^ b; });
    case FA_AVG: return add_wide(x);
    default:
      // The highest bit of each field apart, which is where a carry would go over.
      return each(
          x, [&](u64 a, u64 b) { return ((a & ~highest()) + (b & ~highest())) ^ ((a ^ b) & highest()); });
    }
  }

  FA_FN Elements<AnyInteger, N> finish() const { return op_ == FA_AVG ? average(*this) : finish(true); }

  // Of an operation that is no average: its sums do not travel as elements (Algorithm::can_reduce).
  FA_FN Elements<AnyInteger, N> finish(bool) const {
    Elements<AnyInteger, N> result;
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      result.unit[i].fields = value_[i] ^ flip_;
    return result;
  }

private:
  u32 op_, world_;
  u32 bits_; // of a field
  // Signed fields are ordered as unsigned ones are, and can be added without signs, with this bit changed.
  u64 flip_;
  // An average sums fields of twice the width, the even ones here and the odd ones there; of 64 bits, sums
  // here and carries there. 16 ranks' sum of a field has at most 4 bits more than it.
  u64 value_[N], odd_[N];

  // The lowest bit of each field, and the highest.
  FA_FN u64 lowest() const { return bits_ == 8 ? 0x0101010101010101 : bits_ == 32 ? 0x0000000100000001 : 1; }
  FA_FN u64 highest() const { return lowest() << (bits_ - 1); }

  template <class F>
  FA_FN void each(const u64 *x, F f) {
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      value_[i] = f(value_[i], x[i]);
  }

  // All ones in each field of which a's is less than b's, unsigned.
  FA_FN u64 less(u64 a, u64 b) const {
    const u64 high = highest();
    // The highest bit of each: whether the bits below are no less.
    const u64 rest = (a | high) - (b & ~high);
    const u64 lower = ((~a & b) | (~(a ^ b) & ~rest)) & high;
    return lower | (lower - (lower >> (bits_ - 1)));
  }

  FA_FN void multiply(const u64 *x) {
    if (bits_ == 64)
      return each(x, [](u64 a, u64 b) { return a * b; });
    if (bits_ == 32)
      return multiply_halves(x, [](u32 a, u32 b) { return a * b; });
    multiply_halves(x, [](u32 a, u32 b) {
      u32 product = 0;
      FA_UNROLL
      for (u32 at = 0; at < 32; at += 8)
        product |= ((a & 0xFFu << at) * (b >> at)) & 0xFFu << at;
      return product;
    });
  }
  template <class F>
  FA_FN void multiply_halves(const u64 *x, F f) {
    each(x, [&](u64 a, u64 b) { return u64(f(u32(a >> 32), u32(b >> 32))) << 32 | f(u32(a), u32(b)); });
  }

  FA_FN void add_wide(const u64 *x) {
    const u64 even = bits_ == 8 ? 0x00FF00FF00FF00FF : bits_ == 32 ? 0x00000000FFFFFFFF : ~u64(0);
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      value_[i] += x[i] & even;
      odd_[i] += bits_ == 64 ? u64(value_[i] < x[i]) : x[i] >> bits_ & even;
    }
  }

  // A function: it is much code, of one operation.
  static FA_CALL Elements<AnyInteger, N> average(Reduction sums) { return sums.average(); }
  FA_FN Elements<AnyInteger, N> average() const {
    // Division by the number of ranks, which is at most 16, is by its reciprocal: that is too large by less
    // than 1 / 2^kShift, and what is divided is less than 2^20.
    const u32 reciprocal = ((1u << kShift) - 1) / world_ + 1;
    Elements<AnyInteger, N> result;
    if (bits_ == 8) {
      average_bytes(reciprocal, &result);
    } else if (bits_ == 32) {
      FA_UNROLL
      for (u32 i = 0; i < N; ++i)
        result.unit[i].fields =
            u64(average_of(odd_[i], reciprocal)) << 32 | average_of(value_[i], reciprocal);
    } else {
      FA_UNROLL
      for (u32 i = 0; i < N; ++i)
        result.unit[i].fields = average_of(value_[i], odd_[i], reciprocal);
    }
    return result;
  }

  static constexpr u32 kShift = 24;
  static FA_FN u32 divided(u32 value, u32 reciprocal) { return u32(u64(value) * reciprocal >> kShift); }

  // 32 bits of a number, digit by digit. `rest` is the remainder of the bits above, and then that of these.
  FA_FN u32 divided(u32 *rest, u32 bits, u32 reciprocal) const {
    const u32 upper = *rest << 16 | bits >> 16, high = divided(upper, reciprocal);
    const u32 lower = (upper - high * world_) << 16 | (bits & 0xFFFF), low = divided(lower, reciprocal);
    *rest = lower - low * world_;
    return high << 16 | low;
  }

  // Averages are toward zero: of magnitudes, from whose sums is taken what flipping has added.
  FA_FN u32 average_of(u64 sum, u32 reciprocal) const {
    const i64 all = i64(sum) - (flip_ != 0 ? i64(world_) << 31 : 0);
    const u64 magnitude = u64(all < 0 ? -all : all);
    u32 rest = u32(magnitude >> 32);
    const u32 result = divided(&rest, u32(magnitude), reciprocal);
    return all < 0 ? 0 - result : result;
  }
  FA_FN u64 average_of(u64 low, u64 high, u32 reciprocal) const {
    const u64 added = flip_ != 0 ? u64(world_) << 63 : 0, added_high = flip_ != 0 ? world_ >> 1 : 0;
    const bool negative = high < added_high || (high == added_high && low < added);
    u32 rest = u32(negative ? added_high - high - (added < low) : high - added_high - (low < added));
    const u64 magnitude = negative ? added - low : low - added;
    const u32 upper = divided(&rest, u32(magnitude >> 32), reciprocal);
    const u64 result = u64(upper) << 32 | divided(&rest, u32(magnitude), reciprocal);
    return negative ? 0 - result : result;
  }

  // Of an even and an odd field of each word at a time. 2^16 is enough for sums of bytes.
  FA_FN void average_bytes(u32 reciprocal, Elements<AnyInteger, N> *result) const {
    const i32 added = flip_ != 0 ? i32(world_) << 7 : 0;
    const u32 factor = (reciprocal + 255) >> (kShift - 16);
    const auto of = [&](u64 sum) {
      const i32 all = i32(sum & 0xFFFF) - added;
      const u32 quotient = u32(all < 0 ? -all : all) * factor >> 16;
      return (all < 0 ? 0 - quotient : quotient) & 0xFF;
    };
    u64 even[N], odd[N], words[N];
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      even[i] = value_[i];
      odd[i] = odd_[i];
      words[i] = 0;
    }
    FA_ROLL
    for (u32 at = 0; at < 4; ++at) {
      FA_UNROLL
      for (u32 i = 0; i < N; ++i) {
        words[i] = u64(of(odd[i]) << 8 | of(even[i])) << 48 | words[i] >> 16;
        even[i] >>= 16;
        odd[i] >>= 16;
      }
    }
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      result->unit[i].fields = words[i];
  }
};

} // namespace FA_NAMESPACE
