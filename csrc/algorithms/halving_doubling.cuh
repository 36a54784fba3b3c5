// Allreduce by recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner and Gropp, "Optimization of
// collective communication operations in MPICH", 2005): in each of log2(world) exchanges a rank halves the
// range of packs that it reduces; in as many further exchanges it doubles the range of which it has the
// result.
//
// Ranks beyond the largest power of two fold in: each sends its whole input to a partner below, and finally
// receives the result from it. All data goes as packets. A pair of ranks exchanges at most twice, each time
// through separate slots. Partial sums are stored in the output, as elements of the type. So the results have
// different bits from those of the direct algorithms, but the same on all ranks and in every run, since each
// pack is reduced by one rank.
//
// One thread handles a pack in all exchanges, whatever range the pack is in, so no sync is needed between
// exchanges. Every rank hears from all, because each result depends on all inputs; the two generations of
// mailboxes rely on that.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"

namespace FA_NAMESPACE {

// Returns the packs that a rank reduces after the exchanges with partners at distances `ranks` / 2 down to
// `distance`.
FA_FN Span halved(Index packs, u32 rank, u32 ranks, u32 distance) {
  Index first = 0, last = packs;
  for (u32 d = ranks / 2; d >= distance && d > 0; d /= 2) {
    const Index middle = first + (last - first) / 2;
    if ((rank & d) == 0)
      last = middle;
    else
      first = middle;
  }
  return {first, last - first};
}

// The exchanges of one block: where its packs are sent from and stored, and whether all have come so far.
template <class Reduce, class Block>
class HalvingDoubling {
public:
  FA_FN HalvingDoubling(const FaLaunch &launch, const Block &block, const Reduce &reduce, u32 epoch)
      : launch_(launch), block_(block), reduce_(reduce), epoch_(epoch), tag_(packet_tag(launch, epoch)),
        bytes_(message_bytes(launch)), input_(reinterpret_cast<const u8 *>(launch.input)),
        output_(reinterpret_cast<u8 *>(launch.output)) {
    const u64 addresses = launch.input | launch.output;
    vector_ = pack_aligned(addresses);
    granule_ = granule_of(addresses | bytes_);
  }

  FA_FN Span all() const { return all_packs(bytes_); }
  FA_FN const u8 *input() const { return input_; }

  // Switches from the input to the partial sums, after the first exchange.
  FA_FN const u8 *sums() {
    has_sums_ = true;
    return output_;
  }

  // Sends a span of `from`, unless something that it depends on has not come. A pair uses section 0 for
  // partial sums, and section 1 for results.
  FA_FN void send(const u8 *from, Span span, u32 to, u32 section) const {
    Slot *slots = slots_of(launch_, reduce_.world(), to, epoch_, section, 2, launch_.rank);
    each(span, [&](u64 at, Index i, auto extent) {
      if (complete_)
        store_packet(slots + (i - span.first), mine_of(from + at, extent), tag_);
    });
  }

  // Receives a span. In section 0 it is added to the span of `mine`, the lower rank's first; `whole`: the sum
  // then includes all ranks. In section 1 it is a result. If `from` is this rank itself, which sends nothing,
  // only `mine` is reduced.
  FA_FN void receive(const u8 *mine, Span span, u32 from, u32 section, bool whole) {
    const Slot *slots = own_slots_of(launch_, reduce_.world(), epoch_, section, 2, from);
    each(span, [&](u64 at, Index i, auto extent) {
      Pack pack = {};
      complete_ = complete_ &&
                  (from == launch_.rank || wait_packet(launch_, slots + (i - span.first), from, tag_, &pack));
      if (!complete_)
        return;
      if (section == 0) {
        const Pack ours = mine_of(mine + at, extent);
        const bool last = from <= launch_.rank;
        pack = reduce_.packs(select_pack(last, pack, ours), select_pack(last, ours, pack),
                             from == launch_.rank, whole);
      }
      store(output_ + at, pack, extent, granule_);
    });
  }

private:
  const FaLaunch &launch_;
  const Block &block_;
  const Reduce &reduce_;
  u32 epoch_;
  Tag tag_;
  u64 bytes_;
  const u8 *input_;
  u8 *output_;
  u32 granule_;
  bool vector_;
  bool complete_ = true;
  bool has_sums_ = false;

  template <class Extent>
  FA_FN Pack mine_of(const u8 *from, Extent extent) const {
    return has_sums_ ? load(from, extent, granule_) : reduce_.own(from, extent, granule_);
  }

  template <class Body>
  FA_FN void each(Span span, Body body) const {
    block_.for_each_within(packs_of(bytes_), span.first, span.first + span.length,
                           [&](Index i) { with_extent(i, bytes_, vector_, body); });
  }
};

template <class Reduce, class Block>
FA_FN void halving_doubling(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const LaunchState state = begin_launch(launch, block, false);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  const u32 rank = launch.rank, ranks = reduce.world();
  u32 paired = 1, exchanges = 0; // the largest power of two, and its logarithm
  for (; paired * 2 <= ranks; paired *= 2)
    ++exchanges;
  const u32 folded = ranks - paired;
  HalvingDoubling<Reduce, Block> exchange(launch, block, reduce, state.epoch);

  // Round 0 folds in, the last round folds out. In between, the ranks below `paired` halve, then double.
  const Span all = exchange.all(), none = {0, 0};
  const u8 *mine = exchange.input();
  FA_NO_UNROLL
  for (u32 round = 0; round <= 2 * exchanges + 1; ++round) {
    const u32 section = round > exchanges;
    u32 partner;
    Span sent = none, received = none;
    bool whole = false;
    if (ranks == 1 && round == 0) {
      // There is no other rank; an average divides by 1.
      partner = rank;
      received = all;
      whole = true;
    } else if (round == 0 || round == 2 * exchanges + 1) {
      const bool above = rank >= paired;
      if (!above && rank >= folded)
        continue;
      partner = above ? rank - paired : rank + paired;
      ((section == 0) == above ? sent : received) = all;
    } else if (rank >= paired) {
      continue;
    } else {
      const u32 distance = section == 0 ? paired >> round : 1u << (round - exchanges - 1);
      partner = rank ^ distance;
      whole = distance == 1;
      const Span ours = halved(all.length, rank, paired, distance);
      const Span theirs = halved(all.length, partner, paired, distance);
      sent = section == 0 ? theirs : ours;
      received = section == 0 ? ours : theirs;
    }
    exchange.send(mine, sent, partner, section);
    exchange.receive(mine, received, partner, section, whole);
    if (rank < paired)
      mine = exchange.sums();
  }
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
