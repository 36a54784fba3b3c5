// A rank that measures DeepSpeed's shared-memory allreduce, in place, by a direct call of its C++ function;
// see rank.hpp. Linked with csrc/cpu/comm/shm.cpp of the package, compiled with the flags of its
// ShareMemCommBuilder.
#include <sys/mman.h>
#include <torch/extension.h>

#include "rank.hpp"
#include "shm.h"

int main() {
  peers::Rank rank(atoi(peers::variable("PEERS_RANK").c_str()));
  // The two strings become part of the names of the shared memory.
  std::string address = "peers", port = peers::variable("PEERS_WORLD");
  shm_initialize(rank.ranks, rank.rank, address.data(), port.data());
  rank.say("ready DeepSpeed " + peers::variable("PEERS_VERSION"));
  const auto name = "/deepspeed_allreduce_buffer_" + std::to_string(getuid()) + "_" + address + "_" + port +
                    "_" + std::to_string(rank.rank);
  bool named = true;
  rank.serve([&](float *, float *data, size_t count) {
    // A request to measure means that all ranks were ready, so all have mapped the memory: its name can go.
    if (named)
      shm_unlink(name.c_str());
    named = false;
    // One view for each call, like the tensor that the Python wrapper passes.
    auto tensor = at::from_blob(data, {int64_t(count)}, at::kFloat);
    all_reduce_outer_loop(tensor, count, int(count * sizeof(float)));
  });
}
