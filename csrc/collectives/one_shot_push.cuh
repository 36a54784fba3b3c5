// One-shot push: every rank sends its input as packets into every peer's mailbox, waits for the packets in
// its own, and reduces everything. No barrier, any input pointer.
//
// Two generations are enough: a rank reaches epoch e + 2 only after every peer has sent e + 1, hence
// finished e and with it read this generation.
#pragma once

#include "../core/packet.cuh"
#include "../core/reduce.cuh"

namespace FA_NAMESPACE {

template <class T, class Block, class Op, class WorldT>
FA_FN void one_shot_push(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = begin_turn(launch, block, false);
  if (!same_call(launch, block, turn))
    return;
  const u32 epoch = turn.epoch;
  const Tag tag = packet_tag(launch, epoch);
  const T *input = reinterpret_cast<const T *>(launch.input);
  T *output = reinterpret_cast<T *>(launch.output);
  const Span all = {0, packs_of<T>(launch.count)};

  for_each_pack<T>(block, all, launch.count, pack_aligned(input), [&](u64 offset, u64 i, auto extent) {
    const Pack<T> pack = load(input + offset, extent);
    for_each_rank(world, [&](u32 r) {
      if (r != launch.rank)
        store_packet(slots_of(launch, r, epoch, 0, 1, launch.rank) + i, pack, tag);
    });
  });

  bool complete = true;
  for_each_pack<T>(block, all, launch.count, pack_aligned(input) && pack_aligned(output),
                   [&](u64 offset, u64 i, auto extent) {
                     if (!complete)
                       return;
                     Reduction<T, Op> reduction(op, world.size());
                     for_each_rank(world, [&](u32 r) {
                       Pack<T> pack;
                       if (r == launch.rank) {
                         pack = load(input + offset, extent);
                       } else {
                         const Slot *slot = slots_of(launch, launch.rank, epoch, 0, 1, r) + i;
                         complete = complete && wait_packet(launch, slot, r, tag, &pack);
                       }
                       reduction.add(pack);
                     });
                     if (complete)
                       store(output + offset, reduction.finish(), extent);
                   });
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
