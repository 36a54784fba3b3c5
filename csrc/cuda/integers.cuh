// Integers of any width and sign, selected at run time: on GPUs they all share a kernel. A 64-bit word holds
// one, two, four or eight elements, its fields, and is reduced as a whole, by arithmetic that carries nothing
// from one field to the next (Lamport, "Multiple byte processing with full-word instructions", 1975; Warren,
// "Hacker's Delight", chapter 2). Results are the same as in reduce/reduction.cuh.
#pragma once

#include "../core/inputs.cuh"
#include "../reduce/reduction.cuh"

namespace FA_NAMESPACE {

// A word of fields.
struct AnyInteger {
  u64 fields;
};

FA_FN bool is_signed(u32 dtype) {
#define FA_IS_SIGNED(code, ...) | 1u << code
  return ((0 FA_SIGNED(FA_IS_SIGNED, )) >> dtype & 1) != 0;
}

// The arithmetic of words of fields. Fields compare as unsigned numbers.
class PackedIntegers {
public:
  using Value = u64;

  FA_FN explicit PackedIntegers(u32 bits) : bits_(bits), lowest_bits_(every(bits)) {}

  FA_FN u64 zero() const { return 0; }
  FA_FN u64 one() const { return lowest_bits_; }
  FA_FN u64 lowest() const { return 0; }
  FA_FN u64 highest() const { return ~u64(0); }
  FA_FN u64 all_ones() const { return ~u64(0); }
  FA_FN u64 bitwise_and(u64 a, u64 b) const { return a & b; }
  FA_FN u64 bitwise_or(u64 a, u64 b) const { return a | b; }
  FA_FN u64 bitwise_xor(u64 a, u64 b) const { return a ^ b; }
  FA_FN u64 minimum(u64 a, u64 b) const { return chosen(less(b, a), b, a); }
  FA_FN u64 maximum(u64 a, u64 b) const { return chosen(less(a, b), b, a); }

  // Adds the highest bit of each field separately, so that it does not carry into the next field.
  FA_FN u64 add(u64 a, u64 b) const {
    const u64 high = highest_bits();
    return ((a & ~high) + (b & ~high)) ^ ((a ^ b) & high);
  }

  FA_FN u64 multiply(u64 a, u64 b) const {
    return bits_ == 64 ? a * b
                       : u64(multiply_half(u32(a >> 32), u32(b >> 32))) << 32 | multiply_half(u32(a), u32(b));
  }

  FA_FN u64 highest_bits() const { return lowest_bits_ << (bits_ - 1); }
  // All bits of every second field, from the lowest on. With 64-bit fields there is only one.
  FA_FN u64 even_fields() const {
    const u64 even = every(2 * bits_);
    return bits_ == 64 ? ~u64(0) : (even << (bits_ & 63)) - even;
  }

private:
  u32 bits_; // of a field: a power of two, at least 8
  u64 lowest_bits_;

  // Sets bit 0 and every multiple of `bits`.
  static FA_FN constexpr u64 every(u32 bits) {
    return bits == 8    ? 0x0101010101010101
           : bits == 16 ? 0x0001000100010001
           : bits == 32 ? 0x0000000100000001
                        : 1;
  }

  FA_FN u32 multiply_half(u32 a, u32 b) const {
    const u32 field = ~u32(0) >> (32 - bits_);
    u32 product = 0;
    FA_ROLL
    for (u32 at = 0; at < 32; at += bits_)
      product |= ((a & field << at) * (b >> at)) & field << at;
    return product;
  }

  static FA_FN u64 chosen(u64 mask, u64 a, u64 b) { return (a & mask) | (b & ~mask); }

  // All ones in each field in which a is less than b.
  FA_FN u64 less(u64 a, u64 b) const {
    const u64 high = highest_bits();
    // The highest bit of each field says whether a's other bits are not less than b's.
    const u64 rest = (a | high) - (b & ~high);
    const u64 lower = ((~a & b) | (~(a ^ b) & ~rest)) & high;
    return lower | (lower - (lower >> (bits_ - 1)));
  }
};

// The reduction of N words.
template <u32 N>
class Reduction<AnyInteger, AnyOp, N> {
public:
  FA_FN Reduction(AnyOp op, u32 world)
      : op_(op.code()), world_(world), bits_(8 * element_bytes(op.dtype)), packed_(bits_) {
    flip_ = is_ordered(op_) && is_signed(op.dtype) ? packed_.highest_bits() : 0;
    u64 identity = 0;
    with_functor<false>(op_, [&](auto functor) { identity = decltype(functor)::identity(packed_); });
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      value_[i] = identity;
      odd_[i] = 0;
    }
  }

  FA_FN void add(const Elements<AnyInteger, N> &elements) {
    u64 x[N];
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      x[i] = elements.unit[i].fields ^ flip_;
    if (averages(op_))
      return add_wide(x);
    with_functor<false>(op_, [&](auto functor) {
      FA_UNROLL
      for (u32 i = 0; i < N; ++i)
        value_[i] = decltype(functor)::combine(packed_, value_[i], x[i]);
    });
  }

  FA_FN Elements<AnyInteger, N> finish() const { return averages(op_) ? average(*this) : finish(true); }

  // For operations other than averages, whose sums do not travel as elements (Algorithm::can_reduce).
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
  PackedIntegers packed_;
  // The sign bits of signed fields. Flipped, signed fields compare like unsigned ones and can be added
  // without sign extension.
  u64 flip_;
  // An average sums fields of twice the width: the even fields in value_, the odd ones in odd_. For 64-bit
  // fields value_ has the sum and odd_ the carries. The sum over 16 ranks needs at most 4 bits more than a
  // field.
  u64 value_[N], odd_[N];

  FA_FN void add_wide(const u64 *x) {
    const u64 even = packed_.even_fields();
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      value_[i] += x[i] & even;
      odd_[i] += bits_ == 64 ? u64(value_[i] < x[i]) : x[i] >> (bits_ & 63) & even;
    }
  }

  // An out-of-line function: it is long, and only averages use it.
  static FA_CALL Elements<AnyInteger, N> average(Reduction sums) { return sums.average(); }
  FA_FN Elements<AnyInteger, N> average() const {
    // Divides by the number of ranks, at most 16, through the reciprocal. The reciprocal is too large by less
    // than 1 / 2^kShift, and the dividend is less than 2^20.
    const u32 reciprocal = ((1u << kShift) - 1) / world_ + 1;
    Elements<AnyInteger, N> result;
    if (bits_ < 32) {
      average_narrow(reciprocal, &result);
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

  // Divides the next 32 bits of a long number. `rest` is the remainder of the higher bits, and is set to the
  // new remainder.
  FA_FN u32 divided(u32 *rest, u32 bits, u32 reciprocal) const {
    const u32 upper = *rest << 16 | bits >> 16, high = divided(upper, reciprocal);
    const u32 lower = (upper - high * world_) << 16 | (bits & 0xFFFF), low = divided(lower, reciprocal);
    *rest = lower - low * world_;
    return high << 16 | low;
  }

  // Averages are rounded toward zero: divide the magnitude of the sum, after subtracting what flipping has
  // added.
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

  // Fields of 8 or 16 bits: one even and one odd field of each word at a time.
  FA_FN void average_narrow(u32 reciprocal, Elements<AnyInteger, N> *result) const {
    const u32 wide = 2 * bits_;
    const i32 added = flip_ != 0 ? i32(world_) << (bits_ - 1) : 0;
    const auto of = [&](u64 sum) {
      const i32 all = i32(sum & ((u64(1) << wide) - 1)) - added;
      const u32 quotient = divided(u32(all < 0 ? -all : all), reciprocal);
      return (all < 0 ? 0 - quotient : quotient) & ((1u << bits_) - 1);
    };
    u64 even[N], odd[N], words[N];
    FA_UNROLL
    for (u32 i = 0; i < N; ++i) {
      even[i] = value_[i];
      odd[i] = odd_[i];
      words[i] = 0;
    }
    FA_ROLL
    for (u32 at = 0; at < 64; at += wide) {
      FA_UNROLL
      for (u32 i = 0; i < N; ++i) {
        words[i] = u64(of(odd[i]) << bits_ | of(even[i])) << (64 - wide) | words[i] >> wide;
        even[i] >>= wide;
        odd[i] >>= wide;
      }
    }
    FA_UNROLL
    for (u32 i = 0; i < N; ++i)
      result->unit[i].fields = words[i];
  }
};

} // namespace FA_NAMESPACE
