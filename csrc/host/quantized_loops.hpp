// The typed loops of quantised transport.
#pragma once

#include "../reduce/quantized_groups.cuh"

namespace FA_NAMESPACE {

constexpr u32 kGroupUnits = kGroup / Unit<float>::lanes;

// The elements of a group.
struct GroupElements {
  FloatUnit unit[kGroupUnits];
};

template <class T>
FA_FN GroupElements load_group(const u8 *from, u64 count) {
  typename Convert<T>::Small small[kGroupUnits] = {};
  __builtin_memcpy(small, from, (count < kGroup ? count : kGroup) * sizeof(T));
  GroupElements elements;
  FA_UNROLL
  for (u32 i = 0; i < kGroupUnits; ++i)
    elements.unit[i] = Convert<T>::widen(small[i]);
  return elements;
}

template <class T>
FA_FN void store_group(u8 *to, const GroupElements &elements, u64 count) {
  typename Convert<T>::Small small[kGroupUnits];
  FA_UNROLL
  for (u32 i = 0; i < kGroupUnits; ++i) {
    const FloatUnit u = elements.unit[i];
    small[i] = Convert<T>::narrow(u == u ? u : canonical_nan<float>());
  }
  __builtin_memcpy(to, small, (count < kGroup ? count : kGroup) * sizeof(T));
}

// The bits of the largest magnitude. They have no sign bit, so signed comparisons work, which all instruction
// sets have.
FA_FN u32 largest_magnitude(const GroupElements &elements) {
  using Signed = Unit<i32>::type;
  Signed most = {};
  FA_UNROLL
  for (u32 i = 0; i < kGroupUnits; ++i) {
    const Signed magnitude = bit_cast<Signed>(bit_cast<FloatBits>(elements.unit[i]) & 0x7FFFFFFF);
    most = magnitude > most ? magnitude : most;
  }
  typedef i32 Four __attribute__((vector_size(16)));
  Four parts[Unit<float>::lanes / 4];
  __builtin_memcpy(parts, &most, sizeof parts);
  FA_UNROLL
  for (u32 i = 1; i < Unit<float>::lanes / 4; ++i)
    parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
  i32 largest = parts[0][0];
  FA_UNROLL
  for (u32 i = 1; i < 4; ++i)
    largest = parts[0][i] > largest ? parts[0][i] : largest;
  return u32(largest);
}

template <class Format>
FA_FN void quantize_group(const GroupElements &elements, Groups to, u64 group) {
  const float scale = group_scale(largest_magnitude(elements), Format::kMost);
  const float inverse = inverse_of(scale);
  ByteUnit bytes[kGroupUnits];
  FA_UNROLL
  for (u32 i = 0; i < kGroupUnits; ++i)
    bytes[i] = Format{}.narrow(elements.unit[i] * inverse);
  __builtin_memcpy(to.values + group * kGroup, bytes, kGroup);
  to.scales[group] = scale_bits(scale);
}

template <class Format>
FA_FN void add_group(GroupElements *sum, Groups from, u64 group) {
  const float scale = scale_of(from.scales[group]);
  ByteUnit bytes[kGroupUnits];
  __builtin_memcpy(bytes, from.values + group * kGroup, kGroup);
  FA_UNROLL
  for (u32 i = 0; i < kGroupUnits; ++i)
    sum->unit[i] += Format{}.widen(bytes[i]) * scale;
}

template <class T, class Format>
void quantize_groups(const u8 *from, u64 count, Groups to) {
  for (u64 done = 0; done < count; done += kGroup)
    quantize_group<Format>(load_group<T>(from + done * sizeof(T), count - done), to, done / kGroup);
}

template <class T, class Format>
void dequantize_groups(Groups from, u8 *to, u64 count) {
  for (u64 done = 0; done < count; done += kGroup) {
    GroupElements elements = {};
    add_group<Format>(&elements, from, done / kGroup);
    store_group<T>(to + done * sizeof(T), elements, count - done);
  }
}

template <class Format>
void sum_groups(const Groups *from, u32 count, Groups to, u64 groups) {
  for (u64 group = 0; group < groups; ++group) {
    GroupElements sum = {};
    for (u32 r = 0; r < count; ++r)
      add_group<Format>(&sum, from[r], group);
    quantize_group<Format>(sum, to, group);
  }
}

template <class T, class Format>
constexpr QuantizedLoops quantized_loops() {
  return {quantize_groups<T, Format>, dequantize_groups<T, Format>, sum_groups<Format>};
}

} // namespace FA_NAMESPACE
