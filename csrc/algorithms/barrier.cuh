// Barrier: no rank's launch ends before every rank's has begun.
#pragma once

#include "../core/barrier.cuh"

namespace FA_NAMESPACE {

template <class Block>
FA_FN void run_barrier(const FaLaunch &launch, Block &block) {
  const LaunchState state = begin_launch(launch, block, true);
  if (same_call(launch, block, state) && barrier(launch, block, kStart, state))
    end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
