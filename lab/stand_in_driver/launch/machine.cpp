#include "machine.h"

#include <stdio.h>
#include <string.h>

#include "../../ptx_machine/ptx_machine.h"
#include "../memory/multicast.h"

// Weak, because a library that is built without the machine lacks them.
extern "C" {
__attribute__((weak)) const PtxModule *ptx_load(const void *image, char *error, size_t error_bytes);
__attribute__((weak)) int ptx_parameter(const PtxModule *module, const char *kernel, uint32_t number,
                                        uint32_t *offset, uint32_t *bytes);
__attribute__((weak)) uint32_t ptx_launch(const PtxModule *module, const PtxLaunch *launch, char *error,
                                          size_t error_bytes);
}

namespace stand_in {
namespace {

constexpr size_t kErrorBytes = 4096;

// Returns the extent of the allocation at an address, if the context can access it.
int find(void *context, uint64_t address, uint64_t *base, uint64_t *bytes) {
  return accessible_range(*static_cast<CUcontext>(context), address, base, bytes);
}

uint32_t multicast(void *context, uint64_t address, uint64_t bytes, uint64_t *parts) {
  return multicast_parts(*static_cast<CUcontext>(context), address, bytes, parts);
}

} // namespace

bool machine_is_on() { return settings().ptx; }

CUresult load_ptx(const void *image, const PtxModule **module) {
  if (!ptx_load) {
    fprintf(stderr,
            "stand-in driver: STAND_IN_PTX is set, but this library is built without the PTX machine\n");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  char error[kErrorBytes] = {};
  *module = ptx_load(image, error, sizeof(error));
  if (*module)
    return CUDA_SUCCESS;
  fprintf(stderr, "stand-in driver: the module cannot be loaded: %s\n", error);
  return CUDA_ERROR_INVALID_PTX;
}

bool has_kernel(const PtxModule *module, const char *name) {
  uint32_t offset = 0, bytes = 0;
  return ptx_parameter(module, name, 0, &offset, &bytes) != 0;
}

bool gather_parameters(const PtxModule *module, const char *kernel, void **parameters,
                       std::vector<unsigned char> *bytes) {
  bytes->clear();
  for (uint32_t number = 0;; ++number) {
    uint32_t offset = 0, size = 0;
    ptx_parameter(module, kernel, number, &offset, &size);
    if (size == 0)
      return true;
    if (!parameters[number])
      return false;
    bytes->resize(offset + size);
    memcpy(bytes->data() + offset, parameters[number], size);
  }
}

void run_on_machine(CUcontext context, const PtxModule *module, const std::string &kernel,
                    const unsigned grid[3], const unsigned block[3],
                    const std::vector<unsigned char> &parameters) {
  PtxLaunch launch = {};
  launch.kernel = kernel.c_str();
  memcpy(launch.grid, grid, sizeof(launch.grid));
  memcpy(launch.block, block, sizeof(launch.block));
  launch.parameters = parameters.data();
  launch.parameter_bytes = parameters.size();
  launch.find = find;
  launch.multicast = multicast;
  launch.memory = context;
  char error[kErrorBytes] = {};
  const uint32_t fault = ptx_launch(module, &launch, error, sizeof(error));
  if (fault == 0)
    return;
  fprintf(stderr, "stand-in driver: %s\n", error);
  context->fail(fault == PTX_FAULT_MISALIGNED        ? CUDA_ERROR_MISALIGNED_ADDRESS
                : fault == PTX_FAULT_ILLEGAL_ADDRESS ? CUDA_ERROR_ILLEGAL_ADDRESS
                                                     : CUDA_ERROR_LAUNCH_FAILED);
}

} // namespace stand_in
