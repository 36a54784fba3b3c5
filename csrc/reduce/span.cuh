// The typed loop of the host, which reduces a run of bytes over ranks. It is compiled for each type,
// operation and, in the hot set, number of ranks; the algorithms call it through a table.
#pragma once

#include "reduction.cuh"

namespace FA_NAMESPACE {

// Whole packs; the message's last pack may be partial. The inputs are in rank order.
struct ReducedSpan {
  const u64 *inputs; // addresses, by rank
  u32 count;         // number of inputs
  u32 world;         // divisor of an average
  u64 from;          // offset of the first byte in each source
  u64 stride;        // bytes from a pack of a source to the next
  u64 bytes;
  u8 *to;
  u8 *also;     // second destination, or null
  u64 reach;    // bytes of each source that this span and later ones read, from `from` on
  double scale; // FA_PREMUL_SUM: the factor of the only source; the sum is a separate loop
};

using ReduceSpan = void (*)(const ReducedSpan &);

#define FA_ONE_OP(...) +1
constexpr u32 kOps = 0 FA_OPS(FA_ONE_OP, );

// The loops of a type, by operation and number of inputs; null if the type has no such operation.
struct ReduceSpans {
  ReduceSpan of[kOps][FA_MAX_RANKS + 1];
};

} // namespace FA_NAMESPACE
