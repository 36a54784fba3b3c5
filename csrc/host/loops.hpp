// The typed loops of each type, which the algorithms call through tables.
#pragma once

#include "../reduce/quantized_groups.cuh"
#include "../reduce/rows.cuh"
#include "../reduce/span.cuh"

namespace FA_NAMESPACE {

// Only hot types have loops of rows and of quantised transport; those of others are null.
struct TypeLoops {
  ReduceSpans reduce;
  RowLoops rows;
  QuantizedLoops quantized[2]; // by transport
};

#define FA_DECLARE_LOOPS(code, number, name, ...) extern const TypeLoops loops_##name;
FA_TYPES(FA_DECLARE_LOOPS, )

} // namespace FA_NAMESPACE
