// Graphs: what a capture leaves behind.
#pragma once

#include "stream.h"

struct CUgraphExec_st {
  std::vector<stand_in::Node> nodes;
  std::mutex running; // launches of one graph follow each other
};

namespace stand_in {

Handles<CUgraph_st> &graphs();

} // namespace stand_in
