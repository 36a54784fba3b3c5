// Graphs: what a capture leaves behind.
#pragma once

#include "stream.h"

struct CUgraphExec_st {
  std::vector<stand_in::Node> nodes;
  stand_in::UserObjects objects; // those of the graph that it was made of
  std::mutex running;            // launches of one graph follow each other
};

namespace stand_in {

Handles<CUgraph_st> &graphs();
// The graph that a capture builds, by its handle; null if none does.
std::shared_ptr<CUgraph_st> captured_graph(CUgraph handle);

} // namespace stand_in
