// Entry points of the CUDA device. Of an allreduce one kernel for each member of the hot set,
// <algorithm>_<type>_sum_w<world>. Of every algorithm and collective that reduces one for each type,
// <name>_<type>, that takes any operation and world; of those that move elements one for each size,
// <name>_<bits>; and of the others one, <name>. All but the hot set can also run all ranks of a world in one
// cooperative launch, blockIdx.y being the rank.
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

using namespace FA_NAMESPACE;

// The launch of this block's rank: the kernel's own, or its rank's where one launch runs a world. One code
// for both, as there are many of these kernels.
static FA_FN const FaLaunch &launch_of(const FaLaunch &own) {
  return own.launches == 0 ? own : reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];
}

// At most 512 threads, which leaves 128 registers to each. The launch stays in constant memory: with
// __grid_constant__ its arrays are indexed there and not in a local copy.
#define FA_KERNEL(name, algorithm, T, op, world)                                                             \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ FaLaunch launch) {       \
    Block block;                                                                                             \
    algorithm<T>(launch, block, op, world);                                                                  \
  }

// `arguments`: of the function after its launch and block, in brackets and each after a comma.
#define FA_RUN(name, function, arguments)                                                                    \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ FaLaunch own) {          \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    function(launch, block FA_EXPAND arguments);                                                             \
  }
#define FA_EXPAND(...) __VA_ARGS__

#define FA_ANY(algorithm, T, suffix)                                                                         \
  FA_RUN(algorithm##_##suffix, algorithm<T>, (, AnyOp{launch.op}, AnyWorld{launch.world}))

#define FA_ANY_TYPES(algorithm)                                                                              \
  FA_ANY(algorithm, F16, f16)                                                                                \
  FA_ANY(algorithm, Bf16, bf16)                                                                              \
  FA_ANY(algorithm, float, f32)                                                                              \
  FA_ANY(algorithm, double, f64)                                                                             \
  FA_ANY(algorithm, i8, i8)                                                                                  \
  FA_ANY(algorithm, u8, u8)                                                                                  \
  FA_ANY(algorithm, i32, i32)                                                                                \
  FA_ANY(algorithm, u32, u32)                                                                                \
  FA_ANY(algorithm, i64, i64)                                                                                \
  FA_ANY(algorithm, u64, u64)

#define FA_SIZES(collective)                                                                                 \
  FA_RUN(collective##_8, collective<u8>, ())                                                                 \
  FA_RUN(collective##_16, collective<F16>, ())                                                               \
  FA_RUN(collective##_32, collective<u32>, ())                                                               \
  FA_RUN(collective##_64, collective<u64>, ())

#define FA_HOT(algorithm, T, suffix, W)                                                                      \
  FA_KERNEL(algorithm##_##suffix##_sum_w##W, algorithm, T, Sum{}, World<W>{})

#define FA_HOT_WORLDS(algorithm, T, suffix)                                                                  \
  FA_HOT(algorithm, T, suffix, 2)                                                                            \
  FA_HOT(algorithm, T, suffix, 3)                                                                            \
  FA_HOT(algorithm, T, suffix, 4)                                                                            \
  FA_HOT(algorithm, T, suffix, 5)                                                                            \
  FA_HOT(algorithm, T, suffix, 6)                                                                            \
  FA_HOT(algorithm, T, suffix, 7)                                                                            \
  FA_HOT(algorithm, T, suffix, 8)

#define FA_TYPES(algorithm)                                                                                  \
  FA_HOT_WORLDS(algorithm, F16, f16)                                                                         \
  FA_HOT_WORLDS(algorithm, Bf16, bf16)                                                                       \
  FA_HOT_WORLDS(algorithm, float, f32)                                                                       \
  FA_ANY_TYPES(algorithm)

FA_TYPES(one_shot_pull)
FA_TYPES(two_shot_pull)
FA_TYPES(one_shot_push)
FA_TYPES(two_shot_push)
FA_ANY_TYPES(ring)
FA_ANY_TYPES(halving_doubling)
FA_ANY_TYPES(reduce_scatter)
FA_ANY_TYPES(reduce)

FA_SIZES(all_gather)
FA_SIZES(broadcast)
FA_SIZES(scattered_broadcast)

FA_RUN(barrier, all_meet, ())

// The messages come after the launch, as they are too many for every launch to have room for. Where one
// launch runs a world they are in memory, as its launches are.
extern "C" __global__ void __launch_bounds__(512, 1)
    transfer(const __grid_constant__ FaLaunch own, const __grid_constant__ FaTransfers messages) {
  const FaLaunch &launch = launch_of(own);
  Block block;
  transfer(launch, block,
           own.launches == 0 ? messages : *reinterpret_cast<const FaTransfers *>(launch.transfers));
}
