// Failure injection for tests, and counts of objects that a process has not released.
#include "injection.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "driver.h"
#include "memory/multicast.h"
#include "streams/user_object.h"
#include "thread_variable.h"

namespace stand_in {
namespace {

thread_local int depth = 0;
thread_local bool paused = false;
// Calls of this thread, by the functions' numbers.
std::vector<uint64_t> &own_calls() { return ThreadVariable<std::vector<uint64_t>>::get(); }

struct Failure {
  std::string function;
  uint64_t left; // calls up to and including the one that fails
  CUresult code;
  bool own_thread;
  std::thread::id thread;
};

struct Injection {
  std::mutex mutex;
  std::list<Function *> functions;
  std::list<Failure> failures;
  std::atomic<size_t> armed{0}; // number of failures, so that calls take no lock if there are none
};

std::string without_version(const char *name) {
  const char *end = strrchr(name, '_');
  const bool versioned = end && end[1] == 'v' && end[2] >= '0' && end[2] <= '9' && end[3] == 0;
  return versioned ? std::string(name, end) : name;
}

// STAND_IN_FAIL=FUNCTION:N:CODE,...
void read_environment(Injection *injection) {
  const char *text = getenv("STAND_IN_FAIL");
  while (text && *text) {
    char function[64];
    unsigned long long nth;
    unsigned code;
    int length = 0;
    if (sscanf(text, "%63[^:]:%llu:%u%n", function, &nth, &code, &length) != 3 || nth == 0 || code == 0) {
      fprintf(stderr, "stand-in driver: STAND_IN_FAIL is FUNCTION:N:CODE,..., not %s\n", text);
      abort();
    }
    injection->failures.push_back({without_version(function), nth, CUresult(code), false, {}});
    text += length;
    text += *text == ',';
  }
  injection->armed = injection->failures.size();
}

Injection &injection() {
  static auto *injection = [] {
    auto *made = new Injection;
    read_environment(made);
    return made;
  }();
  return *injection;
}

CUresult failure_of(const Function &function) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  auto &failures = injection().failures;
  CUresult code = CUDA_SUCCESS;
  for (auto failure = failures.begin(); failure != failures.end();) {
    const bool meant = failure->function == function.name &&
                       (!failure->own_thread || failure->thread == std::this_thread::get_id());
    if (!meant || --failure->left > 0) {
      ++failure;
      continue;
    }
    code = failure->code;
    failure = failures.erase(failure);
    --injection().armed;
  }
  return code;
}

// Whether it is an error of a failed kernel: "This leaves the process in an inconsistent state and any
// further CUDA work will return the same error" (Driver API, CUresult).
bool is_sticky(CUresult code) {
  return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_MISALIGNED_ADDRESS ||
         code == CUDA_ERROR_LAUNCH_FAILED;
}

} // namespace

Function::Function(const char *symbol)
    : name(without_version(symbol)), waits(name.rfind("cuCheckpointProcess", 0) != 0) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  number = injection().functions.size();
  injection().functions.push_back(this);
}

Call::Call(Function &function) {
  if (depth++ > 0)
    return;
  if (function.waits) {
    enter_process();
    is_inside = true;
  }
  if (paused)
    return;
  ++function.calls;
  std::vector<uint64_t> &own = own_calls();
  if (own.size() <= function.number)
    own.resize(function.number + 1);
  ++own[function.number];
  if (injection().armed != 0)
    code = failure_of(function);
  if (is_sticky(code))
    break_current_context(code);
}

Call::~Call() {
  --depth;
  if (is_inside)
    leave_process();
}

} // namespace stand_in

using namespace stand_in;

void stand_in_fail(const char *function, uint64_t nth, unsigned code, int own_thread) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  if (!function)
    injection().failures.clear();
  else if (nth > 0 && code != CUDA_SUCCESS)
    injection().failures.push_back(
        {without_version(function), nth, CUresult(code), own_thread != 0, std::this_thread::get_id()});
  injection().armed = injection().failures.size();
}

unsigned stand_in_failures_left() { return unsigned(injection().armed); }

uint64_t stand_in_calls(const char *name) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  uint64_t calls = 0;
  for (const Function *function : injection().functions) {
    if (function->name == without_version(name))
      calls += function->calls;
  }
  return calls;
}

uint64_t stand_in_calls_of_thread(const char *name) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  uint64_t calls = 0;
  for (const Function *function : injection().functions) {
    if (function->name == without_version(name) && function->number < own_calls().size())
      calls += own_calls()[function->number];
  }
  return calls;
}

void stand_in_pause(int pause) { paused = pause != 0; }

const char *stand_in_function(unsigned index) {
  std::lock_guard<std::mutex> guard(injection().mutex);
  for (const Function *function : injection().functions) {
    if (index-- == 0)
      return function->name.c_str();
  }
  return nullptr;
}

const char *stand_in_live(unsigned index, uint64_t *count) {
  constexpr struct {
    const char *name;
    uint64_t (*count)();
  } kKinds[] = {
      {"cuMemAlloc", [] { return live_allocations(Kind::Device); }},
      {"cuMemAllocAsync", [] { return live_allocations(Kind::Pool); }},
      {"cuMemHostAlloc", [] { return live_allocations(Kind::Host); }},
      {"cuMemHostRegister", [] { return live_allocations(Kind::Registered); }},
      {"cuIpcOpenMemHandle", [] { return live_allocations(Kind::Ipc); }},
      {"cuMemMap", [] { return live_allocations(Kind::Virtual); }},
      {"cuMemCreate", live_physical_memory},
      {"cuMemAddressReserve", live_reservations},
      {"cuMulticastBindMem", live_bindings},
      {"cuStreamCreate", live_streams},
      {"cuEventCreate", live_events},
      {"cuModuleLoad", live_modules},
      {"cuStreamEndCapture", live_graphs},
      {"cuGraphInstantiate", live_executables},
      {"cuUserObjectCreate", live_user_objects},
      {"cuDevicePrimaryCtxRetain", live_contexts},
      {"freed while open elsewhere", early_frees},
  };
  if (index >= sizeof(kKinds) / sizeof(*kKinds))
    return nullptr;
  *count = kKinds[index].count();
  return kKinds[index].name;
}
