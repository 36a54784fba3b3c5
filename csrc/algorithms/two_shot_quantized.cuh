// Two-shot with quantised transport: slices of the input are quantised into their owners' staging, and each
// owner's sum, quantised again, into all ranks' staging.
//
//   quantise slices -> owners' staging | start barrier | sum own slice -> all staging | second barrier
//   | dequantise all slices
//
// Bytes are pushed, because links handle posted writes better than reads, and by plain stores, which use a
// link better than packets do. It does not matter whose staging a rank writes: no rank writes a generation
// again before all have finished the pull that used it (core/region.cuh), and barriers order everything that
// is read, as in a two-shot pull (lab/litmus/programs/pulls/two_shot.litmus, staging_reuse.litmus).
//
// An owner quantises its own part like the other ranks, and dequantises its own sum. So the result depends
// neither on the owner nor on the number of slices, and is the same on all ranks.
#pragma once

#include "../core/barrier.cuh"
#include "../core/quantized_layout.cuh"

namespace FA_NAMESPACE {

template <class Transport, class Block>
FA_FN void two_shot_quantized(const FaLaunch &launch, Block &block, const Transport &transport) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call(launch, block, state))
    return;
  const u32 rank = launch.rank, ranks = launch.world;
  const Slices slices(groups_of(launch.count), ranks);
  const auto groups_at = [&](u32 owner, QuantizedSection section, u32 from) {
    return quantized_at(staging(launch, owner, state), ranks, section, from, slices.each);
  };
  const bool complete = run_phases(
      launch, block, ranks, state, [] {}, [](BarrierStage, u32, const Arrival &) { return Failure{}; },
      [&](u32 phase) {
        if (phase == 1) {
          transport.sum(
              block, slices, slices.of(rank), [&](u32 r) { return groups_at(rank, kQuantizedInputs, r); },
              [&](u32 r) { return groups_at(r, kQuantizedSums, rank); });
          return true;
        }
        FA_ROLL
        for (u32 step = 0; step < ranks; ++step) {
          // Each rank writes to one peer at a time, a different one from its peers.
          const u32 r = (rank + step) % ranks;
          if (phase == 0)
            transport.quantize(block, slices, slices.of(r), groups_at(r, kQuantizedInputs, rank));
          else
            transport.dequantize(block, slices, slices.of(r), groups_at(rank, kQuantizedSums, r));
        }
        return phase < 2;
      });
  if (!complete)
    return;
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
