// Two-shot push: slices go to their owners as packets; each owner reduces its slice and sends the result to
// everybody as packets. No barrier, any input pointer, each link crossed by 2/world of the message.
//
// A peer whose slice is empty sends no results, yet every rank still hears of it: the owners of other slices
// have its packets before they send theirs.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/packets.cuh"

namespace FA_NAMESPACE {

template <class Reduce, class Block>
FA_FN void two_shot_push(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  constexpr u32 kInputs = 0, kResults = 1, kParts = 2;
  const Turn turn = begin_turn(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, turn))
    return;
  const u32 rank = launch.rank, ranks = reduce.world();
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  const u64 bytes = message_bytes(launch), packs = packs_of(bytes);
  FA_ROLL
  for (u32 step = 1; step < ranks; ++step) {
    // Each rank writes to one peer at a time, a different one from its peers.
    const u32 r = (rank + step) % ranks;
    send_packets<typename Reduce::Packs>(launch, block, reinterpret_cast<const u8 *>(launch.input),
                                         slice_of(packs, ranks, r), bytes,
                                         slots_of(launch, r, turn.epoch, kInputs, kParts, rank), turn.epoch);
  }

  const Span own = slice_of(packs, ranks, rank);
  bool complete = reduce.packets(launch, block, turn.epoch, kInputs, kParts, own, bytes,
                                 StoreAndSend(output, launch, turn.epoch, kResults, kParts, own.first));
  FA_ROLL
  for (u32 step = 1; step < ranks && complete; ++step) {
    const u32 r = (rank + step) % ranks;
    complete = receive_packets<typename Reduce::Packs>(
        launch, block, output, slice_of(packs, ranks, r), bytes,
        slots_of(launch, rank, turn.epoch, kResults, kParts, r), r, turn.epoch);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
