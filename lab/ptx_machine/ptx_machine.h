// The machine as C and C++ see it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A module, which stays for as long as the process.
typedef struct PtxModule PtxModule;

enum { PTX_FAULT_MISALIGNED = 1, PTX_FAULT_ILLEGAL_ADDRESS = 2 }; // of ptx_launch; others are other faults

typedef struct {
  const char *kernel;
  uint32_t grid[3], block[3];
  const void *parameters; // all, each at its offset
  size_t parameter_bytes;
  // Asks for the allocation that an address is in. 0: there is none that the launching device reaches.
  int (*find)(void *memory, uint64_t address, uint64_t *base, uint64_t *bytes);
  // Asks for the up to 16 addresses that one of multicast stands for, which `find` need not know, for an
  // access of so many bytes. Their number; 0: it is no such address.
  uint32_t (*multicast)(void *memory, uint64_t address, uint64_t bytes, uint64_t *parts);
  void *memory;
} PtxLaunch;

// Loads a fatbin with PTX in it, or PTX that ends with a zero. NULL: why not is in `error`.
const PtxModule *ptx_load(const void *image, char *error, size_t error_bytes);
// Whether there is such a kernel; the offset and size of its parameter of that number, 0 bytes where there is
// none.
int ptx_parameter(const PtxModule *module, const char *kernel, uint32_t number, uint32_t *offset,
                  uint32_t *bytes);
// Runs a grid to its end. 0: success. Else a fault, and in `error` what it is.
uint32_t ptx_launch(const PtxModule *module, const PtxLaunch *launch, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif
