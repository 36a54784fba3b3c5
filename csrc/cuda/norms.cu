// Of sums with a norm one kernel for each of their types, <name>_<type>, of any world, which one launch can
// also run.
#include "../algorithms/one_shot_pull.cuh"
#include "../algorithms/one_shot_push.cuh"
#include "../algorithms/two_shot_pull.cuh"
#include "../algorithms/two_shot_push.cuh"
#include "../sinks/rms_norm.cuh"
#include "entry.cuh"
#include "reduce.cuh"
#include "team_rows.cuh"

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
