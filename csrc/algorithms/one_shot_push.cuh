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
  const SenderSlots slots(launch, reduce.world(), 0, 1, reduce.packet_tag(launch, 0));
  const LaunchState state = begin_launch(launch, block, false);
  const Outgoing outgoing(reduce, block, partition, reinterpret_cast<const u8 *>(launch.input), bytes);
  const Recipients<Reduce::kRanks> recipients(launch, reduce.world());
  const bool goes_on = may_exchange<Reduce::compares>(launch, block, state);
  if (Reduce::compares && !goes_on)
    return;
  const Tag tag = reduce.packet_tag(launch, state.epoch);
  const u64 first = slots.of(state.epoch);
  outgoing.for_each(
      goes_on, [&](Index i, const Pack &pack) { recipients.send(first + u64(i) * sizeof(Slot), pack, tag); });
  FA_STAMP(kSent);
  advance_after_sending(launch, block, state, false);
  if (goes_on)
    reduce.packets(launch, block, state.epoch, 0, 1, partition, partition.all(bytes), bytes,
                   epilogue.into(Store(reinterpret_cast<u8 *>(launch.output))));
  FA_STAMP(kReduced);
  // After a failure the host does not run the epilogue: what is at the output need not be sums. On GPUs the
  // threads of a block would have to agree on it.
#if !FA_CUDA
  if (!has_failed(launch))
#endif
    epilogue.finish(launch, block, partition, bytes, 1);
  end_push(launch, block, state, false);
}

} // namespace FA_NAMESPACE
