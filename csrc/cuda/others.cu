// Kernels of data movement and of everything else, <name>, for any number of ranks; a launch can also run all
// ranks at once. Kernels of NVLS sums, <name>_<type> for each hot type. The probe of shared memory.
#include "../algorithms/all.cuh"
#include "entry.cuh"
#include "multicast.cuh"
#include "quantized_transport.cuh"
#include "reduce_packs.cuh"
#include "share_probe.cuh"

#define FA_MOVING_KERNEL(code, number, name, ...)                                                            \
  FA_KERNEL(name)(const __grid_constant__ FaLaunch own) {                                                    \
    wait_for_launch_before();                                                                                \
    Block block;                                                                                             \
    name(launch_of(own), block);                                                                             \
  }
FA_MOVING(FA_MOVING_KERNEL, )

FA_KERNEL(barrier)(const __grid_constant__ FaLaunch own) {
  wait_for_launch_before();
  Block block;
  run_barrier(launch_of(own), block);
}

// The messages are a second parameter: as a part of FaLaunch they would make every launch too large. Where
// one launch runs all ranks, they are in memory, like the launches.
FA_KERNEL(transfer)(const __grid_constant__ FaLaunch own, const __grid_constant__ FaTransfers messages) {
  wait_for_launch_before();
  const FaLaunch &launch = launch_of(own);
  Block block;
  transfer(launch, block,
           own.launches == 0 ? messages : *reinterpret_cast<const FaTransfers *>(launch.operands));
}

FA_KERNEL(all_gather_rows)
(const __grid_constant__ FaLaunch own, const __grid_constant__ FaGatheredRows rows) {
  wait_for_launch_before();
  const FaLaunch &launch = launch_of(own);
  Block block;
  all_gather_rows(launch, block,
                  own.launches == 0 ? rows : *reinterpret_cast<const FaGatheredRows *>(launch.operands));
}

FA_KERNEL(two_shot_quantized)(const __grid_constant__ FaLaunch own) {
  wait_for_launch_before();
  const FaLaunch &launch = launch_of(own);
  Block block;
  two_shot_quantized(launch, block, QuantizedTransport(launch));
}

// A GPU can be in a multicast group only once, so one launch never runs all ranks.
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
