// Kernels of all reducing algorithms, for any operation and any number of ranks: <name>_<type> for each
// kernel type. All integers are one kernel type. A cooperative launch can also run all ranks at once, with
// blockIdx.y as the rank.
#include "../algorithms/reducing.cuh"
#include "entry.cuh"
#include "reduce_packs.cuh"

#define FA_ANY_KERNEL(type, element, algorithm, ...)                                                         \
  FA_KERNEL(algorithm##_##type)(const __grid_constant__ FaLaunch own) {                                      \
    wait_for_launch_before();                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    algorithm(                                                                                               \
        launch, block,                                                                                       \
        Reduce<element, AnyOp, AnyWorldSize>({launch.op, launch.dtype, launch.scale}, {launch.world}));      \
  }

#define FA_ANY_OF(code, number, algorithm, ...) FA_KERNEL_TYPES(FA_ANY_KERNEL, algorithm)
FA_REDUCING(FA_ANY_OF, )
