// One-shot push: every rank sends its input as packets into every peer's mailbox, waits for the packets in
// its own, and reduces everything. No barrier, any input pointer.
//
// Two generations are enough: a rank reaches epoch e + 2 only after every peer has sent e + 1, hence
// finished e and with it read this generation.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Reduce, class Block>
FA_FN void one_shot_push(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const Turn turn = begin_turn(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, turn))
    return;
  const u64 bytes = message_bytes(launch);
  const Span all = {0, packs_of(bytes)};
  send_to_all<typename Reduce::Packs>(launch, block, reduce.world(), turn.epoch, all, bytes);
  reduce.packets(launch, block, turn.epoch, 0, 1, all, bytes, Store(reinterpret_cast<u8 *>(launch.output)));
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
