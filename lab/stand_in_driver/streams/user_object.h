// User objects, which graphs keep alive; their destructors show that the graphs have been destroyed.
#pragma once

#include <vector>

#include "../driver.h"

// Destroyed with the last reference: of the caller, of a graph or of an executable graph.
struct CUuserObject_st {
  void *value = nullptr;
  CUhostFn destroy = nullptr;
  ~CUuserObject_st() { destroy(value); }
};

namespace stand_in {

// References of a graph.
using UserObjects = std::vector<std::shared_ptr<CUuserObject_st>>;

uint64_t live_user_objects();

} // namespace stand_in
