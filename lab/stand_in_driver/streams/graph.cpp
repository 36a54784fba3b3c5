// Graphs: a node runs when its dependencies have ended; independent nodes run concurrently.
#include "graph.h"

namespace stand_in {
namespace {

Handles<CUgraphExec_st> &executables() {
  static auto *executables = new Handles<CUgraphExec_st>;
  return *executables;
}

bool is_chain(const std::vector<Node> &nodes) {
  for (size_t i = 1; i < nodes.size(); ++i) {
    if (nodes[i].after.count(i - 1) == 0)
      return false;
  }
  return true;
}

// "An operation may be scheduled at any time once the nodes on which it depends are complete. Scheduling is
// left up to the CUDA system" (Programming Guide, CUDA Graphs, Graph Structure): branches run concurrently.
void run(const std::vector<Node> &nodes) {
  if (is_chain(nodes)) {
    for (const Node &node : nodes)
      node.work();
    return;
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done(nodes.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < nodes.size(); ++i) {
    threads.emplace_back([&, i] {
      std::unique_lock<std::mutex> guard(mutex);
      for (size_t before : nodes[i].after)
        changed.wait(guard, [&] { return done[before]; });
      guard.unlock();
      nodes[i].work();
      guard.lock();
      done[i] = true;
      changed.notify_all();
    });
  }
  for (std::thread &thread : threads)
    thread.join();
}

} // namespace

Handles<CUgraph_st> &graphs() {
  static auto *graphs = new Handles<CUgraph_st>;
  return *graphs;
}

uint64_t live_graphs() { return graphs().size(); }
uint64_t live_executables() { return executables().size(); }

} // namespace stand_in

using namespace stand_in;

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (!graph || flags)
    return CUDA_ERROR_INVALID_VALUE;
  *graph = graphs().insert(std::make_shared<CUgraph_st>());
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  return graphs().take(graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  auto graph = graphs().find(handle);
  if (!graph || !count)
    return CUDA_ERROR_INVALID_VALUE;
  if (nodes) {
    for (size_t i = 0; i < *count; ++i) {
      const bool exists = i < graph->nodes.size();
      nodes[i] = exists ? reinterpret_cast<CUgraphNode>(&graph->nodes[i]) : nullptr;
    }
  }
  *count = graph->nodes.size();
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  constexpr unsigned long long kAutoFree = 1, kDeviceLaunch = 4, kAll = 15;
  const bool valid = !(flags & ~kAll) && (flags & (kAutoFree | kDeviceLaunch)) != (kAutoFree | kDeviceLaunch);
  auto graph = graphs().find(graph_handle);
  if (!handle || !graph || !valid)
    return CUDA_ERROR_INVALID_VALUE;
  auto executable = std::make_shared<CUgraphExec_st>();
  executable->nodes = graph->nodes;
  executable->objects = graph->objects;
  *handle = executables().insert(std::move(executable));
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *handle, CUgraph graph, CUgraphNode *node, char *log,
                               size_t bytes) {
  STAND_IN_CALL();
  if (node)
    *node = nullptr;
  if (log && bytes)
    *log = 0;
  return cuGraphInstantiateWithFlags(handle, graph, 0);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto executable = executables().find(handle);
  if (!executable)
    return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, [executable] {
    std::lock_guard<std::mutex> guard(executable->running);
    run(executable->nodes);
  });
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(stream_handle, &stream));
  return executables().find(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Queued launches still run.
CUresult cuGraphExecDestroy(CUgraphExec handle) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  return executables().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
