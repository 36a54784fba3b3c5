// Barrier: no rank's launch ends before every rank's has begun.
#pragma once

#include "../core/barrier.cuh"

namespace FA_NAMESPACE {

template <class Block>
FA_FN void all_meet(const FaLaunch &launch, Block &block) {
  const Turn turn = begin_turn(launch, block, true);
  if (same_call(launch, block, turn) && barrier(launch, block, kStart, turn))
    end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
