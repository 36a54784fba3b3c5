// Two-shot push: slices are sent to their owners as packets; each owner reduces its slice and sends the
// result to every rank as packets. There is no barrier, the input may be at any address, and each link
// carries 2/world of the message.
//
// A peer whose slice is empty sends no results, yet every rank still hears from it: the owners of other
// slices wait for its packets before they send theirs.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/epilogue.cuh"

namespace FA_NAMESPACE {

template <class Epilogue = Plain, class Reduce, class Block>
FA_FN void two_shot_push(const FaLaunch &launch, Block &block, const Reduce &reduce,
                         const Epilogue &epilogue = {}) {
  const u32 ranks = reduce.world();
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = epilogue.partition(launch, reduce);
  const auto slices = partition.slices(bytes, ranks);
  const LaunchState state = begin_launch(launch, block, false);
  using Partition = decltype(epilogue.partition(launch, reduce));
  OutgoingSlices<Reduce, Block, Partition> outgoing(launch, reduce, block, partition, slices, bytes);
  const Recipients<Reduce::kRanks> recipients(launch, ranks);
  const bool goes_on = may_exchange<Reduce::compares>(launch, block, state);
  if (Reduce::compares && !goes_on)
    return;
  outgoing.send(goes_on, recipients, state.epoch, reduce.packet_tag(launch, state.epoch));
  FA_STAMP(kSent);
  advance_after_sending(launch, block, state, true);
  if (goes_on)
    reduce.slices(launch, block, state.epoch, epilogue, partition, slices, bytes,
                  reinterpret_cast<u8 *>(launch.output), recipients, outgoing);
  FA_STAMP(kReduced);
  // After a failure the host does not run the epilogue: what is at the output need not be sums. On GPUs the
  // threads of a block would have to agree on it.
#if !FA_CUDA
  if (!has_failed(launch))
#endif
    epilogue.finish(launch, block, partition, bytes, ranks);
  end_push(launch, block, state, true);
}

} // namespace FA_NAMESPACE
