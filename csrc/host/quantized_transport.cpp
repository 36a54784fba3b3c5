// The typed loops of quantised transport.
#include "../reduce/quantized_groups.cuh"

namespace FA_NAMESPACE {
namespace {

constexpr u32 kLanes = Unit<float>::lanes, kUnits = kGroup / kLanes;

// The elements of a group.
struct Elements {
  FloatUnit unit[kUnits];
};

template <class T>
FA_FN Elements load(const u8 *from, u64 count) {
  typename Convert<T>::Small small[kUnits] = {};
  __builtin_memcpy(small, from, (count < kGroup ? count : kGroup) * sizeof(T));
  Elements elements;
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i)
    elements.unit[i] = Convert<T>::widen(small[i]);
  return elements;
}

template <class T>
FA_FN void store(u8 *to, const Elements &elements, u64 count) {
  typename Convert<T>::Small small[kUnits];
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i) {
    const FloatUnit u = elements.unit[i];
    small[i] = Convert<T>::narrow(u == u ? u : canonical_nan<float>());
  }
  __builtin_memcpy(to, small, (count < kGroup ? count : kGroup) * sizeof(T));
}

// The bits of the largest magnitude. They have no sign bit, so signed comparisons work, which all instruction
// sets have.
FA_FN u32 largest_magnitude(const Elements &elements) {
  using Signed = Unit<i32>::type;
  Signed most = {};
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i) {
    const Signed magnitude = bit_cast<Signed>(bit_cast<FloatBits>(elements.unit[i]) & 0x7FFFFFFF);
    most = magnitude > most ? magnitude : most;
  }
  typedef i32 Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &most, sizeof parts);
  FA_UNROLL
  for (u32 i = 1; i < kLanes / 4; ++i)
    parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
  i32 largest = parts[0][0];
  FA_UNROLL
  for (u32 i = 1; i < 4; ++i)
    largest = parts[0][i] > largest ? parts[0][i] : largest;
  return u32(largest);
}

template <class Format>
FA_FN void quantize_group(const Elements &elements, Groups to, u64 group) {
  const float scale = group_scale(largest_magnitude(elements), Format::kMost);
  const float inverse = inverse_of(scale);
  ByteUnit bytes[kUnits];
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i)
    bytes[i] = Format{}.narrow(elements.unit[i] * inverse);
  __builtin_memcpy(to.values + group * kGroup, bytes, kGroup);
  to.scales[group] = scale_bits(scale);
}

template <class Format>
FA_FN void add_group(Elements *sum, Groups from, u64 group) {
  const float scale = scale_of(from.scales[group]);
  ByteUnit bytes[kUnits];
  __builtin_memcpy(bytes, from.values + group * kGroup, kGroup);
  FA_UNROLL
  for (u32 i = 0; i < kUnits; ++i)
    sum->unit[i] += Format{}.widen(bytes[i]) * scale;
}

template <class T, class Format>
void quantize(const u8 *from, u64 count, Groups to) {
  for (u64 done = 0; done < count; done += kGroup)
    quantize_group<Format>(load<T>(from + done * sizeof(T), count - done), to, done / kGroup);
}

template <class T, class Format>
void dequantize(Groups from, u8 *to, u64 count) {
  for (u64 done = 0; done < count; done += kGroup) {
    Elements elements = {};
    add_group<Format>(&elements, from, done / kGroup);
    store<T>(to + done * sizeof(T), elements, count - done);
  }
}

template <class Format>
void sum(const Groups *from, u32 count, Groups to, u64 groups) {
  for (u64 group = 0; group < groups; ++group) {
    Elements sum = {};
    for (u32 r = 0; r < count; ++r)
      add_group<Format>(&sum, from[r], group);
    quantize_group<Format>(sum, to, group);
  }
}

template <class T, class Format>
constexpr QuantizedLoops kLoops = {quantize<T, Format>, dequantize<T, Format>, sum<Format>};

} // namespace

const QuantizedLoops *quantized_loops(u32 dtype, u32 transport) {
  const bool int8 = transport == FA_TRANSPORT_INT8;
  if (!int8 && transport != FA_TRANSPORT_F8E4M3)
    return nullptr;
  switch (dtype) {
  case FA_F16: return int8 ? &kLoops<F16, Int8> : &kLoops<F16, Float8>;
  case FA_BF16: return int8 ? &kLoops<Bf16, Int8> : &kLoops<Bf16, Float8>;
  case FA_F32: return int8 ? &kLoops<float, Int8> : &kLoops<float, Float8>;
  default: return nullptr;
  }
}

} // namespace FA_NAMESPACE
