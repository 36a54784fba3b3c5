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

// Calls run(launch, block, sum, norm) for the rank of this block. The sum loads from `Batch` ranks at a time.
// With `MayHaveExperts`, inputs may be computed from experts' rows.
template <class T, u32 Batch, bool MayHaveExperts, class Run>
static FA_FN void sum_rows(const FaLaunch &own, const FaFused &operands, const Run &run) {
  const FaLaunch &launch = launch_of(own);
  Block block;
  const FaFused &norm = own.launches == 0 ? operands : *reinterpret_cast<const FaFused *>(launch.operands);
  using Sum = DynamicWorldSize<Batch>;
  if constexpr (MayHaveExperts) {
    // All ranks have experts, or none has.
    if (operands.experts.top_k != 0 && !find_experts(launch, norm, block))
      return;
    run(launch, block, Reduce<T, Op<FA_SUM>, Sum, ExpertRows<T>>({}, {launch.world}, {launch, norm}), norm);
  } else {
    run(launch, block, Reduce<T, Op<FA_SUM>, Sum>({}, {launch.world}), norm);
  }
}

template <class T>
static FA_FN void one_shot_pull_norm(const FaLaunch &own, const FaFused &operands) {
  sum_rows<T, 8, true>(own, operands,
                       [](const FaLaunch &launch, Block &block, const auto &sum, const FaFused &norm) {
                         one_shot_pull(launch, block, sum, NormedRows<T, false>(norm));
                       });
}

template <class T>
static FA_FN void two_shot_pull_norm(const FaLaunch &own, const FaFused &operands) {
  sum_rows<T, 8, true>(own, operands,
                       [](const FaLaunch &launch, Block &block, const auto &sum, const FaFused &norm) {
                         two_shot_pull(launch, block, sum, NormedRows<T, false>(norm));
                       });
}

// A reduce-scatter has no experts.
template <class T>
static FA_FN void reduce_scatter_norm(const FaLaunch &own, const FaFused &operands) {
  sum_rows<T, 8, false>(own, operands,
                        [](const FaLaunch &launch, Block &block, const auto &sum, const FaFused &norm) {
                          reduce_scatter(launch, block, sum, NormedRows<T, false>(norm));
                        });
}

// One-shot or two-shot. Rows are pushed by teams of blocks if the launch has any. A launch of all ranks,
// whose operands are not in constant memory, has none: there each row belongs to one block. Few pushes have
// rows without teams: those poll rank by rank, which is less code.
template <class T>
static FA_FN void push_norm(const FaLaunch &own, const FaFused &operands) {
  if (operands.team != 0) {
    Block block;
    using Sum = Reduce<T, Op<FA_SUM>, DynamicWorldSize<8>, ExpertRows<T>>;
    const Sum sum({}, {own.world}, {own, operands});
    TeamRows<T, Sum>(own, operands, sum).push(block);
    return;
  }
  sum_rows<T, 1, true>(own, operands,
                       [](const FaLaunch &launch, Block &block, const auto &sum, const FaFused &norm) {
                         if (launch.algorithm == FA_TWO_SHOT_PUSH_NORM)
                           two_shot_push(launch, block, sum, NormedRows<T, true>(norm));
                         else
                           one_shot_push(launch, block, sum, NormedRows<T, false>(norm));
                       });
}

// The norm's operands are a second parameter, as the messages of a transfer are.
#define FA_NORMING_KERNEL(type, element, name, ...)                                                          \
  FA_KERNEL(name##_##type)                                                                                   \
  (const __grid_constant__ FaLaunch own, const __grid_constant__ FaFused operands) {                         \
    wait_for_launch_before();                                                                                \
    name<element>(own, operands);                                                                            \
  }
#define FA_NORMING_OF(name, ...) FA_HOT_TYPES(FA_NORMING_KERNEL, name)
FA_NORMING_NAMES(FA_NORMING_OF, )

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
