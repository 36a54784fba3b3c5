// User objects: what graphs keep, and whose destructor tells that they have gone.
#pragma once

#include <vector>

#include "driver.h"

// Destroyed with the last reference: of the caller, of a graph or of an executable one.
struct CUuserObject_st {
  void *value = nullptr;
  CUhostFn destroy = nullptr;
  ~CUuserObject_st() { destroy(value); }
};

namespace stand_in {

// What a graph holds: each reference for itself.
using UserObjects = std::vector<std::shared_ptr<CUuserObject_st>>;

uint64_t live_user_objects();

} // namespace stand_in
