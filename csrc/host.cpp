// Entry point of the host device, compiled once for each instruction set (FA_NAMESPACE, FA_HOST_ENTRY):
// picks the instantiation for a call and runs one block of it.
#include "collectives/one_shot_pull.cuh"
#include "collectives/one_shot_push.cuh"
#include "collectives/two_shot_pull.cuh"
#include "collectives/two_shot_push.cuh"
#include "core/block.cuh"

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

template <class T>
void run_any(const FaLaunch &launch, u32 index) {
  return run<T>(launch, index, AnyOp{launch.op}, AnyWorld{launch.world});
}

// The hot set: sums of floats, with the world a constant up to 8 ranks. FA_HOT_SET=0 leaves it out.
template <class T>
void run_hot(const FaLaunch &launch, u32 index) {
#if !defined(FA_HOT_SET) || FA_HOT_SET
  switch (launch.op == FA_SUM ? launch.world : 0) {
  case 2: return run<T>(launch, index, Sum{}, World<2>{});
  case 3: return run<T>(launch, index, Sum{}, World<3>{});
  case 4: return run<T>(launch, index, Sum{}, World<4>{});
  case 5: return run<T>(launch, index, Sum{}, World<5>{});
  case 6: return run<T>(launch, index, Sum{}, World<6>{});
  case 7: return run<T>(launch, index, Sum{}, World<7>{});
  case 8: return run<T>(launch, index, Sum{}, World<8>{});
  default: break;
  }
#endif
  return run_any<T>(launch, index);
}

} // namespace
} // namespace FA_NAMESPACE

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block) {
  using namespace FA_NAMESPACE;
  switch (launch->dtype) {
  case FA_F16: return run_hot<F16>(*launch, block);
  case FA_BF16: return run_hot<Bf16>(*launch, block);
  case FA_F32: return run_hot<float>(*launch, block);
  case FA_F64: return run_any<double>(*launch, block);
  case FA_I8: return run_any<i8>(*launch, block);
  case FA_U8: return run_any<u8>(*launch, block);
  case FA_I32: return run_any<i32>(*launch, block);
  case FA_U32: return run_any<u32>(*launch, block);
  case FA_I64: return run_any<i64>(*launch, block);
  case FA_U64: return run_any<u64>(*launch, block);
  default: record_failure(*launch, FA_UNSUPPORTED, 0, 0);
  }
}
