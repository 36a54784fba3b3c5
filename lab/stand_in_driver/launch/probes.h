// The kernels of csrc/probes/costs.cu, which measure a GPU. Here they have the effects of those kernels on
// memory, and report the times of a pretended GPU, so that tests know what `gpu-check` must derive from them.
#pragma once

#include "../driver.h"

namespace stand_in {

// Parameters of these kernels.
struct ProbeLaunch {
  std::string name;
  unsigned blocks, threads;
  uint64_t results, memory, count;
  uint32_t iterations;
  uint64_t sink;
};

bool is_probe(const std::string &name);
// Reads the parameters of a launch.
ProbeLaunch probe_launch(const std::string &name, unsigned blocks, unsigned threads, void **parameters);
void run_probe(CUcontext context, const ProbeLaunch &launch);
// Adds the times of a pretended GPU to the sums that the kernels of csrc/probes/worlds.cu leave for each
// block.
void add_stamps(CUcontext context, uint64_t sums, uint64_t blocks, uint32_t repetitions);
// Notes that work other than a measurement of the clock has run: with STAND_IN_THROTTLE, the clock then
// falls.
void note_work();

} // namespace stand_in
