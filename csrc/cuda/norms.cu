// Kernels of sums with a norm, and of norms of rows that are divided among ranks, <name>_<type> for each hot
// type, for any number of ranks. A launch can also run all ranks at once.
#include "../algorithms/reducing.cuh"
#include "../algorithms/sharded_norm.cuh"
#include "../readers/experts_cuda.cuh"
#include "../sinks/rms_norm_cuda.cuh"
#include "../sinks/sharded_rows_cuda.cuh"
#include "entry.cuh"
#include "reduce_packs.cuh"
#include "team_rows.cuh"

// Few pushes have rows without teams: those poll rank by rank, which is less code.
template <u32 Code>
constexpr bool kPushes = Code == FA_ONE_SHOT_PUSH_NORM || Code == FA_TWO_SHOT_PUSH_NORM;
template <class T, u32 Batch = 8>
using SumOf = Reduce<T, Op<FA_SUM>, DynamicWorldSize<Batch>, ExpertRows<T>>;
// A reduce-scatter has no experts.
template <u32 Code>
constexpr bool kMayHaveExperts = Code != FA_REDUCE_SCATTER_NORM;
template <u32 Code, class T>
FA_FN auto sum_for(const FaLaunch &launch, const FaFused &norm) {
  if constexpr (kMayHaveExperts<Code>)
    return SumOf < T, kPushes<Code> ? 1 : 8 > ({}, {launch.world}, {launch, norm});
  else
    return Reduce<T, Op<FA_SUM>, DynamicWorldSize<8>>({}, {launch.world});
}

// Pushes rows by teams of blocks, and returns whether the launch has any. A launch of all ranks, whose
// operands are not in constant memory, has none: there each row belongs to one block.
template <u32 Code, class T>
static FA_FN bool push_in_teams(const FaLaunch &own, const FaFused &norm) {
  if constexpr (kPushes<Code>) {
    if (norm.team != 0) {
      Block block;
      const SumOf<T> sum({}, {own.world}, {own, norm});
      TeamRows<T, SumOf<T>, Code == FA_TWO_SHOT_PUSH_NORM>(own, norm, sum).push(block);
      return true;
    }
  }
  return false;
}

// The norm's operands are a second parameter, as the messages of a transfer are.
#define FA_NORMING_KERNEL(type, element, code, name, algorithm, ...)                                         \
  FA_KERNEL(name##_##type)                                                                                   \
  (const __grid_constant__ FaLaunch own, const __grid_constant__ FaFused operands) {                         \
    wait_for_launch_before();                                                                                \
    if (push_in_teams<code, element>(own, operands))                                                         \
      return;                                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    const FaFused &norm =                                                                                    \
        own.launches == 0 ? operands : *reinterpret_cast<const FaFused *>(launch.operands);                  \
    /* All ranks have experts, or none has. */                                                               \
    if (kMayHaveExperts<code> && operands.experts.top_k != 0 && !find_experts(launch, norm, block))          \
      return;                                                                                                \
    algorithm(launch, block, sum_for<code, element>(launch, norm),                                           \
              NormedRows<element, code == FA_TWO_SHOT_PUSH_NORM>(norm));                                     \
  }
#define FA_NORMING_OF(code, number, name, algorithm, ...)                                                    \
  FA_HOT_TYPES(FA_NORMING_KERNEL, code, name, algorithm)
FA_NORMING(FA_NORMING_OF, )

#define FA_SHARDED_KERNEL(type, element, name, ...)                                                          \
  FA_KERNEL(name##_##type)                                                                                   \
  (const __grid_constant__ FaLaunch own, const __grid_constant__ FaShardedNorm operands) {                   \
    wait_for_launch_before();                                                                                \
    const FaLaunch &launch = launch_of(own);                                                                 \
    Block block;                                                                                             \
    const FaShardedNorm &norm =                                                                              \
        own.launches == 0 ? operands : *reinterpret_cast<const FaShardedNorm *>(launch.operands);            \
    name(launch, block, ShardedRows<element>(norm, launch.world));                                           \
  }
#define FA_SHARDED_OF(code, number, name, ...) FA_HOT_TYPES(FA_SHARDED_KERNEL, name)
FA_SHARDED(FA_SHARDED_OF, )
