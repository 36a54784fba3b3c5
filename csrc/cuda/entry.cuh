// What all entry points of the CUDA device have. csrc/catalogue.h lists them; each file beside this one that
// ends in .cu has a family of them, and is compiled by itself.
#pragma once
#include "../abi.h"
#include "../core/block.cuh"
#include "../core/dependent_launch.cuh"

using namespace FA_NAMESPACE;

// The launch of this block's rank: the kernel's own, or its rank's where one launch runs a world. One code
// for both, as there are many of these kernels.
static FA_FN const FaLaunch &launch_of(const FaLaunch &own) {
  return own.launches == 0 ? own : reinterpret_cast<const FaLaunch *>(own.launches)[blockIdx.y];
}

// At most 512 threads, which leaves 128 registers to each. The launch stays in constant memory: with
// __grid_constant__ its arrays are indexed there and not in a local copy.
#define FA_KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 1) name
