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

#include "../core/packet.cuh"
#include "../core/reduce.cuh"

namespace FA_NAMESPACE {

// The packs that a rank reduces after the exchanges with the partners at distances `ranks` / 2 down to
// `distance`.
FA_FN Span halved(u64 packs, u32 rank, u32 ranks, u32 distance) {
  u64 first = 0, last = packs;
  for (u32 d = ranks / 2; d >= distance && d > 0; d /= 2) {
    const u64 middle = first + (last - first) / 2;
    if ((rank & d) == 0)
      last = middle;
    else
      first = middle;
  }
  return {first, last - first};
}

// Exchanges of one block: what its packs are sent from and to, and whether all have come so far.
template <class T, class Block, class Op>
class HalvingDoubling {
public:
  FA_FN HalvingDoubling(const FaLaunch &launch, const Block &block, Op op, u32 ranks, u32 epoch)
      : launch_(launch), block_(block), op_(op), ranks_(ranks), epoch_(epoch),
        tag_(packet_tag(launch, epoch)), packs_(packs_of<T>(launch.count)),
        input_(reinterpret_cast<const T *>(launch.input)), output_(reinterpret_cast<T *>(launch.output)) {
    vector_ = pack_aligned(input_) && pack_aligned(output_);
  }

  FA_FN Span all() const { return {0, packs_}; }
  FA_FN const T *input() const { return input_; }
  FA_FN const T *output() const { return output_; }

  // Sends a span of `from`, unless something has not come that would be in it. A pair meets in `part` 0 on
  // the way to the sums, in part 1 on the way back.
  FA_CALL void send(const T *from, Span span, u32 to, u32 part) const {
    Slot *slots = slots_of(launch_, to, epoch_, part, 2, launch_.rank);
    each(span, [&](u64 offset, u64 i, auto extent) {
      if (complete_)
        store_packet(slots + (i - span.first), load(from + offset, extent), tag_);
    });
  }

  // Adds what a peer sent to a span of `mine`, the lower rank's first; `whole`: now all ranks' are in it.
  FA_CALL void add(const T *mine, Span span, u32 from, bool whole) {
    receive(span, from, 0, [&](u64 offset, const Pack<T> &theirs, auto extent) {
      const Pack<T> ours = load(mine + offset, extent);
      Reduction<T, Op> reduction(op_, ranks_);
      reduction.add(from < launch_.rank ? theirs : ours);
      reduction.add(from < launch_.rank ? ours : theirs);
      store(output_ + offset, reduction.finish(whole), extent);
    });
  }

  // Takes a span of results.
  FA_CALL void take(Span span, u32 from) {
    receive(span, from, 1,
            [&](u64 offset, const Pack<T> &pack, auto extent) { store(output_ + offset, pack, extent); });
  }

  // The input of a world of one.
  FA_CALL void keep() const {
    each(all(), [&](u64 offset, u64, auto extent) {
      Reduction<T, Op> reduction(op_, 1);
      reduction.add(load(input_ + offset, extent));
      store(output_ + offset, reduction.finish(), extent);
    });
  }

private:
  const FaLaunch &launch_;
  const Block &block_;
  Op op_;
  u32 ranks_, epoch_;
  Tag tag_;
  u64 packs_;
  const T *input_;
  T *output_;
  bool vector_;
  bool complete_ = true;

  template <class Body>
  FA_FN void each(Span span, Body body) const {
    block_.for_each_within(packs_, span.first, span.first + span.length,
                           [&](u64 i) { with_extent<T>(i, launch_.count, vector_, body); });
  }

  template <class Body>
  FA_FN void receive(Span span, u32 from, u32 part, Body body) {
    const Slot *slots = slots_of(launch_, launch_.rank, epoch_, part, 2, from);
    each(span, [&](u64 offset, u64 i, auto extent) {
      Pack<T> pack;
      complete_ = complete_ && wait_packet(launch_, slots + (i - span.first), from, tag_, &pack);
      if (complete_)
        body(offset, pack, extent);
    });
  }
};

template <class T, class Block, class Op, class WorldT>
FA_FN void halving_doubling(const FaLaunch &launch, Block &block, Op op, WorldT world) {
  const Turn turn = begin_turn(launch, block, false);
  if (!same_call(launch, block, turn))
    return;
  const u32 rank = launch.rank, ranks = world.size();
  u32 paired = 1; // the largest power of two
  while (paired * 2 <= ranks)
    paired *= 2;
  const u32 folded = ranks - paired;
  HalvingDoubling<T, Block, Op> exchange(launch, block, op, ranks, turn.epoch);

  if (rank >= paired) {
    exchange.send(exchange.input(), exchange.all(), rank - paired, 0);
    exchange.take(exchange.all(), rank - paired);
  } else if (ranks == 1) {
    exchange.keep();
  } else {
    const T *mine = exchange.input();
    if (rank < folded) {
      exchange.add(mine, exchange.all(), rank + paired, false);
      mine = exchange.output();
    }
    for (u32 distance = paired / 2; distance > 0; distance /= 2) {
      const u32 partner = rank ^ distance;
      exchange.send(mine, halved(exchange.all().length, partner, paired, distance), partner, 0);
      exchange.add(mine, halved(exchange.all().length, rank, paired, distance), partner, distance == 1);
      mine = exchange.output();
    }
    for (u32 distance = 1; distance < paired; distance *= 2) {
      const u32 partner = rank ^ distance;
      exchange.send(exchange.output(), halved(exchange.all().length, rank, paired, distance), partner, 1);
      exchange.take(halved(exchange.all().length, partner, paired, distance), partner);
    }
    if (rank < folded)
      exchange.send(exchange.output(), exchange.all(), rank + paired, 1);
  }
  end_turn(launch, block, turn);
}

} // namespace FA_NAMESPACE
