// Entry point of the host device, compiled for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY): runs one
// block of a launch by the launch's algorithm. FA_BF16_ENTRY is a second one, which takes the loops of bf16
// from FA_BF16_NAMESPACE: only they have use for the instructions of bf16.
#include "../algorithms/all.cuh"
#include "../core/float_state.cuh"
#include "../readers/experts.cuh"
#include "../sinks/rms_norm_host.hpp"
#include "../sinks/sharded_rows_host.hpp"
#include "loops.hpp"
#include "multicast.hpp"
#include "quantized_transport.hpp"
#include "reduce_runs.hpp"

#if defined(FA_BF16_ENTRY)
namespace FA_BF16_NAMESPACE {
// The type of its own namespace has the same layout.
extern const FA_NAMESPACE::TypeLoops loops_bf16;
} // namespace FA_BF16_NAMESPACE
#endif

namespace FA_NAMESPACE {
namespace {

#define FA_ONE_TYPE(...) +1
constexpr u32 kTypes = 0 FA_TYPES(FA_ONE_TYPE, );

// By type. A code beyond the end does not compile.
struct LoopsByType {
  const TypeLoops *of[kTypes];
  constexpr const TypeLoops &operator[](u32 dtype) const { return *of[dtype]; }
};
constexpr LoopsByType loops_by_type() {
  LoopsByType loops = {};
#define FA_LOOPS(code, number, name, ...) loops.of[code] = &loops_##name;
  FA_TYPES(FA_LOOPS, )
  return loops;
}
constexpr LoopsByType kLoops = loops_by_type();

__attribute__((noinline)) void run_reducing(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  if (launch.dtype >= kTypes || launch.op >= kOps || !loops[launch.dtype].reduce.of[launch.op][0])
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const Reduce with(loops[launch.dtype].reduce, launch);
  switch (launch.algorithm) {
#define FA_CASE(code, number, name, ...)                                                                     \
  case code: return name(launch, block, with);
    FA_REDUCING(FA_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_norming(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  if (launch.dtype >= kTypes || !loops[launch.dtype].rows.norm || launch.op != FA_SUM)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  const TypeLoops &own = loops[launch.dtype];
  Block block(index, launch.blocks);
  const FaFused &fused = *reinterpret_cast<const FaFused *>(launch.operands);
  const bool gathers = fused.experts.top_k != 0;
  if (gathers && !find_experts(launch, fused, block))
    return;
  const Reduce with(own.reduce, launch, gathers ? ExpertRows{own.rows.gather, &fused} : ExpertRows{});
  const NormedRows norm(own.rows, fused, launch);
  switch (launch.algorithm) {
#define FA_NORMING_CASE(code, number, name, algorithm, ...)                                                  \
  case code: return algorithm(launch, block, with, norm);
    FA_NORMING(FA_NORMING_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_sharded(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  if (launch.dtype >= kTypes || !loops[launch.dtype].rows.norm)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const ShardedRows rows(loops[launch.dtype].rows, *reinterpret_cast<const FaShardedNorm *>(launch.operands),
                         launch);
  switch (launch.algorithm) {
#define FA_SHARDED_CASE(code, number, name, ...)                                                             \
  case code: return name(launch, block, rows);
    FA_SHARDED(FA_SHARDED_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_nvls(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  if (launch.multicast == 0 || launch.dtype >= kTypes || launch.op != FA_SUM)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  const MulticastSum sum(loops[launch.dtype].reduce, launch);
  switch (launch.algorithm) {
#define FA_NVLS_CASE(code, number, name, ...)                                                                \
  case code: return name(launch, block, sum);
    FA_NVLS(FA_NVLS_CASE, )
  default: return;
  }
}

__attribute__((noinline)) void run_quantized(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  constexpr u32 kTransports = sizeof(TypeLoops::quantized) / sizeof(QuantizedLoops);
  if (launch.dtype >= kTypes || launch.transport >= kTransports ||
      !loops[launch.dtype].quantized[launch.transport].sum)
    return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  Block block(index, launch.blocks);
  two_shot_quantized(launch, block,
                     QuantizedTransport(loops[launch.dtype].quantized[launch.transport], launch));
}

void run_other(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
#define FA_MOVE(code, number, name, ...)                                                                     \
  case code: return name(launch, block);
    FA_MOVING(FA_MOVE, )
  case FA_BARRIER: return run_barrier(launch, block);
  case FA_TRANSFER: return transfer(launch, block, *reinterpret_cast<const FaTransfers *>(launch.operands));
  case FA_ALL_GATHER_ROWS:
    return all_gather_rows(launch, block, *reinterpret_cast<const FaGatheredRows *>(launch.operands));
  case FA_TWO_SHOT_QUANTIZED: return in_default_float_state([&] { run_quantized(launch, index, loops); });
#define FA_NORM(code, ...) case code:
    FA_NORMING(FA_NORM, )
    return in_default_float_state([&] { run_norming(launch, index, loops); });
    FA_NVLS(FA_NORM, )
    return in_default_float_state([&] { run_nvls(launch, index, loops); });
    FA_SHARDED(FA_NORM, )
    return in_default_float_state([&] { run_sharded(launch, index, loops); });
  default: return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  }
}

void run(const FaLaunch &launch, u32 index, const LoopsByType &loops) {
  switch (launch.algorithm) {
#define FA_REDUCING_CODE(code, ...) case code:
    FA_REDUCING(FA_REDUCING_CODE, )
    return in_default_float_state([&] { run_reducing(launch, index, loops); });
  default: return run_other(launch, index, loops);
  }
}

#if defined(FA_BF16_ENTRY)
constexpr LoopsByType bf16_loops_by_type() {
  LoopsByType loops = kLoops;
  loops.of[FA_BF16] = &FA_BF16_NAMESPACE::loops_bf16;
  return loops;
}
constexpr LoopsByType kBf16Loops = bf16_loops_by_type();
#endif

} // namespace
} // namespace FA_NAMESPACE

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block) {
  FA_NAMESPACE::run(*launch, block, FA_NAMESPACE::kLoops);
}
#if defined(FA_BF16_ENTRY)
extern "C" void FA_BF16_ENTRY(const FaLaunch *launch, uint32_t block) {
  FA_NAMESPACE::run(*launch, block, FA_NAMESPACE::kBf16Loops);
}
#endif
