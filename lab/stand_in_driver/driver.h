// What the parts of the stand-in share: settings, contexts, handles, and the entry checks of every call.
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

// Read once, from the environment; README.md documents the variables.
struct Settings {
  std::vector<int> devices; // physical number of each visible device
  bool no_ipc, no_vmm, ipc_black_hole, no_peer, no_launch, pcie, abort_on_early_free;
  std::string launch_log;
  bool synchronise, suballocate, eager_loading, ptx, multicast;
  int multiprocessors; // whose blocks run side by side; 0: a launch's blocks run one after the other
  int version, virtual_architecture;
};
const Settings &settings();

CUresult check_initialized();
CUresult check_device(CUdevice device);
// Of each device.
int multiprocessors();
bool peers_reach_each_other(CUdevice a, CUdevice b);

// The calling thread's context, with the checks that nearly every call makes: initialised, current, alive,
// and without an earlier asynchronous error, which a context never recovers from.
CUresult current_context(CUcontext *context);

// The calling thread's context, if it has one, has such an error from now on.
void break_current_context(CUresult code);
// Has what runs in a context end before it is done, except what the caller is in itself.
void end_work_of(CUcontext context);
// Waits until that has ended.
void await_ended_work_of(CUcontext context);
// Copies or fills, if the context still runs anything.
void copy_unless_lost(CUcontext context, const std::function<void()> &copy);

// How many there are that callers have made and not given back; contexts by their uses.
uint64_t live_contexts();
uint64_t live_streams();
uint64_t live_events();
uint64_t live_modules();
uint64_t live_graphs();
uint64_t live_executables();

// Objects that callers hold as plain pointers. An unknown pointer is found out instead of followed.
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
  std::atomic<uint64_t> id{0}; // of this life
  bool primary = false;
  int uses = 0; // of a primary context, by cuDevicePrimaryCtxRetain
  unsigned flags = 0;
  std::atomic<bool> alive{false};
  std::atomic<uint32_t> error{CUDA_SUCCESS}; // sticky
  std::atomic<bool> peers[stand_in::kMaxDevices] = {};
  std::shared_ptr<CUstream_st> legacy;

  // Ends the launches that run; nothing runs any more.
  void fail(CUresult code);
};

// Returns from the calling function with the code of a check that fails.
#define STAND_IN_CHECK(expression)                                                                           \
  do {                                                                                                       \
    if (const CUresult code = (expression))                                                                  \
      return code;                                                                                           \
  } while (0)
