// The hot set with all ranks in one cooperative launch, blockIdx.y being the rank, and any number of
// iterations in the launch: measures a call without the gap between two kernels, and where its time goes. A
// separate module, which the library embeds only with its feature `probes`.
//
// The code is that of the hot set's kernels, except that the launch is in memory rather than in the
// parameters.
#include "stamps.cuh"

#include "../algorithms/one_shot_pull.cuh"
#include "../algorithms/one_shot_push.cuh"
#include "../algorithms/two_shot_pull.cuh"
#include "../algorithms/two_shot_push.cuh"
#include "../cuda/reduce_packs.cuh"

using namespace FA_NAMESPACE;

// An iteration ends like a kernel, with all its writes visible and none of them in the first-level cache. If
// there are several, the first does not count: it fetches code, and its ranks may begin at different times.
template <class Call>
FA_FN void run_iterations(const FaLaunch &launch, u32 iterations, u64 *sums, Call call) {
  if (threadIdx.x < kStamps)
    fa_stamps[threadIdx.x] = 0;
  __syncthreads();
  FA_ROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    stamp(kBegin);
    call();
    __syncthreads();
    stamp(kEnd);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && (iteration != 0 || iterations == 1))
      add_stamps(sums + kStamps * (launch.rank * gridDim.x + blockIdx.x));
    __syncthreads();
  }
}

#define FA_WORLD_KERNEL(ranks, type, element, algorithm, ...)                                                \
  extern "C" __global__ void __launch_bounds__(512, 1) world_##algorithm##_##type##_sum_w##ranks(            \
      const __grid_constant__ FaLaunch own, u32 iterations, u64 *sums) {                                     \
    const FaLaunch &launch = reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];                   \
    run_iterations(launch, iterations, sums, [&] {                                                           \
      Block block;                                                                                           \
      algorithm(launch, block, Reduce<element, Op<FA_SUM>, StaticWorldSize<ranks>>({}, {}));                 \
    });                                                                                                      \
  }
#define FA_WORLDS_OF_TYPE(type, element, ...) FA_HOT_WORLDS(FA_WORLD_KERNEL, type, element, __VA_ARGS__)
#define FA_WORLDS_OF(code, number, algorithm, ...) FA_HOT_TYPES(FA_WORLDS_OF_TYPE, algorithm)

FA_HOT(FA_WORLDS_OF, )
