// Modules whose kernels are run by the PTX machine (lab/ptx_machine), instead of the host's build of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../driver.h"

struct PtxModule;

namespace stand_in {

// Whether modules are PTX, as STAND_IN_PTX requests.
bool machine_is_on();

// Loads the PTX of an image. On an error, writes the reason to stderr.
CUresult load_ptx(const void *image, const PtxModule **module);
bool has_kernel(const PtxModule *module, const char *name);

// Copies the parameters of a launch to their offsets. Returns false if one is missing.
bool gather_parameters(const PtxModule *module, const char *kernel, void **parameters,
                       std::vector<unsigned char> *bytes);

// Runs a grid until it ends. A fault becomes an error of the context and a line on stderr.
void run_on_machine(CUcontext context, const PtxModule *module, const std::string &kernel,
                    const unsigned grid[3], const unsigned block[3],
                    const std::vector<unsigned char> &parameters);

} // namespace stand_in
