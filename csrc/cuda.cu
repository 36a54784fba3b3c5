// Entry points of the CUDA device: one kernel for each member of the hot set,
// <algorithm>_<type>_sum_w<world>, and one for each algorithm and type, <algorithm>_<type>, that takes any
// operation and world; of the latter also world_<algorithm>_<type>, which runs all ranks of a world in one
// cooperative launch, blockIdx.y being the rank.
#include "collectives/one_shot_pull.cuh"
#include "collectives/one_shot_push.cuh"
#include "collectives/two_shot_pull.cuh"
#include "collectives/two_shot_push.cuh"
#include "core/block.cuh"

using namespace FA_NAMESPACE;

// At most 512 threads, which leaves 128 registers to each. The launch stays in constant memory: with
// __grid_constant__ its arrays are indexed there and not in a local copy.
#define FA_KERNEL(name, algorithm, T, op, world)                                                             \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ FaLaunch launch) {       \
    Block block;                                                                                             \
    algorithm<T>(launch, block, op, world);                                                                  \
  }

#define FA_ANY(algorithm, T, suffix)                                                                         \
  FA_KERNEL(algorithm##_##suffix, algorithm, T, AnyOp{launch.op}, AnyWorld{launch.world})                    \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                       \
      world_##algorithm##_##suffix(const FaLaunch *launches) {                                               \
    const FaLaunch &launch = launches[blockIdx.y];                                                           \
    Block block;                                                                                             \
    algorithm<T>(launch, block, AnyOp{launch.op}, AnyWorld{launch.world});                                   \
  }

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

FA_TYPES(one_shot_pull)
FA_TYPES(two_shot_pull)
FA_TYPES(one_shot_push)
FA_TYPES(two_shot_push)
