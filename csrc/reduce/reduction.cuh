// The reduction of N elements over ranks, one after the other. All kernels use it. The direct algorithms use
// it in rank order, so that their results agree bit for bit; NaN results are canonical, so they agree as
// well.
#pragma once

#include "ops.cuh"

namespace FA_NAMESPACE {

// An operation, known to the compiler (Op) or not (AnyOp).
template <u32 Code>
struct Op {
  FA_FN constexpr u32 code() const { return Code; }
};
struct AnyOp {
  u32 op;
  u32 dtype;    // of types that share a kernel
  double scale; // of a premultiplied sum
  FA_FN constexpr u32 code() const { return op; }
};

// Whether an operation may be a premultiplied sum: only if the compiler does not know the operation.
template <class Op>
constexpr bool kMayPremultiply = false;
template <>
constexpr bool kMayPremultiply<AnyOp> = true;

// The conversion of a type. A type that stands for several selects it by op.dtype.
template <class T, class Op>
FA_FN Convert<T> conversion(Op op) {
  if constexpr (__is_constructible(Convert<T>, u32))
    return Convert<T>(op.dtype);
  else
    return {};
}

// N elements, as in memory (Elements) and as accumulators (LanesOf).
template <class T, u32 N>
struct Elements {
  using Small = typename Convert<T>::Small;
  static constexpr u32 units = N * sizeof(T) / sizeof(Small);
  Small unit[units];
};
template <class T, u32 N>
using LanesOf = Lanes<typename Element<T>::Accumulate, N>;

// A rank's elements times its scale, for a premultiplied sum. They are rounded to the type, so that staged
// and sent inputs are the same.
template <class T, class Op, u32 N>
FA_FN Elements<T, N> premultiplied(Op op, const Elements<T, N> &elements, double scale) {
  using A = typename Element<T>::Accumulate;
  const Convert<T> convert = conversion<T>(op);
  Elements<T, N> result;
  FA_UNROLL
  for (u32 i = 0; i < Elements<T, N>::units; ++i)
    result.unit[i] = convert.narrow(convert.widen(elements.unit[i]) * A(scale));
  return result;
}

#if FA_CUDA
// Narrows four floats to a word of 8-bit floats. Out of line, because it is long; with four at a time the
// call is cheap enough.
FA_OUTLINED u32 narrow_four(ConvertF8<AnyFormat> convert, float a, float b, float c, float d) {
  return convert.narrow(a) | convert.narrow(b) << 8 | convert.narrow(c) << 16 | u32(convert.narrow(d)) << 24;
}
#endif

// The reduction of N elements, rank after rank.
template <class T, class Op, u32 N>
class Reduction {
  using A = typename Element<T>::Accumulate;
  using U = typename Unit<A>::type;
  using L = LanesOf<T, N>;
  // A 64-bit average has no wider type to sum in: it sums quotients and remainders of the division by the
  // number of ranks.
  static constexpr bool kSplitAverage = !kIsFloat<A> && sizeof(T) == 8;

public:
  FA_FN Reduction(Op op, u32 world) : op_(op), convert_(conversion<T>(op)), world_(A(world)) {
    with_functor<kIsFloat<A>>(op_.code(), [&](auto functor) {
      value_ = splat<A, N>(decltype(functor)::identity(Arithmetic<A>{}));
    });
    if constexpr (kSplitAverage)
      remainder_ = splat<A, N>(A(0));
  }

  FA_FN void add(const Elements<T, N> &elements) {
    L x;
    FA_UNROLL
    for (u32 i = 0; i < Elements<T, N>::units; ++i)
      x.unit[i] = convert_.widen(elements.unit[i]);
    if constexpr (kSplitAverage) {
      if (averages(op_.code())) {
        const L quotient = map(x, [&](U u) { return u / world_; });
        const L rest = map(x, quotient, [&](U u, U q) { return u - q * world_; });
        remainder_ = map(remainder_, rest, Arithmetic<A>::add);
        value_ = map(value_, quotient, Arithmetic<A>::add);
        return;
      }
    }
    with_functor<kIsFloat<A>>(op_.code(), [&](auto functor) {
      value_ = map(value_, x, [](U a, U b) { return decltype(functor)::combine(Arithmetic<A>{}, a, b); });
    });
  }

  // `whole`: all ranks' elements have been added. Otherwise it is a partial sum, which an average does not
  // divide yet.
  FA_FN Elements<T, N> finish(bool whole = true) const {
    L result = value_;
    if (whole && averages(op_.code())) {
      if constexpr (kSplitAverage) {
        result = map(value_, remainder_, [&](U q, U r) { return toward_zero(q, r); });
      } else {
        result = map(value_, [&](U u) { return u / world_; });
      }
    }
    if constexpr (kIsFloat<A> && !kNarrowsToCanonicalNan<T>) {
      result = map(result, [](U u) { return u == u ? u : canonical_nan<A>(); });
    }
    Elements<T, N> elements;
    if constexpr (FA_CUDA && sizeof(T) == 1 && N % 4 == 0) {
      FA_UNROLL
      for (u32 i = 0; i < N; i += 4)
        *reinterpret_cast<u32 *>(elements.unit + i) =
            narrow_four(convert_, result.unit[i], result.unit[i + 1], result.unit[i + 2], result.unit[i + 3]);
    } else {
      narrow_into(convert_, result, &elements);
    }
    return elements;
  }

private:
  Op op_;
  Convert<T> convert_;
  A world_;
  L value_;
  struct None {};
  template <bool Split, class Dummy>
  struct RemainderOf {
    using type = None;
  };
  template <class Dummy>
  struct RemainderOf<true, Dummy> {
    using type = L;
  };
  typename RemainderOf<kSplitAverage, void>::type remainder_;

  // (world * q + r) / world, rounded toward zero, for |r| < world * world.
  FA_FN U toward_zero(U q, U r) const {
    U carry = r / world_;
    if constexpr (A(-1) < A(0)) {
      carry = r - carry * world_ < 0 ? carry - 1 : carry; // floor
      const U rest = r - carry * world_;
      const U floor = q + carry;
      return (floor < 0) & (rest > 0) ? floor + 1 : floor;
    } else {
      return q + carry;
    }
  }
};

} // namespace FA_NAMESPACE
