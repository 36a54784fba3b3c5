// Failure injection for tests, and counts of objects that a process has not released.
#pragma once

#include <atomic>
#include <string>

#include "api.h"

namespace stand_in {

// A driver function that was called at least once.
struct Function {
  explicit Function(const char *name);
  size_t number;    // index in the order of first calls
  std::string name; // without the symbol's version suffix
  bool waits;       // while the process is locked
  std::atomic<uint64_t> calls{0};
};

// A call of the API. Calls that the stand-in makes itself within another call are not counted.
class Call {
public:
  explicit Call(Function &function);
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;
  ~Call();
  bool is_inside = false;       // the process cannot be locked
  CUresult code = CUDA_SUCCESS; // if not CUDA_SUCCESS, the call returns it and does nothing
};

} // namespace stand_in

// First line of every function of the API. The Function object is never destroyed, for calls at exit.
#define STAND_IN_CALL()                                                                                      \
  static stand_in::Function &stand_in_function = *new stand_in::Function(__func__);                          \
  const stand_in::Call stand_in_call(stand_in_function);                                                     \
  if (stand_in_call.code != CUDA_SUCCESS)                                                                    \
  return stand_in_call.code
