// Launches: the host's build of the kernels, run by the stream's thread with the geometry of the CUDA device.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <list>
#include <thread>

#include "../memory/memory.h"
#include "../memory/multicast.h"
#include "../streams/stream.h"
#include "accessible.h"
#include "module.h"
#include "probes.h"

extern "C" void stand_in_host_entry(const FaLaunch *launch, uint32_t block);

namespace stand_in {
namespace {

struct Shape {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  bool programmatic; // may begin while the previous kernel ends
};

void log_launch(const Kernel &kernel, const Shape &shape, uint64_t count) {
  if (settings().launch_log.empty())
    return;
  char line[256];
  const int length =
      snprintf(line, sizeof(line), "%s %ux%ux%u %ux%ux%u %llu%s\n", kernel.name.c_str(), shape.grid[0],
               shape.grid[1], shape.grid[2], shape.block[0], shape.block[1], shape.block[2],
               static_cast<unsigned long long>(count), shape.programmatic ? " programmatic" : "");
  const int fd = open(settings().launch_log.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0)
    return;
  // One write per line, so that lines of several processes do not mix.
  if (write(fd, line, size_t(length)) != length)
    perror("stand-in driver: launch log");
  close(fd);
}

// Residency of blocks on a device. Blocks of all launches enter in order and leave when they end. So a block
// that waits for a block without room waits until it times out. (Programming Guide, Thread Hierarchy: the
// order of blocks is undefined, and none is preempted for another; Cooperative Groups, Grid Synchronization:
// to synchronise, blocks have to be resident together.)
class Residency {
public:
  // Counted in registers, which limit the kernels.
  void enter(uint64_t registers) {
    std::unique_lock<std::mutex> guard(mutex_);
    const uint64_t ticket = next_++;
    changed_.wait(guard, [&] { return ticket == serving_ && used_ + registers <= capacity(); });
    ++serving_;
    used_ += registers;
    changed_.notify_all();
  }

  void leave(uint64_t registers) {
    std::lock_guard<std::mutex> guard(mutex_);
    used_ -= registers;
    changed_.notify_all();
  }

  static Residency &of(CUdevice device) {
    static auto *devices = new Residency[kMaxDevices];
    return devices[device];
  }

  static uint64_t registers_of(unsigned threads) {
    constexpr unsigned kWarp = 32;
    return uint64_t(threads + kWarp - 1) / kWarp * kWarp * kRegisters;
  }

private:
  static uint64_t capacity() { return uint64_t(multiprocessors()) * 65536; }

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t used_ = 0, next_ = 0, serving_ = 0;
};

// Running work, which ends with its context: a launch or a copy. A host kernel cannot be stopped. It is asked
// to abort, and the status that it then records is reverted, because a GPU's kernel would have recorded
// nothing.
class Running {
public:
  Running(CUcontext context, const FaLaunch *launch) : context_(context), launch_(launch) {
    std::lock_guard<std::mutex> guard(mutex());
    all().push_back(this);
    if (context->error != CUDA_SUCCESS)
      end();
  }

  ~Running() {
    std::lock_guard<std::mutex> guard(mutex());
    if (ended_ && launch_) {
      __atomic_store_n(&status().missing, before_.missing, __ATOMIC_RELAXED);
      __atomic_store_n(&status().epoch, before_.epoch, __ATOMIC_RELAXED);
      __atomic_store_n(&status().failure, before_.failure, __ATOMIC_RELAXED);
      __atomic_store_n(&status().abort, before_.abort, __ATOMIC_RELAXED);
      __atomic_store_n(&head().failed, failed_before_, __ATOMIC_RELAXED);
    }
    all().remove(this);
    one_has_ended().notify_all();
  }

  static void end_all_of(CUcontext context) {
    std::lock_guard<std::mutex> guard(mutex());
    for (Running *running : all()) {
      if (running->context_ == context && running->thread_ != std::this_thread::get_id())
        running->end();
    }
  }

  static void await(CUcontext context) {
    std::unique_lock<std::mutex> guard(mutex());
    const auto is_of = [context](Running *running) {
      return running->context_ == context && running->ended_;
    };
    one_has_ended().wait(guard, [&] { return std::none_of(all().begin(), all().end(), is_of); });
  }

private:
  void end() {
    if (ended_)
      return;
    ended_ = true;
    if (!launch_)
      return;
    before_.missing = __atomic_load_n(&status().missing, __ATOMIC_RELAXED);
    before_.epoch = __atomic_load_n(&status().epoch, __ATOMIC_RELAXED);
    before_.failure = __atomic_load_n(&status().failure, __ATOMIC_RELAXED);
    before_.abort = __atomic_load_n(&status().abort, __ATOMIC_RELAXED);
    failed_before_ = __atomic_load_n(&head().failed, __ATOMIC_RELAXED);
    __atomic_store_n(&status().abort, 1, __ATOMIC_RELEASE);
  }

  FaStatus &status() const { return *reinterpret_cast<FaStatus *>(launch_->status); }
  FaRegionHead &head() const { return *reinterpret_cast<FaRegionHead *>(launch_->regions[launch_->rank]); }

  static std::mutex &mutex() {
    static auto *mutex = new std::mutex;
    return *mutex;
  }
  static std::condition_variable &one_has_ended() {
    static auto *changed = new std::condition_variable;
    return *changed;
  }
  static std::list<Running *> &all() {
    static auto *all = new std::list<Running *>;
    return *all;
  }

  CUcontext context_;
  const FaLaunch *launch_; // null: a copy
  std::thread::id thread_ = std::this_thread::get_id();
  bool ended_ = false;
  FaStatus before_ = {};
  uint32_t failed_before_ = 0;
};

// Threads that run work concurrently, in rounds.
class ThreadGroup {
public:
  ~ThreadGroup() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = true;
      begins_.notify_all();
    }
    for (std::thread &thread : threads_)
      thread.join();
  }

  // Calls work(0) to work(count - 1) concurrently; this thread makes the first call.
  void run(uint32_t count, const std::function<void(uint32_t)> &work) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      while (threads_.size() + 1 < count)
        threads_.emplace_back(&ThreadGroup::serve, this, uint32_t(threads_.size()) + 1, round_);
      work_ = &work;
      count_ = count;
      running_ = uint32_t(threads_.size());
      ++round_;
      begins_.notify_all();
    }
    work(0);
    std::unique_lock<std::mutex> guard(mutex_);
    ends_.wait(guard, [&] { return running_ == 0; });
  }

private:
  void serve(uint32_t number, uint64_t round) {
    std::unique_lock<std::mutex> guard(mutex_);
    for (;;) {
      begins_.wait(guard, [&] { return round_ != round || ended_; });
      if (ended_)
        return;
      round = round_;
      guard.unlock();
      if (number < count_) // written before the round begins, and not during it
        (*work_)(number);
      guard.lock();
      if (--running_ == 0)
        ends_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable begins_, ends_;
  std::vector<std::thread> threads_;
  const std::function<void(uint32_t)> *work_ = nullptr;
  uint32_t count_ = 0, running_ = 0;
  uint64_t round_ = 0;
  bool ended_ = false;
};

// Runs the blocks of one rank's launch. They may run "in any order, in parallel or in series" (Programming
// Guide, Thread Hierarchy). With STAND_IN_MULTIPROCESSORS they run in parallel, as far as there is room.
// Otherwise they run in series, in order on every rank, because a block waits only for blocks of the same
// number. Blocks of a transfer always run in parallel: each has separate channels, and a block waits for
// different blocks of the peers. The blocks of a cooperative launch are already `resident`.
void run_blocks(CUcontext context, const FaLaunch &launch, unsigned threads, bool resident) {
  const bool limited = settings().multiprocessors > 0 && !resident;
  if (settings().multiprocessors <= 0 && launch.algorithm != FA_TRANSFER) {
    for (uint32_t block = 0; block < launch.blocks; ++block)
      stand_in_host_entry(&launch, block);
    return;
  }
  Residency &device = Residency::of(context->device);
  const uint64_t registers = Residency::registers_of(threads);
  std::vector<std::thread> blocks;
  for (uint32_t block = 0; block < launch.blocks; ++block) {
    if (limited)
      device.enter(registers);
    blocks.emplace_back([&, block] {
      stand_in_host_entry(&launch, block);
      if (limited)
        device.leave(registers);
    });
  }
  for (std::thread &block : blocks)
    block.join();
}

void run_rank(CUcontext context, FaLaunch launch, unsigned blocks, unsigned threads, bool resident) {
  if (!addresses_are_accessible(*context, launch))
    return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  launch.blocks = blocks;
  if (!operands_are_accessible(*context, launch))
    return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  uint64_t windows[kMaxDevices];
  if (is_nvls(launch.algorithm)) {
    const uint64_t bytes = 2 * launch.staging_bytes;
    if (!is_accessible(*context, launch.window, bytes) ||
        multicast_parts(*context, launch.multicast, bytes, windows) != launch.world) {
      return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    // The host's build of the kernels takes the addresses of all windows here.
    launch.multicast = reinterpret_cast<uint64_t>(windows);
  }
  const Running running(context, &launch);
  run_blocks(context, launch, threads, resident);
}

// Kernels need one thread for each rank, and a whole warp.
bool has_enough_threads(const Shape &shape, uint32_t world) {
  constexpr unsigned kWarp = 32;
  return shape.block[0] >= world && shape.block[0] >= kWarp;
}

void run_world(CUcontext context, const Kernel &kernel, const Shape &shape, uint64_t array,
               uint32_t repetitions, uint64_t sums) {
  const uint32_t world = shape.grid[1];
  if (!is_accessible(*context, array, world * sizeof(FaLaunch)))
    return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  std::vector<FaLaunch> launches(world);
  memcpy(launches.data(), reinterpret_cast<const void *>(array), world * sizeof(FaLaunch));
  for (uint32_t rank = 0; rank < world; ++rank) {
    const FaLaunch &launch = launches[rank];
    const bool fits = runs(kernel, launch) && has_enough_threads(shape, launch.world);
    const uint64_t operands = operand_bytes(launch.algorithm);
    const bool complete = operands == 0 || is_accessible(*context, launch.operands, operands);
    if (!fits || !complete)
      return context->fail(CUDA_ERROR_LAUNCH_FAILED);
  }
  log_launch(kernel, shape, launches[0].count);
  note_work();
  // A cooperative launch is resident as a whole (Programming Guide, Cooperative Groups, Grid
  // Synchronization).
  const uint64_t registers = Residency::registers_of(shape.block[0]) * shape.grid[0] * world;
  if (settings().multiprocessors > 0)
    Residency::of(context->device).enter(registers);
  thread_local ThreadGroup threads;
  const auto run = [&](uint32_t rank) {
    run_rank(context, launches[rank], shape.grid[0], shape.block[0], true);
  };
  for (uint32_t i = 0; i < repetitions; ++i)
    threads.run(world, run);
  if (kernel.repeats)
    add_stamps(context, sums, uint64_t(world) * shape.grid[0], repetitions);
  if (settings().multiprocessors > 0)
    Residency::of(context->device).leave(registers);
}

CUresult check_shape(const Shape &shape, bool all_ranks, bool cooperative) {
  const unsigned threads = shape.block[0] * shape.block[1] * shape.block[2];
  const bool flat = shape.block[1] == 1 && shape.block[2] == 1 && shape.grid[2] == 1;
  const bool sound = threads > 0 && threads <= unsigned(kMaxThreads) && flat && shape.shared <= (48u << 10) &&
                     shape.grid[0] > 0 && shape.grid[0] <= FA_MAX_BLOCKS && shape.grid[1] > 0 &&
                     shape.grid[1] <= (all_ranks ? FA_MAX_RANKS : 1);
  if (!sound || (all_ranks && !cooperative))
    return CUDA_ERROR_INVALID_VALUE;
  const int resident = multiprocessors() * blocks_per_multiprocessor(int(threads));
  const bool too_large = cooperative && int(shape.grid[0] * shape.grid[1]) > resident;
  return too_large ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE : CUDA_SUCCESS;
}

// Starts the kernel that checks shared memory.
CUresult start_share_probe(CUcontext context, CUstream stream, void **parameters) {
  struct {
    uint64_t to, from, value[2];
  } probe;
  static_assert(sizeof(probe) == 4 * sizeof(uint64_t), "the parameters");
  for (int i = 0; i < 4; ++i)
    memcpy(reinterpret_cast<char *>(&probe) + 8 * i, parameters[i], 8);
  return submit(stream, [=]() mutable {
    if (context->error != CUDA_SUCCESS)
      return;
    if (!is_accessible(*context, probe.to, 16) || (probe.from && !is_accessible(*context, probe.from, 16)))
      return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    // Where stores to peers go elsewhere: a load from the same address finds them again.
    static auto *elsewhere = new std::map<uint64_t, std::array<uint64_t, 2>>;
    static auto *mutex = new std::mutex;
    std::lock_guard<std::mutex> guard(*mutex);
    const std::string &broken = settings().broken_peers;
    const auto is_of_peer = [&](uint64_t address) {
      return Registry::lock().find(address)->device != context->device;
    };
    if (probe.from && is_of_peer(probe.from) && broken == "loads")
      memset(probe.value, 0xFF, 16);
    else if (probe.from && is_of_peer(probe.from) && elsewhere->count(probe.from))
      memcpy(probe.value, (*elsewhere)[probe.from].data(), 16);
    else if (probe.from)
      memcpy(probe.value, reinterpret_cast<const void *>(probe.from), 16);
    if (is_of_peer(probe.to) && broken == "elsewhere")
      (*elsewhere)[probe.to] = {probe.value[0], probe.value[1]};
    else if (!is_of_peer(probe.to) || broken != "stores")
      memcpy(reinterpret_cast<void *>(probe.to), probe.value, 16);
  });
}

// Starts a kernel that is not in csrc/catalogue.h, of any shape that a GPU accepts: a probe, or any kernel on
// the PTX machine.
CUresult start_foreign(CUfunc_st &function, const Shape &shape, CUstream stream, void **parameters,
                       bool cooperative) {
  const unsigned threads = shape.block[0] * shape.block[1] * shape.block[2];
  const unsigned blocks = shape.grid[0] * shape.grid[1] * shape.grid[2];
  if (threads == 0 || threads > 1024 || blocks == 0 || !parameters || !parameters[0])
    return CUDA_ERROR_INVALID_VALUE;
  if (!function.ptx && is_share_probe(function.kernel))
    return start_share_probe(function.context, stream, parameters);
  if (cooperative && int(blocks) > multiprocessors())
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  load(function);
  if (!function.ptx) {
    const ProbeLaunch probe = probe_launch(function.kernel.name, blocks, threads, parameters);
    return submit(stream, [context = function.context, probe] {
      if (context->error == CUDA_SUCCESS)
        run_probe(context, probe);
    });
  }
  std::vector<unsigned char> bytes;
  if (!gather_parameters(function.ptx, function.kernel.name.c_str(), parameters, &bytes))
    return CUDA_ERROR_INVALID_VALUE;
  return submit(
      stream, [context = function.context, module = function.ptx, name = function.kernel.name, shape, bytes] {
        if (context->error == CUDA_SUCCESS)
          run_on_machine(context, module, name, shape.grid, shape.block, bytes);
      });
}

CUresult start(CUfunction handle, const Shape &shape, CUstream stream_handle, void **parameters, void **extra,
               bool cooperative) {
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(stream_handle, &stream));
  // Kernels of older architectures do not wait for the previous kernel, so they must not begin before it
  // ends.
  if (shape.programmatic && settings().virtual_architecture < 90)
    return CUDA_ERROR_INVALID_VALUE;
  if (shape.programmatic && settings().version < 12030) {
    // Graphs have programmatic edges since CUDA 12.3.
    std::lock_guard<std::mutex> guard(state());
    if (stream->capture)
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  auto function = find_function(handle);
  if (!function || function->context != stream->context)
    return CUDA_ERROR_INVALID_HANDLE;
  const Kernel &kernel = function->kernel;
  if (kernel.foreign && !extra)
    return start_foreign(*function, shape, stream_handle, parameters, cooperative);
  if (!parameters || !parameters[0] || extra)
    return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = stream->context;
  FaLaunch launch;
  memcpy(&launch, parameters[0], sizeof(launch));
  const bool all_ranks = launch.launches != 0;
  STAND_IN_CHECK(check_shape(shape, all_ranks, cooperative));
  load(*function);
  const uint64_t operand_size = operand_bytes(kernel.algorithm);
  if (operand_size != 0 && !parameters[1])
    return CUDA_ERROR_INVALID_VALUE;

  if (all_ranks ? kernel.hot_world != 0 && !kernel.repeats : kernel.repeats)
    return CUDA_ERROR_INVALID_VALUE;
  if (kernel.repeats && (!parameters[1] || !parameters[2]))
    return CUDA_ERROR_INVALID_VALUE;
  if (!all_ranks && (!runs(kernel, launch) || !has_enough_threads(shape, launch.world)))
    return CUDA_ERROR_INVALID_VALUE;
  if (const PtxModule *module = function->ptx) {
    std::vector<unsigned char> bytes;
    if (!gather_parameters(module, kernel.name.c_str(), parameters, &bytes))
      return CUDA_ERROR_INVALID_VALUE;
    return submit(stream_handle, [=] {
      if (context->error != CUDA_SUCCESS)
        return;
      log_launch(kernel, shape, launch.count);
      run_on_machine(context, module, kernel.name, shape.grid, shape.block, bytes);
    });
  }

  if (all_ranks) {
    const uint32_t repetitions = kernel.repeats ? *static_cast<const uint32_t *>(parameters[1]) : 1;
    const uint64_t sums = kernel.repeats ? *static_cast<const uint64_t *>(parameters[2]) : 0;
    return submit(stream_handle, [=] {
      if (context->error == CUDA_SUCCESS)
        run_world(context, kernel, shape, launch.launches, repetitions, sums);
    });
  }
  union {
    FaTransfers messages;
    FaFused norm;
    FaGatheredRows rows;
    FaShardedNorm sharded;
  } operands = {};
  if (operand_size != 0)
    memcpy(&operands, parameters[1], operand_size);
  return submit(stream_handle, [=] {
    if (context->error != CUDA_SUCCESS)
      return;
    log_launch(kernel, shape, launch.count);
    FaLaunch own = launch;
    if (operand_size != 0)
      own.operands = reinterpret_cast<uint64_t>(&operands);
    run_rank(context, own, shape.grid[0], shape.block[0], false);
  });
}

} // namespace

void end_work_of(CUcontext context) { Running::end_all_of(context); }
void await_ended_work_of(CUcontext context) { Running::await(context); }

void copy_unless_lost(CUcontext context, const std::function<void()> &copy) {
  const Running running(context, nullptr);
  if (context->error == CUDA_SUCCESS)
    copy();
}

} // namespace stand_in

using namespace stand_in;

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **parameters, void **extra) {
  STAND_IN_CALL();
  if (settings().no_launch) {
    const auto called = find_function(function);
    if (!called || !is_share_probe(called->kernel))
      return CUDA_SUCCESS;
  }
  const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, false};
  return start(function, shape, stream, parameters, extra, false);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **parameters) {
  STAND_IN_CALL();
  const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, false};
  return start(function, shape, stream, parameters, nullptr, true);
}

// A launch that may begin early begins late, which is allowed. Of the other attributes only the cooperative
// one is implemented.
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  STAND_IN_CALL();
  if (!config || (config->numAttrs && !config->attrs))
    return CUDA_ERROR_INVALID_VALUE;
  bool cooperative = false, programmatic = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute &attribute = config->attrs[i];
    switch (attribute.id) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: cooperative = attribute.value.cooperative; break;
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      programmatic = attribute.value.programmaticStreamSerializationAllowed;
      break;
    case CU_LAUNCH_ATTRIBUTE_IGNORE: break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  const Shape shape = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                       {config->blockDimX, config->blockDimY, config->blockDimZ},
                       config->sharedMemBytes,
                       programmatic};
  return start(function, shape, config->hStream, parameters, extra, cooperative);
}
