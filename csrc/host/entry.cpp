// Entry point of the host device, compiled for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY): runs one
// block of a launch by the launch's algorithm.
#include "../algorithms/all.cuh"
#include "../core/float_state.cuh"
#include "../readers/experts.cuh"
#include "../sinks/rms_norm_host.hpp"
#include "../sinks/sharded_rows_host.hpp"
#include "multicast.hpp"
#include "quantized_transport.hpp"
#include "reduce_runs.hpp"

namespace FA_NAMESPACE {
namespace {

#define FA_ONE_TYPE(...) +1
constexpr u32 kTypes = 0 FA_TYPES(FA_ONE_TYPE, );

// By type. A code beyond the end does not compile.
struct SpansByType {
  const ReduceSpans *of[kTypes];
  constexpr const ReduceSpans *operator[](u32 dtype) const { return of[dtype]; }
};
constexpr SpansByType spans_by_type() {
  SpansByType spans = {};
#define FA_SPANS(code, number, name, ...) spans.of[code] = &reduce_spans_##name;
  FA_TYPES(FA_SPANS, )
  return spans;
}
constexpr SpansByType kReduceSpans = spans_by_type();

__attribute__((noinline)) void run_reducing(const FaLaunch &launch, u32 index) {
  if (launch.dtype >= kTypes || launch.op >= kOps || !kReduceSpans[launch.dtype]->of[launch.op][0])
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const Reduce with(*kReduceSpans[launch.dtype], launch);
  switch (launch.algorithm) {
#define FA_CASE(code, number, name, ...)                                                                     \
  case code: return name(launch, block, with);
    FA_REDUCING(FA_CASE, )
  default: return;
  }
}

const RowLoops *row_loops_of(u32 dtype) {
#define FA_ROWS(name, element, ...)                                                                          \
  if (kReduceSpans[dtype] == &reduce_spans_##name)                                                           \
    return &row_loops_##name;
  FA_HOT_TYPES(FA_ROWS, )
  return nullptr;
}

__attribute__((noinline)) void run_norming(const FaLaunch &launch, u32 index) {
  const RowLoops *loops = launch.dtype < kTypes ? row_loops_of(launch.dtype) : nullptr;
  if (loops == nullptr || launch.op != FA_SUM)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const FaFused &fused = *reinterpret_cast<const FaFused *>(launch.operands);
  const bool gathers = fused.experts.top_k != 0;
  if (gathers && !find_experts(launch, fused, block))
    return;
  const Reduce with(*kReduceSpans[launch.dtype], launch,
                    gathers ? ExpertRows{loops->gather, &fused} : ExpertRows{});
  const NormedRows norm(*loops, fused, launch);
  switch (launch.algorithm) {
#define FA_NORMING_CASE(code, number, name, algorithm, ...)                                                  \
  case code: return algorithm(launch, block, with, norm);
    FA_NORMING(FA_NORMING_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_sharded(const FaLaunch &launch, u32 index) {
  const RowLoops *loops = launch.dtype < kTypes ? row_loops_of(launch.dtype) : nullptr;
  if (loops == nullptr)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const ShardedRows rows(*loops, *reinterpret_cast<const FaShardedNorm *>(launch.operands), launch);
  switch (launch.algorithm) {
#define FA_SHARDED_CASE(code, number, name, ...)                                                             \
  case code: return name(launch, block, rows);
    FA_SHARDED(FA_SHARDED_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_nvls(const FaLaunch &launch, u32 index) {
  if (launch.multicast == 0 || launch.dtype >= kTypes || launch.op != FA_SUM)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const MulticastSum sum(*kReduceSpans[launch.dtype], launch);
  switch (launch.algorithm) {
#define FA_NVLS_CASE(code, number, name, ...)                                                                \
  case code: return name(launch, block, sum);
    FA_NVLS(FA_NVLS_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_quantized(const FaLaunch &launch, u32 index) {
  const QuantizedLoops *loops = quantized_loops(launch.dtype, launch.transport);
  if (loops == nullptr)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  two_shot_quantized(launch, block, QuantizedTransport(*loops, launch));
}

void run_other(const FaLaunch &launch, u32 index) {
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
#define FA_MOVE(code, number, name, ...)                                                                     \
  case code: return name(launch, block);
    FA_MOVING(FA_MOVE, )
  case FA_BARRIER: return run_barrier(launch, block);
  case FA_TRANSFER: return transfer(launch, block, *reinterpret_cast<const FaTransfers *>(launch.operands));
  case FA_ALL_GATHER_ROWS:
    return all_gather_rows(launch, block, *reinterpret_cast<const FaGatheredRows *>(launch.operands));
  case FA_TWO_SHOT_QUANTIZED: return in_default_float_state([&] { run_quantized(launch, index); });
#define FA_NORM(code, ...) case code:
    FA_NORMING(FA_NORM, )
    return in_default_float_state([&] { run_norming(launch, index); });
    FA_NVLS(FA_NORM, )
    return in_default_float_state([&] { run_nvls(launch, index); });
    FA_SHARDED(FA_NORM, )
    return in_default_float_state([&] { run_sharded(launch, index); });
  default: return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  }
}

} // namespace
} // namespace FA_NAMESPACE

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block) {
  using namespace FA_NAMESPACE;
  switch (launch->algorithm) {
#define FA_REDUCING_CODE(code, ...) case code:
    FA_REDUCING(FA_REDUCING_CODE, )
    return in_default_float_state([&] { run_reducing(*launch, block); });
  default: return run_other(*launch, block);
  }
}
