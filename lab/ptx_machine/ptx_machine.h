// C interface of the PTX machine.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A loaded module. It lives until the process ends.
typedef struct PtxModule PtxModule;

// Faults of ptx_launch; other values are other faults.
enum { PTX_FAULT_MISALIGNED = 1, PTX_FAULT_ILLEGAL_ADDRESS = 2 };

typedef struct {
  const char *kernel;
  uint32_t grid[3], block[3];
  const void *parameters; // all parameters, each at its offset
  size_t parameter_bytes;
  // Finds the allocation that contains an address. Returns 0 if the launching device reaches none.
  int (*find)(void *memory, uint64_t address, uint64_t *base, uint64_t *bytes);
  // Resolves a multicast address (which `find` need not know) for an access of `bytes` bytes:
  // writes up to 16 unicast addresses to `parts` and returns their number. Returns 0 if the address
  // is not a multicast address.
  uint32_t (*multicast)(void *memory, uint64_t address, uint64_t bytes, uint64_t *parts);
  void *memory;
} PtxLaunch;

// Loads a fatbin that contains PTX, or zero-terminated PTX. Returns NULL on failure, with the
// reason in `error`.
const PtxModule *ptx_load(const void *image, char *error, size_t error_bytes);
// Returns whether the module has this kernel. Writes the offset and size of its parameter `number`;
// the size is 0 if there is no such parameter.
int ptx_parameter(const PtxModule *module, const char *kernel, uint32_t number, uint32_t *offset,
                  uint32_t *bytes);
// Runs a grid to its end. Returns 0 on success, otherwise a fault, with its description in `error`.
uint32_t ptx_launch(const PtxModule *module, const PtxLaunch *launch, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif
