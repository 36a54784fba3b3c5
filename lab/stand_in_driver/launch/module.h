// Launches and modules: kernels, which launches they can run, and the PTX machine. This header declares
// modules, and the calls that kernels' names stand for.
#pragma once

#include "../../../csrc/abi.h"
#include "../driver.h"
#include "machine.h"

namespace stand_in {

// A kernel's name is <name>, <name>_<type> or <name>_<type>_sum_w<world>, as in csrc/cuda/kernels.cu; names
// of the last form with the prefix world_ are those of csrc/probes/worlds.cu.
struct Kernel {
  std::string name;
  uint32_t algorithm = 0;
  uint32_t dtype = 0;
  uint32_t hot_world = 0; // number of ranks of a hot-set kernel; 0: any
  bool repeats = false;   // runs all ranks in one launch, as often as its second parameter says
  bool foreign = false;   // not in csrc/catalogue.h: a probe, or a kernel that only the PTX machine can run
};

// Whether the kernel is compiled for the launch.
bool runs(const Kernel &kernel, const FaLaunch &launch);
// Whether the algorithm adds a residual and a norm to the sums.
bool is_norming(uint32_t algorithm);
bool is_sharded(uint32_t algorithm);
bool is_nvls(uint32_t algorithm);
// Whether it is the kernel of csrc/cuda/share_probe.cuh, which is not in the catalogue.
bool is_share_probe(const Kernel &kernel);
size_t element_bytes(uint32_t dtype);

// Launch bounds of every kernel, and the registers that they leave to a thread.
constexpr int kMaxThreads = 512;
constexpr int kRegisters = 128;
// Number of blocks of this many threads that one multiprocessor holds.
int blocks_per_multiprocessor(int threads);

std::shared_ptr<CUfunc_st> find_function(CUfunction function);
// Unloads all modules with their kernels, when the context is destroyed.
void unload_modules_of(CUcontext context);
// Loads a kernel that is not loaded yet. By default kernels are loaded when they are first needed, not with
// their module: a kernel that another one waits for has to be loaded before that one is launched (Programming
// Guide, Lazy Loading, Concurrent Execution). CUDA_MODULE_LOADING=EAGER loads all kernels with their module.
void load(CUfunc_st &function);

} // namespace stand_in

struct CUfunc_st {
  stand_in::Kernel kernel;
  CUmodule module = nullptr;
  const PtxModule *ptx = nullptr; // the module's PTX
  CUcontext context = nullptr;
  std::atomic<bool> loaded{false};
};

struct CUmod_st {
  CUcontext context = nullptr;
  const PtxModule *ptx = nullptr; // set if the PTX machine runs its kernels
  std::mutex mutex;
  std::map<std::string, CUfunction> functions;
};
