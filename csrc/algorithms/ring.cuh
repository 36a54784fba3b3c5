// Ring allreduce: a reduce-scatter and an all-gather in which a rank receives from its left neighbour only,
// and sends to its right neighbour only (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
// clusters of workstations", 2009). Every link carries 2 (world - 1) / world of the message, whatever the
// topology.
//
// All data goes as packets, so each pack of a slice is passed on as soon as it comes. In step s a rank
// handles slice rank - s: in step 0 that of its own input, later the one that its left neighbour handled in
// step s - 1. It adds its own elements until step world - 1, in which a slice is complete; later steps pass
// results on. Partial sums travel as elements of the type. So the results have different bits from those of
// the direct algorithms, but the same on all ranks and in every run.
//
// Every step has separate slots. Every rank hears from all, because each result that it ends with has been
// through all of them; the two generations of mailboxes rely on that.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"

namespace FA_NAMESPACE {

// Returns the slice that starts at rank r. It determines the order in which a pack's elements are added.
FA_FN Span ring_slice(Index packs, u32 world, u32 r) {
  // packs * r / world, by divisions of narrow numbers.
  const Index each = packs / world;
  const u32 rest = u32(packs % world), before = rest * r / world;
  return {each * r + before, each + (rest * (r + 1) / world - before)};
}

template <class Reduce, class Block>
FA_FN void ring(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const LaunchState state = begin_launch(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 epoch = state.epoch, rank = launch.rank, ranks = reduce.world();
  const Tag tag = packet_tag(launch, epoch);
  const u32 left = (rank + ranks - 1) % ranks, right = (rank + 1) % ranks;
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  const bool vector = pack_aligned(launch.input | launch.output);
  const u64 bytes = reduce.message_bytes(launch);
  const Index packs = packs_of(bytes);
  const u32 granule = granule_of(launch.input | launch.output | bytes);
  const u32 whole = ranks - 1, last = 2 * whole, sections = last > 0 ? last : 1;

  bool complete = true;
  FA_ROLL
  for (u32 step = 0; step <= last; ++step) {
    const Span slice = ring_slice(packs, ranks, (rank + 2 * ranks - step) % ranks);
    const Slot *from = slots_of(launch, ranks, rank, epoch, step > 0 ? step - 1 : 0, sections, left);
    Slot *to = slots_of(launch, ranks, right, epoch, step, sections, rank);
    for_each_pack(block, slice, bytes, vector, [&](u64 at, Index i, auto extent) {
      Pack pack = {};
      complete = complete && (step == 0 || wait_packet(launch, from + (i - slice.first), left, tag, &pack));
      if (!complete)
        return;
      if (step <= whole) {
        const Pack own = reduce.own(input + at, extent, granule);
        pack = reduce.packs(pack, own, step == 0, step == whole);
      }
      if (step < last)
        store_packet(to + (i - slice.first), pack, tag);
      if (step >= whole)
        store(output + at, pack, extent, granule);
    });
  }
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
