// The layout of data in quantised transport. Elements are quantised in groups: a byte for each element, and a
// scale for the group. Groups are counted from the first element of the message, so that the result does not
// depend on slices, pieces or grids.
#pragma once

#include "pack.cuh"
#include "region.cuh"

namespace FA_NAMESPACE {

constexpr u32 kGroup = FA_QUANTIZED_GROUP;

// A run of groups in memory. A scale is the upper half of an f32.
struct Groups {
  u8 *values;
  u16 *scales;
};

FA_FN Index groups_of(u64 count) { return Index((count + kGroup - 1) / kGroup); }

// The contents of a rank's staging: from each rank, its part of the slice that this rank owns; then the
// sum of each rank's slice. Each has room for `each` groups; the last slices may use fewer.
enum QuantizedSection : u32 { kQuantizedInputs, kQuantizedSums };

FA_FN Groups quantized_at(u8 *staging, u32 world, QuantizedSection section, u32 from, Index each) {
  const u64 bytes = u64(each) * FA_QUANTIZED_GROUP_BYTES + (FA_QUANTIZED_ALIGNMENT - 1);
  u8 *values = staging + (section * world + from) * (bytes & ~u64(FA_QUANTIZED_ALIGNMENT - 1));
  return {values, reinterpret_cast<u16 *>(values + u64(each) * kGroup)};
}

} // namespace FA_NAMESPACE
