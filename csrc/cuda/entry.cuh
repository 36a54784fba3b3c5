// Declarations that all CUDA kernels share. csrc/catalogue.h lists them; each .cu file in this folder has a
// family of kernels and is compiled separately.
#pragma once
#include "../abi.h"
#include "../core/block.cuh"
#include "../core/dependent_launch.cuh"

using namespace FA_NAMESPACE;

// The launch of this block's rank: the kernel's own, or, where one launch runs all ranks, the one of
// blockIdx.y. Both cases use the same code, because there are many of these kernels.
static FA_FN const FaLaunch &launch_of(const FaLaunch &own) {
  return own.launches == 0 ? own : reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];
}

// At most 512 threads, which leaves 128 registers for each. With __grid_constant__ the launch stays in
// constant memory, where its arrays are indexed without a local copy.
#define FA_KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 1) name
