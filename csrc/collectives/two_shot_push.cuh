// Two-shot push: slices go to their owners as packets; each owner reduces its slice and sends the result to
// everybody as packets. No barrier, any input pointer, each link crossed by 2/world of the message.
//
// A peer whose slice is empty sends no results, yet every rank still hears of it: the owners of other slices
// have its packets before they send theirs.
#pragma once

#include "../core/packet.cuh"
#include "../core/reduce.cuh"

namespace FA_NAMESPACE {

template <class T, class Block, class Op, class WorldT>
FA_FN void two_shot_push(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  constexpr u32 kInputs = 0, kResults = 1, kParts = 2;
  const Turn turn = begin_turn(launch, block, false);
  if (!same_call(launch, block, turn))
    return;
  const u32 epoch = turn.epoch;
  const Tag tag = packet_tag(launch, epoch);
  const u32 rank = launch.rank, ranks = world.size();
  const T *input = reinterpret_cast<const T *>(launch.input);
  T *output = reinterpret_cast<T *>(launch.output);
  const u64 packs = packs_of<T>(launch.count);

  for (u32 step = 1; step < ranks; ++step) {
    // Each rank writes to one peer at a time, a different one from its peers.
    const u32 r = (rank + step) % ranks;
    const Span slice = slice_of(packs, ranks, r);
    Slot *slots = slots_of(launch, r, epoch, kInputs, kParts, rank);
    for_each_pack<T>(block, slice, launch.count, pack_aligned(input), [&](u64 offset, u64 i, auto extent) {
      store_packet(slots + (i - slice.first), load(input + offset, extent), tag);
    });
  }

  bool complete = true;
  const Span own = slice_of(packs, ranks, rank);
  for_each_pack<T>(block, own, launch.count, pack_aligned(input) && pack_aligned(output),
                   [&](u64 offset, u64 i, auto extent) {
                     if (!complete)
                       return;
                     Reduction<T, Op> reduction(op, ranks);
                     for_each_rank(world, [&](u32 r) {
                       Pack<T> pack;
                       if (r == rank) {
                         pack = load(input + offset, extent);
                       } else {
                         const Slot *slots = slots_of(launch, rank, epoch, kInputs, kParts, r);
                         complete = complete && wait_packet(launch, slots + (i - own.first), r, tag, &pack);
                       }
                       reduction.add(pack);
                     });
                     if (!complete)
                       return;
                     const Pack<T> result = reduction.finish();
                     for_each_rank(world, [&](u32 r) {
                       Slot *slots = slots_of(launch, r, epoch, kResults, kParts, rank);
                       if (r != rank)
                         store_packet(slots + (i - own.first), result, tag);
                     });
                     store(output + offset, result, extent);
                   });

  for (u32 step = 1; step < ranks; ++step) {
    const u32 r = (rank + step) % ranks;
    const Span slice = slice_of(packs, ranks, r);
    const Slot *slots = slots_of(launch, rank, epoch, kResults, kParts, r);
    for_each_pack<T>(block, slice, launch.count, pack_aligned(output), [&](u64 offset, u64 i, auto extent) {
      Pack<T> pack;
      complete = complete && wait_packet(launch, slots + (i - slice.first), r, tag, &pack);
      if (complete)
        store(output + offset, pack, extent);
    });
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
