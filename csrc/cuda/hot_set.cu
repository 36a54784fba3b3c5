// Kernels of the hot set: for each direct algorithm, hot type and number of ranks,
// <name>_<type>_sum_w<world>. They take only sums of whole packs.
#include "../algorithms/reducing.cuh"
#include "entry.cuh"
#include "reduce_packs.cuh"

#define FA_HOT_KERNEL(ranks, type, element, algorithm, ...)                                                  \
  FA_KERNEL(algorithm##_##type##_sum_w##ranks)(const __grid_constant__ FaLaunch launch) {                    \
    wait_for_launch_before();                                                                                \
    Block block;                                                                                             \
    algorithm(launch, block, Reduce<element, Op<FA_SUM>, StaticWorldSize<ranks>>({}, {}));                   \
  }

#define FA_HOT_OF_TYPE(type, element, ...) FA_HOT_WORLDS(FA_HOT_KERNEL, type, element, __VA_ARGS__)
#define FA_HOT_OF(code, number, algorithm, ...) FA_HOT_TYPES(FA_HOT_OF_TYPE, algorithm)
FA_HOT(FA_HOT_OF, )
