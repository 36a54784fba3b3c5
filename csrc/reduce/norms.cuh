// Norms of rows: what is summed over a row, and how an element is normalised. A norm is a row of the table in
// catalogue/src/fused.rs, and a struct here whose functions take one float or, on the host, a vector of
// floats:
//
//   kPasses   number of passes over a row before its elements can be normalised
//   kOfZeros  whether the term of a zero is zero: then elements beyond a row's end need no mask
//   term      what a pass adds for an element, in the order of reduce/rows.cuh
//   after     updates the state by the sum of a pass
//   apply     normalises an element, before it is multiplied by a weight
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

// Results of the passes over a row.
struct RowState {
  float mean = 0, scale = 0;
};

// Divisions and square roots are correctly rounded.
FA_FN float divided(float dividend, float divisor) {
#if FA_CUDA
  return __fdiv_rn(dividend, divisor);
#else
  return dividend / divisor;
#endif
}

// The factor of a row with this sum of squares of `total` elements.
FA_FN float row_scale(float squares, u32 total, float epsilon) {
  const float mean = divided(squares, float(total)) + epsilon;
#if FA_CUDA
  return divided(1.0f, __fsqrt_rn(mean));
#else
  return divided(1.0f, __builtin_sqrtf(mean));
#endif
}

// x / sqrt(mean(x * x) + epsilon)
struct RmsNorm {
  static constexpr u32 kPasses = 1;
  static constexpr bool kOfZeros = true;

  template <class U>
  static FA_FN U term(u32, const RowState &, U x) {
    return x * x;
  }
  static FA_FN void after(u32, float sum, const FaFused &norm, RowState *state) {
    state->scale = row_scale(sum, norm.total, norm.epsilon);
  }
  template <class U>
  static FA_FN U apply(const RowState &state, U x) {
    return x * state.scale;
  }
};

// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)
struct LayerNorm {
  static constexpr u32 kPasses = 2;
  static constexpr bool kOfZeros = false;

  template <class U>
  static FA_FN U term(u32 pass, const RowState &state, U x) {
    if (pass == 0)
      return x;
    const U difference = x - state.mean;
    return difference * difference;
  }
  static FA_FN void after(u32 pass, float sum, const FaFused &norm, RowState *state) {
    if (pass == 0)
      state->mean = divided(sum, float(norm.total));
    else
      state->scale = row_scale(sum, norm.total, norm.epsilon);
  }
  template <class U>
  static FA_FN U apply(const RowState &state, U x) {
    return (x - state.mean) * state.scale;
  }
};

// The most passes that a norm may have.
constexpr u32 kMostPasses = 2;

// Calls f with the norm of a code.
template <class F>
FA_FN void with_norm(u32 code, const F &f) {
  switch (code) {
#define FA_WITH_NORM(code, number, Norm, ...)                                                                \
  case code: static_assert(Norm::kPasses <= kMostPasses, "words of teams"); return f(Norm{});
    FA_NORMS(FA_WITH_NORM, )
  }
}

} // namespace FA_NAMESPACE
