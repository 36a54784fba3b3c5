// The hot set with all ranks in one cooperative launch, blockIdx.y being the rank, and as many turns as
// wanted within the launch: what a call takes without the gap between two kernels, and where in it the time
// goes. A module of its own, which the library does not embed unless its feature `probes` is on.
//
// The code is that of the hot set's kernels, but for where the launch is: in memory, and not among the
// parameters.
#include "stamps.cuh"

#include "../algorithms/one_shot_pull.cuh"
#include "../algorithms/one_shot_push.cuh"
#include "../algorithms/two_shot_pull.cuh"
#include "../algorithms/two_shot_push.cuh"
#include "../cuda/reduce_packs.cuh"

using namespace FA_NAMESPACE;

// A turn ends as a kernel does, with all that it wrote visible, and nothing of it in the first-level cache.
// The first is not counted where there are several: it fetches code, and its ranks may begin at different
// times.
template <class Call>
FA_FN void turns_of(const FaLaunch &launch, u32 turns, u64 *sums, Call call) {
  if (threadIdx.x < kStamps)
    fa_stamps[threadIdx.x] = 0;
  __syncthreads();
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    stamp(kBegin);
    call();
    __syncthreads();
    stamp(kEnd);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && (turn != 0 || turns == 1))
      add_stamps(sums + kStamps * (launch.rank * gridDim.x + blockIdx.x));
    __syncthreads();
  }
}

#define FA_WORLD_KERNEL(ranks, type, element, algorithm, ...)                                                \
  extern "C" __global__ void __launch_bounds__(512, 1) world_##algorithm##_##type##_sum_w##ranks(            \
      const __grid_constant__ FaLaunch own, u32 turns, u64 *sums) {                                          \
    const FaLaunch &launch = reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];                   \
    turns_of(launch, turns, sums, [&] {                                                                      \
      Block block;                                                                                           \
      algorithm(launch, block, Reduce<element, Op<FA_SUM>, World<ranks>>({}, {}));                           \
    });                                                                                                      \
  }
#define FA_WORLDS_OF_TYPE(type, element, ...) FA_HOT_WORLDS(FA_WORLD_KERNEL, type, element, __VA_ARGS__)
#define FA_WORLDS_OF(code, number, algorithm, ...) FA_HOT_TYPES(FA_WORLDS_OF_TYPE, algorithm)

FA_HOT(FA_WORLDS_OF, )
