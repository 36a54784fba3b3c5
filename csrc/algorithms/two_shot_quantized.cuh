// Two-shot with quantised transport: slices of the input go quantised into their owners' staging, and each
// owner's sum, quantised again, into everybody's.
//
//   quantise slices -> owners' staging | start barrier | sum own slice -> all staging | second barrier |
//   dequantise all slices
//
// Bytes are pushed, as links take posted writes better than reads, and by plain stores, which use more of a
// link than packets do. Whose staging a rank writes does not matter: nobody writes a generation again before
// everybody has finished the pull that used it (core/region.cuh), and barriers order all that is read, as in
// a two-shot pull (lab/litmus/programs/protocol/two_shot.litmus, staging_reuse.litmus).
//
// An owner quantises its own part as the others do theirs, and has the sum from what it sends: so a result
// depends neither on who owns it nor on the number of slices, and all ranks have the same.
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
  const auto place = [&](u32 owner, QuantizedPart part, u32 from) {
    return quantized_at(staging(launch, owner, state), ranks, part, from, slices.each);
  };
  const bool complete = run_phases(
      launch, block, ranks, state, [] {}, [](BarrierStage, u32, const Arrival &) { return Failure{}; },
      [&](u32 phase) {
        if (phase == 1) {
          transport.sum(
              block, slices, slices.of(rank), [&](u32 r) { return place(rank, kQuantizedInputs, r); },
              [&](u32 r) { return place(r, kQuantizedSums, rank); });
          return true;
        }
        FA_ROLL
        for (u32 step = 0; step < ranks; ++step) {
          // Each rank writes to one peer at a time, a different one from its peers.
          const u32 r = (rank + step) % ranks;
          if (phase == 0)
            transport.quantize(block, slices, slices.of(r), place(r, kQuantizedInputs, rank));
          else
            transport.dequantize(block, slices, slices.of(r), place(rank, kQuantizedSums, r));
        }
        return phase < 2;
      });
  if (!complete)
    return;
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
