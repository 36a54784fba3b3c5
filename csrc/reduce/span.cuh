// The typed loop of the host: reduces a run of bytes over ranks. Compiled once for each type, operation and,
// for the hot set, number of ranks; the protocols reach it through a table.
#pragma once

#include "reduction.cuh"

namespace FA_NAMESPACE {

// Whole packs from `offset` on, of which the message's last may be partial. Sources are in rank order.
struct ReducedSpan {
  const u64 *sources; // addresses, by rank
  u32 count;          // of the sources
  u32 world;          // what an average divides by
  u64 from;           // byte at which to begin in each source
  u64 stride;         // bytes from a pack of a source to the next
  u64 bytes;
  u8 *to;
  u8 *also;     // a second place for the result, or null
  u64 reach;    // bytes of each source, from there on, that this span and the ones after it read
  double scale; // FA_PREMUL_SUM: of the only source; the sum is a loop of its own
};

using ReduceSpan = void (*)(const ReducedSpan &);

#define FA_ONE_OP(...) +1
constexpr u32 kOps = 0 FA_OPS(FA_ONE_OP, );

// The loops of a type, by operation and number of sources; null where the type has no such operation.
struct ReduceSpans {
  ReduceSpan of[kOps][FA_MAX_RANKS + 1];
};

#define FA_DECLARE(code, number, name, ...) extern const ReduceSpans reduce_spans_##name;
FA_TYPES(FA_DECLARE, )

} // namespace FA_NAMESPACE
