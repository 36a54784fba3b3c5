// Entry point of the host device, compiled once for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY): the
// protocols, and which of them a launch runs one block of.
#include "../algorithms/all.cuh"
#include "../core/float_state.cuh"
#include "../sinks/rms_norm_host.hpp"
#include "multicast.hpp"
#include "quantized_transport.hpp"
#include "reduce_runs.hpp"

namespace FA_NAMESPACE {
namespace {

#define FA_SPANS(code, number, name, ...) &reduce_spans_##name,
constexpr const ReduceSpans *kReduceSpans[] = {FA_TYPES(FA_SPANS, )};

constexpr u32 kTypes = sizeof(kReduceSpans) / sizeof(*kReduceSpans);

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
  const Reduce with(*kReduceSpans[launch.dtype], launch);
  const NormedRows norm(*loops, *reinterpret_cast<const FaFused *>(launch.operands), launch);
  switch (launch.algorithm) {
#define FA_NORMING_CASE(code, number, name, algorithm, ...)                                                  \
  case code: return algorithm(launch, block, with, norm);
    FA_NORMING(FA_NORMING_CASE, )
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
  case FA_BARRIER: return all_meet(launch, block);
  case FA_TRANSFER: return transfer(launch, block, *reinterpret_cast<const FaTransfers *>(launch.operands));
  case FA_TWO_SHOT_QUANTIZED: return in_default_float_state([&] { run_quantized(launch, index); });
#define FA_NORM(code, ...) case code:
    FA_NORMING(FA_NORM, )
    return in_default_float_state([&] { run_norming(launch, index); });
    FA_NVLS(FA_NORM, )
    return in_default_float_state([&] { run_nvls(launch, index); });
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
