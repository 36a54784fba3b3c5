// Allreduce by recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner and Gropp, "Optimization of
// collective communication operations in MPICH", 2005): log2(world) exchanges in which a rank halves the
// range of packs that it reduces, then as many in which it doubles the range that it has the result of.
//
// The ranks beyond the largest power of two fold in: each sends its whole input to a partner below, and has
// the result from it in the end. It goes by packets; a pair of ranks meets at most twice, and each time has
// slots of its own. Partial sums are kept in the output, as elements of the type: results do not have the
// bits of the direct algorithms, but the same ones on all ranks and in every run, since each pack is reduced
// by one rank.
//
// One thread does all that is done with a pack, whatever range the pack is in: there is no sync between the
// exchanges. Every rank hears from all, as each result depends on all inputs. That is what the two
// generations of mailboxes need.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"

namespace FA_NAMESPACE {

// The packs that a rank reduces after the exchanges with the partners at distances `ranks` / 2 down to
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

// Exchanges of one block: what its packs are sent from and to, and whether all have come so far.
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

  // What it has instead after an exchange: sums.
  FA_FN const u8 *sums() {
    has_sums_ = true;
    return output_;
  }

  // Sends a span of `from`, unless something has not come that would be in it. A pair meets in `part` 0 on
  // the way to the sums, in part 1 on the way back.
  FA_FN void send(const u8 *from, Span span, u32 to, u32 part) const {
    Slot *slots = slots_of(launch_, reduce_.world(), to, epoch_, part, 2, launch_.rank);
    each(span, [&](u64 at, Index i, auto extent) {
      if (complete_)
        store_packet(slots + (i - span.first), mine_of(from + at, extent), tag_);
    });
  }

  // Receives a span. In part 0 it is added to that of `mine`, the lower rank's first; `whole`: now all ranks'
  // are in it. In part 1 it is a result. From this rank itself, which sends nothing, there is only `mine`.
  FA_FN void receive(const u8 *mine, Span span, u32 from, u32 part, bool whole) {
    const Slot *slots = slots_of(launch_, reduce_.world(), launch_.rank, epoch_, part, 2, from);
    each(span, [&](u64 at, Index i, auto extent) {
      Pack pack = {};
      complete_ = complete_ &&
                  (from == launch_.rank || wait_packet(launch_, slots + (i - span.first), from, tag_, &pack));
      if (!complete_)
        return;
      if (part == 0) {
        const Pack ours = mine_of(mine + at, extent);
        const bool last = from <= launch_.rank;
        pack = reduce_.packs(either(last, pack, ours), either(last, ours, pack), from == launch_.rank, whole);
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

  // Round 0 folds in, the last one folds out; in between ranks below `paired` halve, then double.
  const Span all = exchange.all(), none = {0, 0};
  const u8 *mine = exchange.input();
  FA_ROLL
  for (u32 round = 0; round <= 2 * exchanges + 1; ++round) {
    const u32 part = round > exchanges;
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
      ((part == 0) == above ? sent : received) = all;
    } else if (rank >= paired) {
      continue;
    } else {
      const u32 distance = part == 0 ? paired >> round : 1u << (round - exchanges - 1);
      partner = rank ^ distance;
      whole = distance == 1;
      const Span ours = halved(all.length, rank, paired, distance);
      const Span theirs = halved(all.length, partner, paired, distance);
      sent = part == 0 ? theirs : ours;
      received = part == 0 ? ours : theirs;
    }
    exchange.send(mine, sent, partner, part);
    exchange.receive(mine, received, partner, part, whole);
    if (rank < paired)
      mine = exchange.sums();
  }
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
