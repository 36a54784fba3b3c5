// The typed loops of rows, for the types that have norms.
#pragma once

#include "../reduce/rows.cuh"

#include "../readers/experts_host.hpp"
#include "quantized_rows.hpp"
#include "row_sums.hpp"

namespace FA_NAMESPACE {

template <class T>
void add_span(const AddedSpan &span) {
  const auto add = [&](u64 at, auto extent) {
    const auto sum = Twos<T>::narrow(map(load<T>(span.sum + at, extent), load<T>(span.residual + at, extent),
                                         [](Float a, Float b) { return a + b; }));
    store(span.to + at, sum, extent);
    if (span.also != nullptr)
      store(span.also + at, sum, extent);
    return Twos<T>::widen(sum);
  };
  if (span.squares == nullptr)
    for_each_two<T>(span.bytes, add);
  else
    *span.squares = add_terms<T>(*span.squares, span.bytes, add);
}

template <class T>
float copy_row(u8 *to, const u8 *row, u64 bytes) {
  const auto get = [&](u64 at, auto extent) { return load<T>(row + at, extent); };
  if (to == nullptr)
    return add_terms<T>(0, bytes, get);
  return add_terms<T>(0, bytes, [&](u64 at, auto extent) {
    typename Twos<T>::Packed packed = {};
    if constexpr (__is_same(decltype(extent), All))
      load_units(&packed, row + at);
    else
      __builtin_memcpy(&packed, row + at, extent.bytes);
    store(to + at, packed, extent);
    return Twos<T>::widen(packed);
  });
}

// Normalises `length` elements of a row, from `first` on, with the row's state. Out of line: it is long, and
// has many callers.
template <class T, class Norm>
void norm_span(const NormedRow &row, const RowState &state, u32 first, u32 length, u8 *to) {
  const u64 skipped = u64(first) * sizeof(T), bytes = u64(length) * sizeof(T);
  const u8 *from = row.row + skipped;
  const u8 *weights = reinterpret_cast<const u8 *>(row.norm.weight) + skipped;
  const u8 *biases = reinterpret_cast<const u8 *>(row.norm.bias) + skipped;
  const bool has_weights = row.norm.weight != 0;
  // Each combination of weight and bias is a separate loop.
  const auto run = [&](auto weighted, auto biased) {
    for_each_two<T>(bytes, [&](u64 at, auto extent) {
      Two x = map(load<T>(from + at, extent),
                  [&](Float x) { return Norm::kCentred ? state.apply(x) : x * state.scale; });
      x = weighted(x, at, extent);
      store(to + at, Twos<T>::narrow(biased(x, at, extent)), extent);
    });
  };
  const auto same = [](const Two &x, u64, auto) { return x; };
  const auto times = [&](auto weight_of) {
    return [&, weight_of](const Two &x, u64 at, auto extent) {
      return map(x, load<T>(weights + at, extent),
                 [&](Float x, Float weight) { return x * weight_of(weight); });
    };
  };
  const auto with_weights = [&](auto biased) {
    if (!has_weights)
      run(same, biased);
    else if (row.norm.unit_offset != 0)
      run(times([](Float weight) { return weight + 1.0f; }), biased);
    else
      run(times([](Float weight) { return weight; }), biased);
  };
  if (row.norm.bias == 0)
    return with_weights(same);
  with_weights([&](const Two &x, u64 at, auto extent) {
    return map(x, load<T>(biases + at, extent), [](Float x, Float bias) { return x + bias; });
  });
}

using NormSpan = void (*)(const NormedRow &, const RowState &, u32 first, u32 length, u8 *to);

// Normalises a row, and quantises it. If the normalised row is stored, it is read again from there; else it
// is normalised again for each pass of the quantisation.
template <class T>
void norm_row_by(NormSpan norm, const NormedRow &row, const RowState &state) {
  const u64 bytes = u64(row.norm.row) * sizeof(T);
  u8 *to = row.norm.normed == 0 ? nullptr : reinterpret_cast<u8 *>(row.norm.normed) + row.number * bytes;
  if (to != nullptr)
    norm(row, state, 0, row.norm.row, to);
  if (row.norm.scaling == FA_NOT_SCALED)
    return;
  quantize_row<T>(row.norm, row.number, [&](u32 first, u32 length, u8 *span) {
    if (to != nullptr)
      __builtin_memcpy(span, to + first * sizeof(T), length * sizeof(T));
    else
      norm(row, state, first, length, span);
  });
}

template <class T>
void norm_row(const NormedRow &row) {
  with_norm(row.norm.norm, [&](auto norm) {
    using Norm = decltype(norm);
    if constexpr (__is_same(Norm, RmsNorm))
      norm_row_by<T>(norm_span<T, Norm>, row,
                     {0, Norm::scale(row.squares, row.norm.total, row.norm.epsilon)});
    else
      norm_row_by<T>(norm_span<T, Norm>, row, measure<T, Norm>(row.row, row.norm));
  });
}

template <class T>
constexpr RowLoops row_loops() {
  return {add_span<T>, copy_row<T>, norm_row<T>, gather_span<T>};
}

} // namespace FA_NAMESPACE
