// User objects: created by a caller, attached to graphs, and destroyed with the last reference.
#include "graph.h"

namespace stand_in {
namespace {

// A caller's object, and the number of references that the caller owns.
struct Owned {
  std::shared_ptr<CUuserObject_st> object;
  unsigned references;
};

std::mutex &mutex() {
  static auto *mutex = new std::mutex;
  return *mutex;
}

std::map<CUuserObject, Owned> &owned() {
  static auto *owned = new std::map<CUuserObject, Owned>;
  return *owned;
}

// Removes references of the caller. `*last` keeps the object alive until no lock is held, since its
// destructor is the program's code.
CUresult take(CUuserObject handle, unsigned count, std::shared_ptr<CUuserObject_st> *last) {
  std::lock_guard<std::mutex> guard(mutex());
  auto found = owned().find(handle);
  if (found == owned().end() || count == 0 || count > found->second.references)
    return CUDA_ERROR_INVALID_VALUE;
  *last = found->second.object;
  found->second.references -= count;
  if (found->second.references == 0)
    owned().erase(found);
  return CUDA_SUCCESS;
}

// Finds an existing graph, or one that is being captured.
std::shared_ptr<CUgraph_st> find_graph(CUgraph handle) {
  std::shared_ptr<CUgraph_st> graph = graphs().find(handle);
  return graph ? graph : captured_graph(handle);
}

} // namespace

uint64_t live_user_objects() {
  std::lock_guard<std::mutex> guard(mutex());
  return owned().size();
}

} // namespace stand_in

using namespace stand_in;

CUresult cuUserObjectCreate(CUuserObject *handle, void *value, CUhostFn destroy, unsigned references,
                            unsigned flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  // "CU_USER_OBJECT_NO_DESTRUCTOR_SYNC [...] is required" (Driver API, cuUserObjectCreate).
  if (!handle || !destroy || references == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  auto object = std::make_shared<CUuserObject_st>();
  object->value = value;
  object->destroy = destroy;
  *handle = object.get();
  std::lock_guard<std::mutex> guard(mutex());
  owned()[*handle] = {std::move(object), references};
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  std::shared_ptr<CUuserObject_st> last;
  return take(handle, count, &last);
}

// With CU_GRAPH_USER_OBJECT_MOVE the caller's references are moved to the graph.
CUresult cuGraphRetainUserObject(CUgraph graph_handle, CUuserObject handle, unsigned count, unsigned flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  auto graph = find_graph(graph_handle);
  if (!graph || count == 0 || flags > CU_GRAPH_USER_OBJECT_MOVE)
    return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<CUuserObject_st> object;
  if (flags == CU_GRAPH_USER_OBJECT_MOVE) {
    STAND_IN_CHECK(take(handle, count, &object));
  } else {
    std::lock_guard<std::mutex> guard(mutex());
    auto found = owned().find(handle);
    if (found == owned().end())
      return CUDA_ERROR_INVALID_VALUE;
    object = found->second.object;
  }
  std::lock_guard<std::mutex> guard(state());
  graph->objects.insert(graph->objects.end(), count, object);
  return CUDA_SUCCESS;
}
