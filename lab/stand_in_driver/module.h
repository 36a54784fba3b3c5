// Modules and kernels: which call a kernel's name stands for.
#pragma once

#include "../../csrc/abi.h"
#include "driver.h"
#include "machine.h"

namespace stand_in {

// <name>_<type>, <name>_<type>_sum_w<world> or <name>, as in csrc/cuda/kernels.cu; of the second, world_ and
// the name as in csrc/probes/worlds.cu.
struct Kernel {
  std::string name;
  uint32_t algorithm = 0;
  uint32_t dtype = 0;
  uint32_t hot_world = 0; // the constant world of a hot kernel, 0: any
  bool in_turns =
      false; // all ranks in one launch, as often as its second parameter says (csrc/probes/worlds.cu)
  bool foreign = false; // none of csrc/catalogue.h: the machine alone runs it
};

// Whether the kernel of this name is compiled for the call.
bool runs(const Kernel &kernel, const FaLaunch &launch);
// Whether sums go on with a residual and a norm.
bool is_norming(uint32_t algorithm);
bool is_nvls(uint32_t algorithm);
size_t element_bytes(uint32_t dtype);

// The launch bounds of every kernel, and the registers that they leave to a thread.
constexpr int kMaxThreads = 512;
constexpr int kRegisters = 128;
// Blocks of so many threads that one multiprocessor holds.
int blocks_per_multiprocessor(int threads);

std::shared_ptr<CUfunc_st> find_function(CUfunction function);
// With their kernels, at the end of their context.
void unload_modules_of(CUcontext context);
// Loads a kernel, unless it is. By default kernels are loaded when they are first needed, not with their
// module: a kernel that another waits for has to be loaded before that one is launched (Programming Guide,
// Lazy Loading, Concurrent Execution). CUDA_MODULE_LOADING=EAGER loads all with their module.
void load(CUfunc_st &function);

} // namespace stand_in

struct CUfunc_st {
  stand_in::Kernel kernel;
  CUmodule module = nullptr;
  const PtxModule *ptx = nullptr; // of the module
  CUcontext context = nullptr;
  std::atomic<bool> loaded{false};
};

struct CUmod_st {
  CUcontext context = nullptr;
  const PtxModule *ptx = nullptr; // where the machine runs its kernels
  std::mutex mutex;
  std::map<std::string, CUfunction> functions;
};
