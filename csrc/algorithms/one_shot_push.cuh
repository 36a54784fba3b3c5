// One-shot push: every rank sends its input as packets to every peer's mailbox, waits for the packets in its
// own, and reduces the whole message. There is no barrier, and the input may be at any address.
//
// Two generations suffice: a rank reaches epoch e + 2 only after every peer has sent e + 1, and hence has
// finished e, including its reads of this generation.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void one_shot_push(const FaLaunch &launch, Block &block, const Reduce &reduce,
                         const Epilogue &epilogue = {}) {
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const Outgoing outgoing(reduce, block, partition, reinterpret_cast<const u8 *>(launch.input), bytes);
  const LaunchState state = begin_launch(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const Tag tag = reduce.packet_tag(launch, state.epoch);
  outgoing.for_each([&](Index i, const Pack &pack) {
    send_to_all<Reduce::kRanks>(launch, reduce.world(), state.epoch, 0, 1, i, pack, tag);
  });
  FA_STAMP(kSent);
  reduce.packets(launch, block, state.epoch, 0, 1, partition, partition.all(bytes), bytes,
                 epilogue.into(Store(reinterpret_cast<u8 *>(launch.output))));
  FA_STAMP(kReduced);
  epilogue.finish(launch, block, partition, bytes, 1);
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
