// Entry points of the CUDA device. Of an allreduce by a direct algorithm one kernel for each member of the
// hot set, <name>_<type>_sum_w<world>. Of everything that reduces one for each kernel type, <name>_<type>,
// that takes any operation and world; integers are one kernel type. Of sums with a norm, and of those by
// NVLS, one for each of their types. Of what moves bytes, and of the others, one: <name>. All but the hot set
// and NVLS can also run all ranks of a world in one cooperative launch, blockIdx.y being the rank.
#include "../algorithms/all_gather.cuh"
#include "../algorithms/barrier.cuh"
#include "../algorithms/broadcast.cuh"
#include "../algorithms/halving_doubling.cuh"
#include "../algorithms/one_shot_nvls.cuh"
#include "../algorithms/one_shot_pull.cuh"
#include "../algorithms/one_shot_push.cuh"
#include "../algorithms/reduce.cuh"
#include "../algorithms/reduce_scatter.cuh"
#include "../algorithms/ring.cuh"
#include "../algorithms/transfer.cuh"
#include "../algorithms/two_shot_nvls.cuh"
#include "../algorithms/two_shot_pull.cuh"
#include "../algorithms/two_shot_push.cuh"
#include "../algorithms/two_shot_quantized.cuh"
#include "../core/dependent_launch.cuh"
#include "../sinks/rms_norm.cuh"
#include "multicast.cuh"
#include "quantized.cuh"
#include "reduce.cuh"
#include "team_rows.cuh"

using namespace FA_NAMESPACE;

// The launch of this block's rank: the kernel's own, or its rank's where one launch runs a world. One code
// for both, as there are many of these kernels.
static FA_FN const FaLaunch &launch_of(const FaLaunch &own) {
  return own.launches == 0 ? own : reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];
}

// At most 512 threads, which leaves 128 registers to each. The launch stays in constant memory: with
// __grid_constant__ its arrays are indexed there and not in a local copy.
#define FA_KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 1) name

#define FA_HOT_KERNEL(ranks, type, element, algorithm, ...)                                                  \
  FA_KERNEL(algorithm##_##type##_sum_w##ranks)(const __grid_constant__ FaLaunch launch) {                    \
    wait_for_launch_before();                                                                                \
    Block block;                                                                                             \
    algorithm(launch, block, Reduce<element, Op<FA_SUM>, World<ranks>>({}, {}));                             \
  }

#define FA_ANY_KERNEL(type, element, algorithm, ...)                                                         \
  FA_KERNEL(algorithm##_##type)(const __grid_constant__ FaLaunch own) {                                      \
    wait_for_launch_before();                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    algorithm(launch, block,                                                                                 \
              Reduce<element, AnyOp, AnyWorld>({launch.op, launch.dtype, launch.scale}, {launch.world}));    \
  }

#define FA_MOVING_KERNEL(code, number, name, ...)                                                            \
  FA_KERNEL(name)(const __grid_constant__ FaLaunch own) {                                                    \
    wait_for_launch_before();                                                                                \
    Block block;                                                                                             \
    name(launch_of(own), block);                                                                             \
  }

#define FA_HOT_OF_TYPE(type, element, ...) FA_HOT_WORLDS(FA_HOT_KERNEL, type, element, __VA_ARGS__)
#define FA_HOT_OF(code, number, algorithm, ...) FA_HOT_TYPES(FA_HOT_OF_TYPE, algorithm)
#define FA_ANY_OF(code, number, algorithm, ...) FA_KERNEL_TYPES(FA_ANY_KERNEL, algorithm)

FA_HOT(FA_HOT_OF, )
FA_REDUCING(FA_ANY_OF, )
FA_MOVING(FA_MOVING_KERNEL, )

// Rows that teams of blocks have. Not where one launch runs a world, whose operands are not in constant
// memory: there rows are whole blocks'.
template <u32 Code, class T, class Reduce>
static FA_FN bool push_in_teams(const FaLaunch &own, const FaRmsNorm &norm, const Reduce &reduce) {
  constexpr bool kTwoShot = Code == FA_TWO_SHOT_PUSH_NORM;
  if constexpr (Code == FA_ONE_SHOT_PUSH_NORM || kTwoShot) {
    if ((own.launches == 0) & (norm.team != 0)) {
      Block block;
      TeamRows<T, Reduce, kTwoShot>(own, norm, reduce).push(block);
      return true;
    }
  }
  return false;
}

// The norm's operands come after the launch, as messages do.
#define FA_NORMING_KERNEL(type, element, code, name, algorithm, ...)                                         \
  FA_KERNEL(name##_##type)                                                                                   \
  (const __grid_constant__ FaLaunch own, const __grid_constant__ FaRmsNorm operands) {                       \
    wait_for_launch_before();                                                                                \
    using Sum = Reduce<element, Op<FA_SUM>, AnyWorldBy<8>>;                                                  \
    if (push_in_teams<code, element>(own, operands, Sum({}, {own.world})))                                   \
      return;                                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    const FaRmsNorm &norm =                                                                                  \
        own.launches == 0 ? operands : *reinterpret_cast<const FaRmsNorm *>(launch.operands);                \
    algorithm(launch, block, Sum({}, {launch.world}),                                                        \
              RmsNorm<element, code == FA_TWO_SHOT_PUSH_NORM>(norm));                                        \
  }
#define FA_NORMING_OF(code, number, name, algorithm, ...)                                                    \
  FA_HOT_TYPES(FA_NORMING_KERNEL, code, name, algorithm)
FA_NORMING(FA_NORMING_OF, )

FA_KERNEL(barrier)(const __grid_constant__ FaLaunch own) {
  wait_for_launch_before();
  Block block;
  all_meet(launch_of(own), block);
}

// The messages come after the launch, as they are too many for every launch to have room for. Where one
// launch runs a world they are in memory, as its launches are.
FA_KERNEL(transfer)(const __grid_constant__ FaLaunch own, const __grid_constant__ FaTransfers messages) {
  wait_for_launch_before();
  const FaLaunch &launch = launch_of(own);
  Block block;
  transfer(launch, block,
           own.launches == 0 ? messages : *reinterpret_cast<const FaTransfers *>(launch.operands));
}

FA_KERNEL(two_shot_quantized)(const __grid_constant__ FaLaunch own) {
  wait_for_launch_before();
  const FaLaunch &launch = launch_of(own);
  Block block;
  two_shot_quantized(launch, block, QuantizedTransport(launch));
}

// A GPU is a member of a multicast group once, so that no launch runs a world.
#if __CUDA_ARCH__ >= 900
#define FA_NVLS_KERNEL(type, element, name, ...)                                                             \
  FA_KERNEL(name##_##type)(const __grid_constant__ FaLaunch launch) {                                        \
    wait_for_launch_before();                                                                                \
    Block block;                                                                                             \
    name(launch, block, MulticastSum<element>());                                                            \
  }
#define FA_NVLS_OF(code, number, name, ...) FA_HOT_TYPES(FA_NVLS_KERNEL, name)
FA_NVLS(FA_NVLS_OF, )
#endif
