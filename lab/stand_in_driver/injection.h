// Calls that fail because a test wants them to, and counts of what a process has not given back.
#pragma once

#include <atomic>
#include <string>

#include "api.h"

namespace stand_in {

// A driver function that has been called.
struct Function {
  explicit Function(const char *name);
  size_t number;    // of all functions, in the order of their first calls
  std::string name; // without the version that the symbol ends in
  std::atomic<uint64_t> calls{0};
};

// A call of the API. Those that the stand-in makes itself, within another one, are none of the caller's.
class Call {
public:
  explicit Call(Function &function);
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;
  ~Call();
  CUresult code = CUDA_SUCCESS; // other than that: what the call returns without doing anything
};

} // namespace stand_in

// The first line of every function of the API. What is known of the function stays, for calls at exit.
#define STAND_IN_CALL()                                                                                      \
  static stand_in::Function &stand_in_function = *new stand_in::Function(__func__);                          \
  const stand_in::Call stand_in_call(stand_in_function);                                                     \
  if (stand_in_call.code != CUDA_SUCCESS)                                                                    \
  return stand_in_call.code
