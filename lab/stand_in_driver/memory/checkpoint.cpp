// Checkpoints of this process, by the calls with which cuda-checkpoint makes those of another one:
// "Checkpointing" in the Driver API. What other processes keep of its memory is worth nothing afterwards.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

namespace stand_in {
namespace {

// State of the process. Calls take no lock while it runs, as a fork may have been made while one was held.
struct Gate {
  std::atomic<CUprocessState> state{CU_PROCESS_STATE_RUNNING};
  std::atomic<unsigned> inside{0};
  std::mutex mutex;
  std::condition_variable opened;
};

Gate &gate() {
  static auto *gate = new Gate;
  return *gate;
}

// A file of device memory, and what a checkpoint has saved of it.
struct Saved {
  int fd, copy;
};

std::vector<Saved> &saved() {
  static auto *saved = new std::vector<Saved>;
  return *saved;
}

// The file behind an allocation; -1 if it has none.
int file_of(const Allocation &allocation) {
  return allocation.physical ? allocation.physical->fd : allocation.range_fd();
}

// Saves the contents of a file, and overwrites them.
CUresult save(int fd) {
  for (const Saved &one : saved()) {
    if (one.fd == fd)
      return CUDA_SUCCESS;
  }
  struct stat file;
  if (fstat(fd, &file) != 0)
    return CUDA_ERROR_OPERATING_SYSTEM;
  const auto bytes = size_t(file.st_size);
  const int copy = create_device_file(bytes, device_of_file(fd));
  void *from = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void *to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, copy, 0);
  if (copy < 0 || from == MAP_FAILED || to == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  std::copy_n(static_cast<const char *>(from), bytes, static_cast<char *>(to));
  poison(reinterpret_cast<uint64_t>(from), bytes);
  munmap(from, bytes);
  munmap(to, bytes);
  saved().push_back({fd, copy});
  return CUDA_SUCCESS;
}

// Maps the file of an allocation again, which is another one by now.
bool map_again(const Allocation &allocation) {
  uint64_t start = allocation.base;
  size_t bytes = allocation.bytes;
  int protection = PROT_READ | PROT_WRITE;
  if (allocation.kind == Kind::Virtual) {
    const auto allowed = [](CUmemAccess_flags flags) { return flags != CU_MEM_ACCESS_FLAGS_PROT_NONE; };
    if (std::none_of(std::begin(allocation.access), std::end(allocation.access), allowed))
      protection = PROT_NONE;
  } else {
    const Mapping &mapping = allocation.block ? allocation.block->mapping : allocation.mapping;
    start = mapping.start + kGuard;
    bytes = mapping.bytes - 2 * kGuard;
  }
  void *at = reinterpret_cast<void *>(start);
  return mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, file_of(allocation), 0) != MAP_FAILED;
}

// Whether the state is the one that a call needs. Other processes cannot be asked.
CUresult check_state(int process, CUprocessState needed) {
  STAND_IN_CHECK(check_initialized());
  if (process != getpid())
    return CUDA_ERROR_INVALID_VALUE;
  return gate().state == needed ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

void set_state(CUprocessState state) {
  std::lock_guard<std::mutex> guard(gate().mutex);
  gate().state = state;
  gate().opened.notify_all();
}

} // namespace

void enter_process() {
  for (;;) {
    ++gate().inside;
    // Sequentially consistent, as the increment: either the caller of the lock sees this call, or this sees
    // the state.
    if (gate().state == CU_PROCESS_STATE_RUNNING)
      return;
    --gate().inside;
    std::unique_lock<std::mutex> guard(gate().mutex);
    gate().opened.wait(guard, [] { return gate().state == CU_PROCESS_STATE_RUNNING; });
  }
}

void leave_process() { --gate().inside; }

} // namespace stand_in

using namespace stand_in;

CUresult cuCheckpointProcessGetState(int process, CUprocessState *state) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (process != getpid() || !state)
    return CUDA_ERROR_INVALID_VALUE;
  *state = gate().state;
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessLock(int process, CUcheckpointLockArgs *arguments) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_state(process, CU_PROCESS_STATE_RUNNING));
  const auto limit = std::chrono::milliseconds(arguments ? arguments->timeoutMs : 0);
  const auto begin = std::chrono::steady_clock::now();
  set_state(CU_PROCESS_STATE_LOCKED);
  while (gate().inside > 0) {
    if (limit.count() > 0 && std::chrono::steady_clock::now() - begin > limit) {
      set_state(CU_PROCESS_STATE_RUNNING);
      return CUDA_ERROR_NOT_READY;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessCheckpoint(int process, CUcheckpointCheckpointArgs *) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_state(process, CU_PROCESS_STATE_LOCKED));
  auto registry = Registry::lock();
  const auto physical = all_physical_memory();
  // "does not support IPC memory" (cuda-checkpoint, Functionality).
  for (const auto &memory : physical) {
    if (!memory->created)
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  for (const auto &[base, allocation] : registry.allocations) {
    const bool of_another = allocation.physical && !allocation.physical->created;
    if (allocation.kind == Kind::Ipc || of_another || is_open_elsewhere(allocation))
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  for (const auto &memory : physical)
    STAND_IN_CHECK(save(memory->fd));
  for (const auto &[base, allocation] : registry.allocations) {
    if (file_of(allocation) >= 0)
      STAND_IN_CHECK(save(file_of(allocation)));
  }
  set_state(CU_PROCESS_STATE_CHECKPOINTED);
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessRestore(int process, CUcheckpointRestoreArgs *) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_state(process, CU_PROCESS_STATE_CHECKPOINTED));
  auto registry = Registry::lock();
  for (const auto &[fd, copy] : saved()) {
    if (dup3(copy, fd, O_CLOEXEC) < 0)
      return CUDA_ERROR_OPERATING_SYSTEM;
    close(copy);
  }
  saved().clear();
  for (const auto &[base, allocation] : registry.allocations) {
    if (file_of(allocation) >= 0 && !map_again(allocation))
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  set_state(CU_PROCESS_STATE_LOCKED);
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessUnlock(int process, CUcheckpointUnlockArgs *) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_state(process, CU_PROCESS_STATE_LOCKED));
  set_state(CU_PROCESS_STATE_RUNNING);
  return CUDA_SUCCESS;
}
