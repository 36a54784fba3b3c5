// Entry point of the host device, compiled once for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY):
// picks the instantiation for a call and runs one block of it.
#include "collectives/all_gather.cuh"
#include "collectives/barrier.cuh"
#include "collectives/broadcast.cuh"
#include "collectives/halving_doubling.cuh"
#include "collectives/one_shot_pull.cuh"
#include "collectives/one_shot_push.cuh"
#include "collectives/reduce.cuh"
#include "collectives/reduce_scatter.cuh"
#include "collectives/ring.cuh"
#include "collectives/transfer.cuh"
#include "collectives/two_shot_pull.cuh"
#include "collectives/two_shot_push.cuh"
#include "core/block.cuh"
#include "core/float_state.cuh"

namespace FA_NAMESPACE {
namespace {

template <class T, class Op, class WorldT>
void run(const FaLaunch &launch, u32 index, Op op, WorldT world) {
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
  case FA_ONE_SHOT_PULL: one_shot_pull<T>(launch, block, op, world); break;
  case FA_TWO_SHOT_PULL: two_shot_pull<T>(launch, block, op, world); break;
  case FA_ONE_SHOT_PUSH: one_shot_push<T>(launch, block, op, world); break;
  case FA_TWO_SHOT_PUSH: two_shot_push<T>(launch, block, op, world); break;
  default: record_failure(launch, FA_UNSUPPORTED, 0, 0);
  }
}

// Kernels that take the operation and the world at run time only.
template <class T>
void run_any(const FaLaunch &launch, u32 index) {
  const AnyOp op = {launch.op};
  const AnyWorld world = {launch.world};
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
  case FA_RING: return ring<T>(launch, block, op, world);
  case FA_HALVING_DOUBLING: return halving_doubling<T>(launch, block, op, world);
  case FA_REDUCE_SCATTER: return reduce_scatter<T>(launch, block, op, world);
  case FA_REDUCE: return reduce<T>(launch, block, op, world);
  default: return run<T>(launch, index, op, world);
  }
}

// The hot set: sums of floats, with the world a constant up to 8 ranks. FA_HOT_SET=0 leaves it out.
template <class T>
void run_hot(const FaLaunch &launch, u32 index) {
#if !defined(FA_HOT_SET) || FA_HOT_SET
  if (launch.op == FA_SUM && launch.algorithm <= FA_TWO_SHOT_PUSH) {
    switch (launch.world) {
    case 2: return run<T>(launch, index, Sum{}, World<2>{});
    case 3: return run<T>(launch, index, Sum{}, World<3>{});
    case 4: return run<T>(launch, index, Sum{}, World<4>{});
    case 5: return run<T>(launch, index, Sum{}, World<5>{});
    case 6: return run<T>(launch, index, Sum{}, World<6>{});
    case 7: return run<T>(launch, index, Sum{}, World<7>{});
    case 8: return run<T>(launch, index, Sum{}, World<8>{});
    default: break;
    }
  }
  if (launch.op == FA_SUM && launch.algorithm == FA_REDUCE_SCATTER) {
    Block block(index, launch.blocks);
    return reduce_scatter<T>(launch, block, Sum{}, AnyWorld{launch.world});
  }
#endif
  return run_any<T>(launch, index);
}

// Kernels that move elements of so many bytes.
template <class T>
void run_bits(const FaLaunch &launch, u32 index) {
  Block block(index, launch.blocks);
  switch (launch.algorithm) {
  case FA_ALL_GATHER: return all_gather<T>(launch, block);
  case FA_BROADCAST: return broadcast<T>(launch, block);
  default: return scattered_broadcast<T>(launch, block);
  }
}

void run_untyped(const FaLaunch &launch, u32 index) {
  Block block(index, launch.blocks);
  if (launch.algorithm == FA_BARRIER)
    return all_meet(launch, block);
  transfer(launch, block, *reinterpret_cast<const FaTransfers *>(launch.transfers));
}

void run_typed(const FaLaunch &launch, u32 index) {
  switch (launch.dtype) {
  case FA_F16: return run_hot<F16>(launch, index);
  case FA_BF16: return run_hot<Bf16>(launch, index);
  case FA_F32: return run_hot<float>(launch, index);
  case FA_F64: return run_any<double>(launch, index);
  case FA_I8: return run_any<i8>(launch, index);
  case FA_U8: return run_any<u8>(launch, index);
  case FA_I32: return run_any<i32>(launch, index);
  case FA_U32: return run_any<u32>(launch, index);
  case FA_I64: return run_any<i64>(launch, index);
  case FA_U64: return run_any<u64>(launch, index);
  default: record_failure(launch, FA_UNSUPPORTED, 0, 0);
  }
}

void run_by_size(const FaLaunch &launch, u32 index) {
  switch (launch.dtype) {
  case FA_I8:
  case FA_U8: return run_bits<u8>(launch, index);
  case FA_F16:
  case FA_BF16: return run_bits<F16>(launch, index);
  case FA_F32:
  case FA_I32:
  case FA_U32: return run_bits<u32>(launch, index);
  case FA_F64:
  case FA_I64:
  case FA_U64: return run_bits<u64>(launch, index);
  default: record_failure(launch, FA_UNSUPPORTED, 0, 0);
  }
}

__attribute__((noinline)) void run_block(const FaLaunch &launch, u32 index) {
  if (launch.algorithm < FA_ALL_GATHER)
    run_typed(launch, index);
  else if (launch.algorithm < FA_BARRIER)
    run_by_size(launch, index);
  else
    run_untyped(launch, index);
}

} // namespace
} // namespace FA_NAMESPACE

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block) {
  using namespace FA_NAMESPACE;
  // What moves bits computes nothing.
  if (launch->algorithm >= FA_ALL_GATHER)
    return run_block(*launch, block);
  in_default_float_state([&] { run_block(*launch, block); });
}
