// Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
// Synchronization"). With a launch attribute, a kernel may become resident while the previous one in the
// stream or graph still runs. From sm_90 on; without the attribute both instructions do nothing.
//
// Memory. A kernel waits before it accesses any memory except its parameters: until the previous launch has
// ended and its writes are visible. So the order between two launches of a rank is the same as without the
// attribute (an axiom of lab/litmus/programs/pulls/registered_start.litmus), and two generations of
// mailboxes and staging suffice, as the algorithms argue. "The previous launch" is the last one in the stream
// only; earlier ones have ended because that one waited for them. A foreign kernel that is launched with the
// attribute must therefore also wait before it ends.
//
// Residency. A block allows the next launch to begin once none of its threads waits for a peer any more. From
// then on, the next launch cannot keep this one from ending, even if it fills the multiprocessors, so the two
// together need the resources of one. A launch that fails also stops waiting. A kernel that never signals,
// such as a transfer, allows the next launch to begin when it ends.
#pragma once

#include "memory.cuh"

namespace FA_NAMESPACE {

FA_FN void wait_for_launch_before() {
#if FA_CUDA && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Call it from any thread of a block, once no thread of the block waits for a peer.
FA_FN void let_next_launch_begin() {
#if FA_CUDA && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace FA_NAMESPACE
