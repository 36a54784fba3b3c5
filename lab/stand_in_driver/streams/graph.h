// Graphs, the results of captures.
#pragma once

#include "stream.h"

struct CUgraphExec_st {
  std::vector<stand_in::Node> nodes;
  stand_in::UserObjects objects; // user objects of the graph that it was instantiated from
  std::mutex running;            // serialises launches of one graph
};

namespace stand_in {

Handles<CUgraph_st> &graphs();
// The graph that an active capture builds, by its handle; null if there is none.
std::shared_ptr<CUgraph_st> captured_graph(CUgraph handle);

} // namespace stand_in
