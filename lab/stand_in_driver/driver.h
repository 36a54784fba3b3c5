// Declarations that all parts of the stand-in share: settings, contexts, handles, and the checks at the start
// of every call.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "functions.h"
#include "injection.h"

namespace stand_in {

constexpr int kMaxDevices = 16;
// A physical number is a device's number in its node, plus this times the node's number.
constexpr int kDevicesOfNode = 16;

// Read once, from the environment; README.md documents the variables.
struct Settings {
  std::vector<int> devices; // physical number of each visible device
  bool no_ipc, no_vmm, ipc_black_hole, no_peer, no_launch, pcie, abort_on_early_free, fabric;
  std::string launch_log, broken_peers;
  bool synchronise, suballocate, eager_loading, ptx, multicast, throttle, watchdog, lost_stores;
  int multiprocessors; // whose blocks run concurrently; 0: a launch's blocks run in series
  int version, virtual_architecture;
  int node; // pretended: this process's machine
};
const Settings &settings();

// A call of the API begins, when the process is not locked for a checkpoint, and ends.
void enter_process();
void leave_process();

CUresult check_initialized();
CUresult check_device(CUdevice device);
// Number of multiprocessors of each device.
int multiprocessors();
bool peers_reach_each_other(CUdevice a, CUdevice b);

// Returns the calling thread's context, with the checks that nearly every call makes: initialised, current,
// alive, and without an earlier asynchronous error, from which a context never recovers.
CUresult current_context(CUcontext *context);

// Gives the calling thread's context, if there is one, such an error.
void break_current_context(CUresult code);
// Aborts the running work of a context, except work that the calling thread runs.
void end_work_of(CUcontext context);
// Waits until the aborted work has ended.
void await_ended_work_of(CUcontext context);
// Runs a copy or a fill, unless the context is lost.
void copy_unless_lost(CUcontext context, const std::function<void()> &copy);

// Number of objects that callers have created and not released; primary contexts count by their uses.
uint64_t live_contexts();
uint64_t live_streams();
uint64_t live_events();
uint64_t live_modules();
uint64_t live_graphs();
uint64_t live_executables();

// Objects whose handles are plain pointers. An unknown pointer is detected, not dereferenced.
template <class T>
class Handles {
public:
  T *insert(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> guard(mutex_);
    T *handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }

  std::shared_ptr<T> find(const T *handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<T> take(const T *handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end())
      return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  std::vector<std::shared_ptr<T>> all() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::shared_ptr<T>> objects;
    for (auto &entry : objects_)
      objects.push_back(entry.second);
    return objects;
  }

  uint64_t size() {
    std::lock_guard<std::mutex> guard(mutex_);
    return objects_.size();
  }

private:
  std::mutex mutex_;
  std::map<const T *, std::shared_ptr<T>> objects_;
};

} // namespace stand_in

struct CUctx_st {
  CUdevice device = 0;
  std::atomic<uint64_t> id{0}; // new after each reset
  bool primary = false;
  int uses = 0; // of a primary context: number of cuDevicePrimaryCtxRetain calls not released
  unsigned flags = 0;
  std::atomic<bool> alive{false};
  std::atomic<uint32_t> error{CUDA_SUCCESS}; // sticky
  std::atomic<bool> peers[stand_in::kMaxDevices] = {};
  std::shared_ptr<CUstream_st> legacy;

  // Sets the error and aborts running launches; the context runs no work any more.
  void fail(CUresult code);
};

// Returns from the calling function with the code of a check that fails.
#define STAND_IN_CHECK(expression)                                                                           \
  do {                                                                                                       \
    if (const CUresult code = (expression))                                                                  \
      return code;                                                                                           \
  } while (0)
