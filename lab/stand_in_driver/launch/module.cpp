// Modules: any image contains every kernel of csrc/catalogue.h.
#include "module.h"

#include <stdio.h>
#include <string.h>

#include <iterator>

#include "../streams/stream.h"
#include "probes.h"

namespace stand_in {
namespace {

struct Type {
  const char *kernels; // the type in its kernels' names
  size_t bytes;
};

// In the order of enum FaAlgorithm and enum FaDtype.
#define NAME(code, number, name, ...) #name,
constexpr const char *kAlgorithms[] = {FA_REDUCING(NAME, ) FA_MOVING(NAME, ) FA_OTHER(NAME, )
                                           FA_NORMING(NAME, ) FA_NVLS(NAME, ) FA_SHARDED(NAME, )};
static_assert(std::size(kAlgorithms) == FA_SHARDED_RMS_NORM + 1, "one for each");

// Whether the kernels of an algorithm are of the hot types only.
bool is_of_hot_types(uint32_t algorithm) {
  return is_norming(algorithm) || is_nvls(algorithm) || is_sharded(algorithm);
}

bool is_typed(uint32_t algorithm) {
#define IS_REDUCING(code, ...) algorithm == code ||
  return FA_REDUCING(IS_REDUCING, ) is_of_hot_types(algorithm);
}
#define IS_OP(code, ...) op == code ||
bool is_op(uint32_t op) { return FA_OPS(IS_OP, ) false; }
#define TYPE(code, number, name, element, bytes, family, kernels, ...) {#kernels, bytes},
constexpr Type kTypes[] = {FA_TYPES(TYPE, )};

#define IS_HOT_ALGORITHM(code, ...) algorithm == code ||
bool is_hot_algorithm(uint32_t algorithm) { return FA_HOT(IS_HOT_ALGORITHM, ) false; }
#define IS_HOT_TYPE(name, ...) type == #name ||
bool is_hot_type(const std::string &type) { return FA_HOT_TYPES(IS_HOT_TYPE, ) false; }
#define IS_HOT_WORLD(ranks, ...) world == ranks ||
bool is_hot_world(uint32_t world) { return FA_HOT_WORLDS(IS_HOT_WORLD, ) false; }

Handles<CUmod_st> &modules() {
  static auto *modules = new Handles<CUmod_st>;
  return *modules;
}

Handles<CUfunc_st> &functions() {
  static auto *functions = new Handles<CUfunc_st>;
  return *functions;
}

bool take_prefix(std::string *text, const std::string &prefix) {
  if (text->compare(0, prefix.size(), prefix) != 0)
    return false;
  text->erase(0, prefix.size());
  return true;
}

// Parses the part of a typed kernel's name after the algorithm.
bool parse_type(std::string rest, Kernel *kernel) {
  for (size_t type = 0; type < std::size(kTypes); ++type) {
    std::string after = rest;
    if (!take_prefix(&after, kTypes[type].kernels))
      continue;
    kernel->dtype = uint32_t(type);
    if (after.empty())
      return !is_of_hot_types(kernel->algorithm) || is_hot_type(kTypes[type].kernels);
    const bool hot = is_hot_type(kTypes[type].kernels) && is_hot_algorithm(kernel->algorithm) &&
                     take_prefix(&after, "_sum_w") && after.size() == 1;
    kernel->hot_world = hot ? uint32_t(after[0] - '0') : 0;
    return hot && is_hot_world(kernel->hot_world);
  }
  return false;
}

bool parse(const char *name, Kernel *kernel) {
  kernel->name = name;
  std::string whole = name;
  kernel->repeats = take_prefix(&whole, "world_");
  for (size_t algorithm = 0; algorithm < std::size(kAlgorithms); ++algorithm) {
    std::string rest = whole;
    if (!take_prefix(&rest, kAlgorithms[algorithm]))
      continue;
    kernel->algorithm = uint32_t(algorithm);
    if (rest.empty())
      return !is_typed(kernel->algorithm) && !kernel->repeats;
    // One kernel's name may be a prefix of another's.
    if (is_typed(kernel->algorithm) && take_prefix(&rest, "_") && parse_type(rest, kernel))
      return !kernel->repeats || kernel->hot_world != 0;
  }
  return false;
}

} // namespace

bool is_norming(uint32_t algorithm) {
#define IS_NORMING(code, ...) algorithm == code ||
  return FA_NORMING(IS_NORMING, ) false;
}

bool is_share_probe(const Kernel &kernel) { return kernel.name == "share_probe"; }

bool is_nvls(uint32_t algorithm) {
#define IS_NVLS(code, ...) algorithm == code ||
  return FA_NVLS(IS_NVLS, ) false;
}

bool is_sharded(uint32_t algorithm) {
#define IS_SHARDED(code, ...) algorithm == code ||
  return FA_SHARDED(IS_SHARDED, ) false;
}

bool runs(const Kernel &kernel, const FaLaunch &launch) {
  // Some algorithms share kernels.
  if (launch.algorithm >= std::size(kAlgorithms) ||
      strcmp(kAlgorithms[launch.algorithm], kAlgorithms[kernel.algorithm]) != 0 ||
      launch.dtype >= std::size(kTypes) || !is_op(launch.op))
    return false;
  if (is_typed(kernel.algorithm) && strcmp(kTypes[launch.dtype].kernels, kTypes[kernel.dtype].kernels) != 0)
    return false;
  if (launch.world == 0 || launch.world > FA_MAX_RANKS || launch.rank >= launch.world)
    return false;
  if (is_nvls(kernel.algorithm) && launch.op != FA_SUM)
    return false;
  if (kernel.hot_world == 0)
    return true;
  // The hot set has no code for other operations and worlds, for checked launches, nor for parts of packs; in
  // a two-shot, nor for unequal slices.
  const bool two_shot = kernel.algorithm == FA_TWO_SHOT_PULL || kernel.algorithm == FA_TWO_SHOT_PUSH;
  const uint64_t bytes = launch.count * element_bytes(launch.dtype);
  return launch.op == FA_SUM && launch.world == kernel.hot_world && !launch.checked &&
         (launch.input | launch.output) % FA_CUDA_PACK_BYTES == 0 &&
         bytes % (FA_CUDA_PACK_BYTES * (two_shot ? launch.world : 1)) == 0;
}

size_t element_bytes(uint32_t dtype) { return kTypes[dtype].bytes; }

int blocks_per_multiprocessor(int threads) {
  constexpr int kFile = 65536, kMost = 32, kWarp = 32;
  const int allocated = (threads + kWarp - 1) / kWarp * kWarp;
  const int blocks = kFile / (kRegisters * allocated);
  return blocks < kMost ? blocks : kMost;
}

uint64_t live_modules() { return modules().size(); }

std::shared_ptr<CUfunc_st> find_function(CUfunction function) { return functions().find(function); }

void unload_modules_of(CUcontext context) {
  for (auto &module : modules().all()) {
    if (module->context != context)
      continue;
    for (auto &[name, function] : module->functions)
      functions().take(function);
    modules().take(module.get());
  }
}

void load(CUfunc_st &function) {
  if (!function.loaded.exchange(true))
    synchronise_implicitly(function.context);
}

} // namespace stand_in

using namespace stand_in;

CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  if (!handle || !image)
    return CUDA_ERROR_INVALID_VALUE;
  // An address in the first page is the dangling pointer of an empty slice.
  const bool empty = reinterpret_cast<uint64_t>(image) < 4096 || *static_cast<const char *>(image) == 0;
  if (empty)
    return CUDA_ERROR_INVALID_IMAGE;
  synchronise_implicitly(context);
  auto module = std::make_shared<CUmod_st>();
  module->context = context;
  if (machine_is_on())
    STAND_IN_CHECK(load_ptx(image, &module->ptx));
  *handle = modules().insert(std::move(module));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *handle, const void *image, unsigned, uint32_t *, void **) {
  STAND_IN_CALL();
  return cuModuleLoadData(handle, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *handle, const void *image) {
  STAND_IN_CALL();
  return cuModuleLoadData(handle, image);
}

CUresult cuModuleLoad(CUmodule *handle, const char *path) {
  STAND_IN_CALL();
  if (!path)
    return CUDA_ERROR_INVALID_VALUE;
  FILE *file = fopen(path, "rb");
  if (!file)
    return CUDA_ERROR_FILE_NOT_FOUND;
  char image[1] = {};
  const size_t bytes = fread(image, 1, 1, file);
  fclose(file);
  if (machine_is_on())
    return CUDA_ERROR_NOT_SUPPORTED;
  return bytes == 1 ? cuModuleLoadData(handle, image) : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuModuleUnload(CUmodule handle) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  auto module = modules().take(handle);
  if (!module)
    return CUDA_ERROR_INVALID_HANDLE;
  for (auto &[name, function] : module->functions)
    functions().take(function);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module_handle, const char *name) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto module = modules().find(module_handle);
  if (!module)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!handle || !name)
    return CUDA_ERROR_INVALID_VALUE;
  auto function = std::make_shared<CUfunc_st>();
  function->kernel.foreign = !parse(name, &function->kernel);
  const bool known_here = !function->kernel.foreign || is_probe(name) || is_share_probe(function->kernel);
  if (module->ptx ? !has_kernel(module->ptx, name) : !known_here)
    return CUDA_ERROR_NOT_FOUND;
  std::lock_guard<std::mutex> guard(module->mutex);
  CUfunction &known = module->functions[name];
  if (!known) {
    function->module = module_handle;
    function->context = module->context;
    function->ptx = module->ptx;
    function->loaded = settings().eager_loading;
    known = functions().insert(std::move(function));
  }
  *handle = known;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *, size_t *, CUmodule, const char *) {
  STAND_IN_CALL();
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetLoadingMode(uint32_t *mode) {
  STAND_IN_CALL();
  constexpr uint32_t kEager = 1, kLazy = 2;
  if (!mode)
    return CUDA_ERROR_INVALID_VALUE;
  *mode = settings().eager_loading ? kEager : kLazy;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  STAND_IN_CALL();
  auto found = find_function(function);
  if (!found)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!value || attribute >= CU_FUNC_ATTRIBUTE_MAX)
    return CUDA_ERROR_INVALID_VALUE;
  load(*found);
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = kMaxThreads; break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = FA_MAX_RANKS * 8; break;
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kRegisters; break;
  case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = settings().virtual_architecture; break;
  case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = 48 << 10; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int) {
  STAND_IN_CALL();
  if (!find_function(function))
    return CUDA_ERROR_INVALID_HANDLE;
  return attribute < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, uint32_t) {
  STAND_IN_CALL();
  return find_function(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncGetName(const char **name, CUfunction handle) {
  STAND_IN_CALL();
  auto function = find_function(handle);
  if (!name || !function)
    return CUDA_ERROR_INVALID_VALUE;
  *name = function->kernel.name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction handle) {
  STAND_IN_CALL();
  auto function = find_function(handle);
  if (!module || !function)
    return CUDA_ERROR_INVALID_VALUE;
  *module = function->module;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  STAND_IN_CALL();
  auto function = find_function(handle);
  if (!function)
    return CUDA_ERROR_INVALID_HANDLE;
  load(*function);
  return CUDA_SUCCESS;
}

CUresult cuFuncIsLoaded(uint32_t *loaded, CUfunction handle) {
  STAND_IN_CALL();
  auto function = find_function(handle);
  if (!loaded || !function)
    return CUDA_ERROR_INVALID_VALUE;
  *loaded = function->loaded;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t) {
  STAND_IN_CALL();
  if (!find_function(function))
    return CUDA_ERROR_INVALID_HANDLE;
  if (!blocks || threads <= 0)
    return CUDA_ERROR_INVALID_VALUE;
  *blocks = threads <= kMaxThreads ? blocks_per_multiprocessor(threads) : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                              size_t shared, unsigned) {
  STAND_IN_CALL();
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
