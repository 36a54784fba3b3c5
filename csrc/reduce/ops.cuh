// One functor for each operation of the catalogue: `identity`, and `combine` of two values in rank order. A
// functor is written in terms of an arithmetic: of accumulators of one type (arithmetic.cuh), or of integers
// packed in words (cuda/integers.cuh). The primary template is undefined: an operation without a functor does
// not compile.
#pragma once

#include "arithmetic.cuh"

namespace FA_NAMESPACE {

template <u32 Code>
struct Functor;

// `kAverages`: the result is divided by the number of ranks. `kOrdered`: the operation depends on the order
// of values, or on their signs.
struct Unordered {
  static constexpr bool kAverages = false, kOrdered = false;
};

template <>
struct Functor<FA_SUM> : Unordered {
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.zero();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.add(a, b);
  }
};

template <>
struct Functor<FA_PROD> : Unordered {
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.one();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.multiply(a, b);
  }
};

template <>
struct Functor<FA_MIN> : Unordered {
  static constexpr bool kOrdered = true;
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.highest();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.minimum(a, b);
  }
};

template <>
struct Functor<FA_MAX> : Unordered {
  static constexpr bool kOrdered = true;
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.lowest();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.maximum(a, b);
  }
};

template <>
struct Functor<FA_AVG> : Functor<FA_SUM> {
  static constexpr bool kAverages = true, kOrdered = true;
};

template <>
struct Functor<FA_BAND> : Unordered {
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.all_ones();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.bitwise_and(a, b);
  }
};

template <>
struct Functor<FA_BOR> : Unordered {
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.zero();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.bitwise_or(a, b);
  }
};

template <>
struct Functor<FA_BXOR> : Unordered {
  template <class M>
  static FA_FN auto identity(const M &m) {
    return m.zero();
  }
  template <class M>
  static FA_FN auto combine(const M &m, typename M::Value a, typename M::Value b) {
    return m.bitwise_xor(a, b);
  }
};

// The inputs are already multiplied (premultiplied() in reduction.cuh).
template <>
struct Functor<FA_PREMUL_SUM> : Functor<FA_SUM> {};

// Whether an operation is defined for a class of types.
template <bool IsFloat>
constexpr bool kTakes_all = true;
template <bool IsFloat>
constexpr bool kTakes_integers = !IsFloat;
template <bool IsFloat>
constexpr bool kTakes_floats = IsFloat;

// Properties of an operation that is selected at run time.
FA_FN constexpr bool averages(u32 op) {
#define FA_AVERAGES(code, ...) | u32(Functor<code>::kAverages) << code
  return ((0 FA_OPS(FA_AVERAGES, )) >> op & 1) != 0;
}
FA_FN constexpr bool is_ordered(u32 op) {
#define FA_IS_ORDERED(code, ...) | u32(Functor<code>::kOrdered) << code
  return ((0 FA_OPS(FA_IS_ORDERED, )) >> op & 1) != 0;
}
// Calls f with the functor that combines values for the operation. Callers have checked that the operation
// exists and is defined for the class of types: there is no fallback.
template <bool IsFloat, class F>
FA_FN void with_functor(u32 op, F f) {
  switch (op) {
#define FA_WITH_FUNCTOR(code, takes, cases, ...)                                                             \
  cases if constexpr (kTakes_##takes<IsFloat>) return f(Functor<code>{});                                    \
  break;
    FA_COMBINING(FA_WITH_FUNCTOR, )
  }
  __builtin_unreachable();
}

// Returns whether an operation is defined for types with this accumulator.
template <class A>
constexpr bool has_op(u32 op) {
#define FA_HAS_OP(code, number, name, takes, ...) || (op == code && kTakes_##takes<kIsFloat<A>>)
  return false FA_OPS(FA_HAS_OP, );
}

} // namespace FA_NAMESPACE
