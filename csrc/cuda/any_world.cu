// Of everything that reduces one kernel for each kernel type, <name>_<type>, that takes any operation and
// world; integers are one kernel type. One cooperative launch can also run all ranks of a world, blockIdx.y
// being the rank.
#include "../algorithms/reducing.cuh"
#include "entry.cuh"
#include "reduce_packs.cuh"

#define FA_ANY_KERNEL(type, element, algorithm, ...)                                                         \
  FA_KERNEL(algorithm##_##type)(const __grid_constant__ FaLaunch own) {                                      \
    wait_for_launch_before();                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    algorithm(launch, block,                                                                                 \
              Reduce<element, AnyOp, AnyWorld>({launch.op, launch.dtype, launch.scale}, {launch.world}));    \
  }

#define FA_ANY_OF(code, number, algorithm, ...) FA_KERNEL_TYPES(FA_ANY_KERNEL, algorithm)
FA_REDUCING(FA_ANY_OF, )
