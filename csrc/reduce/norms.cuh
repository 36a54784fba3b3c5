// Norms of rows: what is summed over a row, and the factor that follows from it. A norm is a row of the table
// in catalogue/src/fused.rs, and a struct here whose functions take one float or, on the host, a vector of
// floats:
//
//   kCentred  whether the row's mean is subtracted from each element; then term() is its square
//   term      what is summed over a row, in the order of reduce/rows.cuh; 0 for a zero
//   scale     from that sum over `total` elements, the factor of an element before the weight's
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

// How the elements of a row are normalised: (x - mean) * scale. A mean of +0 changes no element.
struct RowState {
  float mean = 0, scale = 0;

  template <class U>
  FA_FN U apply(U x) const {
    return (x - mean) * scale;
  }
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
  return reciprocal(__fsqrt_rn(mean));
#else
  return reciprocal(__builtin_sqrtf(mean));
#endif
}

struct SumOfSquares {
  template <class U>
  static FA_FN U term(U x) {
    return x * x;
  }
  static FA_FN float scale(float sum, u32 total, float epsilon) { return row_scale(sum, total, epsilon); }
};

// x / sqrt(mean(x * x) + epsilon)
struct RmsNorm : SumOfSquares {
  static constexpr bool kCentred = false;
};

// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)
struct LayerNorm : SumOfSquares {
  static constexpr bool kCentred = true;
};

// What a chunk of a row contributes. The terms of a norm with kCentred are those of the differences from the
// chunk's own mean. So each chunk is read once, and the chunks of a row are combined afterwards: Chan, Golub,
// LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
struct ChunkTerms {
  float sum, mean; // mean: 0 unless kCentred
};

// The mean of a chunk with this sum of `length` elements.
FA_FN float chunk_mean(float sum, u32 length) {
  return length == FA_SQUARES_CHUNK ? sum * (1.0f / FA_SQUARES_CHUNK) : divided(sum, float(length));
}

// The sum of squares of a chunk's differences from the row's mean; `distance`: from there to the chunk's.
FA_FN float about_row_mean(float sum, float distance, float length) {
  return sum + length * (distance * distance);
}

// Calls f with the norm of a code.
template <class F>
FA_FN void with_norm(u32 code, const F &f) {
  switch (code) {
#define FA_WITH_NORM(code, number, Norm, ...)                                                                \
  case code: return f(Norm{});
    FA_NORMS(FA_WITH_NORM, )
  }
}

// Calls f with a norm that has the terms and the scale of this one. Norms that sum squares share code.
template <class Norm>
constexpr bool kSumsSquares = __is_base_of(SumOfSquares, Norm);
template <class F>
FA_FN void with_terms(u32 code, const F &f) {
#define FA_WITH_TERMS(norm, number, Norm, ...)                                                               \
  if constexpr (!kSumsSquares<Norm>) {                                                                       \
    if (code == norm)                                                                                        \
      return f(Norm{});                                                                                      \
  }
  FA_NORMS(FA_WITH_TERMS, )
  f(RmsNorm{});
}

#if !FA_CUDA
// What with_terms() and about_row_mean() assume, on both devices.
#define FA_CHECK_NORM(norm, number, Norm, ...)                                                               \
  static_assert(!kSumsSquares<Norm> || &Norm::scale == &SumOfSquares::scale);                                \
  static_assert(!Norm::kCentred || kSumsSquares<Norm>);
FA_NORMS(FA_CHECK_NORM, )
#endif

FA_FN bool is_centred(u32 code) {
#define FA_IS_CENTRED(norm, number, Norm, ...)                                                               \
  if (Norm::kCentred && code == norm)                                                                        \
    return true;
  FA_NORMS(FA_IS_CENTRED, )
  return false;
}

} // namespace FA_NAMESPACE
