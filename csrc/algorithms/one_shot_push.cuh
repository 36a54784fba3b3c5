// One-shot push: every rank sends its input as packets into every peer's mailbox, waits for the packets in
// its own, and reduces everything. No barrier, any input pointer.
//
// Two generations are enough: a rank reaches epoch e + 2 only after every peer has sent e + 1, hence
// finished e and with it read this generation.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void one_shot_push(const FaLaunch &launch, Block &block, const Reduce &reduce,
                         const Epilogue &epilogue = {}) {
  const LaunchState state = begin_launch(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 ranks = reduce.world();
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const Tag tag = reduce.packet_tag(launch, state.epoch);
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  const u32 granule = granule_of(launch.input | bytes);
  for_each_pack(
      block, partition.all(bytes), bytes, pack_aligned(launch.input),
      [&](u64 at, Index i, auto extent) {
        send_to_all(launch, ranks, state.epoch, 0, 1, i, reduce.own(input + at, extent, granule), tag);
      },
      partition);
  reduce.packets(launch, block, state.epoch, 0, 1, partition, partition.all(bytes), bytes,
                 epilogue.into(Store(reinterpret_cast<u8 *>(launch.output))));
  epilogue.finish(launch, block, partition, bytes, 1);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
