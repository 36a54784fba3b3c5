// What quantised transport moves, and where it lies. Elements are quantised in groups: each of a group's has
// a byte, and the group a scale. Groups are counted from the first element of the message, so that bits do
// not depend on slices, pieces or grids.
#pragma once

#include "pack.cuh"
#include "region.cuh"

namespace FA_NAMESPACE {

constexpr u32 kGroup = FA_QUANTIZED_GROUP;

// Some groups in memory. A scale is the upper half of an f32.
struct Groups {
  u8 *values;
  u16 *scales;
};

FA_FN Index groups_of(u64 count) { return Index((count + kGroup - 1) / kGroup); }

// What a rank's staging holds: from each rank its part of the slice that this rank owns, and of each rank's
// slice the sum. Each has room for `each` groups, of which the last slices may use fewer.
enum QuantizedPart : u32 { kQuantizedInputs, kQuantizedSums };

FA_FN Groups quantized_at(u8 *staging, u32 world, QuantizedPart part, u32 from, Index each) {
  const u64 bytes = u64(each) * FA_QUANTIZED_GROUP_BYTES + (FA_QUANTIZED_ALIGNMENT - 1);
  u8 *values = staging + (part * world + from) * (bytes & ~u64(FA_QUANTIZED_ALIGNMENT - 1));
  return {values, reinterpret_cast<u16 *>(values + u64(each) * kGroup)};
}

} // namespace FA_NAMESPACE
