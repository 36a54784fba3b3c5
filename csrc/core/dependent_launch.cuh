// Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
// Synchronization"): with an attribute of its launch a kernel may become resident while the one before it in
// the stream, or in the graph, still runs. From sm_90 on; without the attribute both instructions do nothing.
//
// Memory. A kernel waits before it reads or writes any memory but its parameters: until the launch before it
// has ended, and what that wrote is seen. So between two launches of a rank there is the same order as
// without the attribute (lab/litmus/programs/protocol/registered_start.litmus takes it as an axiom), and
// two generations of mailboxes and staging are enough, as the algorithms say. The launch before is the last
// one of the stream alone: that the ones before that have ended too follows from its having waited. A foreign
// kernel that is launched with the attribute must therefore wait as well, at some time before it ends.
//
// Residency. Its blocks let the next launch begin once they wait for no peer any more. From then on nothing
// that takes up the multiprocessors keeps this launch from its end, so that a launch and the next count once.
// A launch that gives up waits for nobody any more either; one that says nothing, as a transfer, lets the
// next one begin where it ends.
#pragma once

#include "memory.cuh"

namespace FA_NAMESPACE {

FA_FN void wait_for_launch_before() {
#if FA_CUDA && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// By any thread of a block, once none of it waits for a peer.
FA_FN void let_next_launch_begin() {
#if FA_CUDA && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace FA_NAMESPACE
