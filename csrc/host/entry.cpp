// Entry point of the host device, compiled once for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY): the
// protocols, and which of them a launch runs one block of.
#include "../algorithms/all_gather.cuh"
#include "../algorithms/barrier.cuh"
#include "../algorithms/broadcast.cuh"
#include "../algorithms/halving_doubling.cuh"
#include "../algorithms/one_shot_pull.cuh"
#include "../algorithms/one_shot_push.cuh"
#include "../algorithms/reduce.cuh"
#include "../algorithms/reduce_scatter.cuh"
#include "../algorithms/ring.cuh"
#include "../algorithms/transfer.cuh"
#include "../algorithms/two_shot_pull.cuh"
#include "../algorithms/two_shot_push.cuh"
#include "../core/float_state.cuh"
#include "reduce.hpp"

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

void run_other(const FaLaunch &launch, u32 index) {
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
#define FA_MOVE(code, number, name, ...)                                                                     \
  case code: return name(launch, block);
    FA_MOVING(FA_MOVE, )
  case FA_BARRIER: return all_meet(launch, block);
  case FA_TRANSFER: return transfer(launch, block, *reinterpret_cast<const FaTransfers *>(launch.transfers));
  default: return record_failure(launch, {FA_UNSUPPORTED, 0}, 0);
  }
}

} // namespace
} // namespace FA_NAMESPACE

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block) {
  using namespace FA_NAMESPACE;
  // What moves bytes computes nothing.
  if (launch->algorithm >= FA_ALL_GATHER)
    return run_other(*launch, block);
  in_default_float_state([&] { run_reducing(*launch, block); });
}
