// Reductions of a GPU's algorithms: pack by pack, each in the registers of a thread.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../reduce/reduction.cuh"
#include "../sinks/epilogue.cuh"
#include "../sinks/packets.cuh"
#include "integers.cuh"
#include "peer_packets.cuh"

namespace FA_NAMESPACE {

// The number of ranks, known to the compiler (the hot set) or not.
template <u32 W>
struct StaticWorldSize {
  static constexpr bool known = true;
  FA_FN constexpr u32 size() const { return W; }
};
// Batch: number of ranks whose packs are loaded before the first is used.
template <u32 Batch>
struct DynamicWorldSize {
  static constexpr bool known = false;
  u32 ranks;
  FA_FN constexpr u32 size() const { return ranks; }
};
using AnyWorldSize = DynamicWorldSize<1>;
template <u32 W>
FA_FN WholePackPartition<W> partition_of(StaticWorldSize<W>) {
  return {};
}
template <u32 Batch>
FA_FN PackPartition partition_of(DynamicWorldSize<Batch>) {
  return {};
}

template <u32 W>
constexpr u32 ranks_of(StaticWorldSize<W>) {
  return W;
}
template <u32 Batch>
constexpr u32 ranks_of(DynamicWorldSize<Batch>) {
  return 0;
}
template <u32 W>
constexpr u32 batch_of(StaticWorldSize<W>) {
  return W;
}
template <u32 Batch>
constexpr u32 batch_of(DynamicWorldSize<Batch>) {
  return Batch;
}

// Calls body(r) for r in 0..world, in order; unrolled when the number is known, so that indices are
// constants.
template <u32 W, class Body>
FA_FN void for_each_rank(StaticWorldSize<W>, Body body) {
  FA_UNROLL
  for (u32 r = 0; r < W; ++r)
    body(r);
}

template <class>
constexpr bool kIsF16 = false;
template <>
constexpr bool kIsF16<F16> = true;

// Whether a type stands for elements of any width, several of which are loaded as one.
template <class>
constexpr bool kIsAnyWidth = false;
template <>
constexpr bool kIsAnyWidth<AnyInteger> = true;

// Types whose sums are sent as sentinel packets: those of the hot set.
template <class>
constexpr bool kSendsSums = false;
#define FA_SENDS_SUMS(type, element, ...)                                                                    \
  template <>                                                                                                \
  constexpr bool kSendsSums<element> = true;
FA_HOT_TYPES(FA_SENDS_SUMS, )
#undef FA_SENDS_SUMS

template <class T>
FA_FN u64 bits_of(const Elements<T, 1> &element) {
  if constexpr (sizeof(T) == 1)
    return *reinterpret_cast<const u8 *>(&element);
  else if constexpr (sizeof(T) == 2)
    return *reinterpret_cast<const u16 *>(&element);
  else if constexpr (sizeof(T) == 4)
    return *reinterpret_cast<const u32 *>(&element);
  else
    return *reinterpret_cast<const u64 *>(&element);
}

// Reduces a partial pack of `bytes` bytes over the ranks' inputs: element by element, from the last to the
// first, as load_partial() does. An out-of-line function: one copy for all kernels of a type.
template <class T>
FA_OUTLINED Pack reduce_partial(AnyOp op, u32 world, Inputs inputs, u64 at, u32 bytes) {
  Pack pack = {};
  FA_NO_UNROLL
  for (u32 e = bytes; e > 0;) {
    e -= sizeof(T);
    Reduction<T, AnyOp, 1> reduction(op, world);
    FA_NO_UNROLL
    for (u32 r = 0; r < world; ++r)
      reduction.add(*reinterpret_cast<const Elements<T, 1> *>(inputs.at(r) + at + e));
    push_granule(&pack, bits_of<T>(reduction.finish()), sizeof(T));
  }
  return pack;
}

// A reader of inputs that are in memory as they are.
struct PlainInput {
  static constexpr bool kMayCompute = false;
};

// Reader: what reads this rank's input (readers/).
template <class T, class Op, class WorldSize, class Reader = PlainInput>
class Reduce {
  static constexpr u32 kLanes = kPackBytes / sizeof(T);
  using All = Elements<T, kLanes>;
  using One = Elements<T, 1>;

public:
  // 0: not known.
  static constexpr u32 kRanks = ranks_of(WorldSize{});
  static constexpr u32 kBatch = batch_of(WorldSize{});
  // Kernels for any number of ranks also take checked launches, and messages that are not whole packs at
  // aligned addresses, so that the hot set needs no code for either.
  static constexpr bool compares = !WorldSize::known;

  FA_FN Reduce(Op op, WorldSize world, Reader reader = {}) : op_(op), world_(world), reader_(reader) {}

  FA_FN u32 world() const { return world_.size(); }
  // The partition for results that are independent of each other.
  FA_FN auto partition() const { return partition_of(world_); }
  FA_FN u64 message_bytes(const FaLaunch &launch) const { return launch.count * element(); }

  // How the inputs of a launch are sent: the same in every kernel that a rank may choose for a call.
  FA_FN Tag packet_tag(const FaLaunch &launch, u32 epoch) const {
    return FA_NAMESPACE::packet_tag(launch, epoch, kSendsSums<T> && op_.code() == FA_SUM ? kTerms : kTagged);
  }

  // Whether this rank's input is premultiplied, or computed by the reader. Then only stage() and own() read
  // it, once.
  FA_FN bool computes_input() const {
    if constexpr (Reader::kMayCompute)
      return reader_.computes();
    else if constexpr (kPremultiplies)
      return op_.code() == FA_PREMUL_SUM;
    else
      return false;
  }

  // Copies a span of this rank's input to staging, or computes it there.
  template <class Block, class Partition>
  FA_FN void stage(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes,
                   Partition partition) const {
    if constexpr (kPremultiplies)
      stage_premultiplied(op_, block, to, from, span, bytes, partition);
    else if (!computes_input())
      copy(block, to, from, span, bytes, partition);
    else if constexpr (Reader::kMayCompute)
      // The last pack of staging is whole.
      partition.for_each(block, span, [&](Index i) {
        const u64 at = u64(span.first + i) * kPackBytes;
        store(to + at, reader_.pack(from + at, u32(min(bytes - at, u64(kPackBytes)))), Whole{}, 0);
      });
  }

  // A pack of this rank's input.
  template <class Extent>
  FA_FN Pack own(const u8 *from, Extent extent, u32 granule) const {
    if constexpr (Reader::kMayCompute) {
      if (reader_.computes())
        return reader_.pack(from, extent.bytes);
    }
    const Pack pack = load(from, extent, granule);
    if constexpr (kPremultiplies) {
      if (computes_input())
        return premultiplied_pack(op_, pack);
    }
    return pack;
  }

  // Reduces this block's share of a span over the ranks' inputs, into the sink. AtOnce: number of ranks whose
  // packs are loaded before the first is used, if it is more than a batch; not of integers.
  template <u32 AtOnce = 1, class Block, class Partition, class Sink>
  FA_FN void inputs(const FaLaunch &launch, Block &block, const Inputs &inputs, Partition partition,
                    Span span, u64 bytes, const Sink &sink) const {
    const bool vector = WorldSize::known || pack_aligned(inputs.addresses() | sink.addresses());
    const auto reduce = [&](u64 at, Index i, auto extent) {
      Pack result;
      if constexpr (WorldSize::known) {
        Pack packs[kRanks];
        for_each_rank(world_, [&](u32 r) { packs[r] = load(inputs.at(r) + at, Whole{}, 0); });
        result = reduce_ranks(packs);
      } else if (kIsAnyWidth<T> || extent.whole) {
        Reduction<T, Op, kLanes> reduction(op_, world());
        if constexpr (kIsAnyWidth<T>) {
          // Bytes beyond a partial pack are zero, and their results are not stored.
          FA_NO_UNROLL
          for (u32 r = 0; r < world(); ++r)
            reduction.add(elements<All>(load(inputs.at(r) + at, extent, element())));
        } else if constexpr (AtOnce > kBatch) {
          FA_NO_UNROLL
          for (u32 first = 0; first < world(); first += AtOnce) {
            // Where there is no rank, this rank's pack is loaded again and ignored.
            Pack packs[AtOnce];
            FA_UNROLL
            for (u32 k = 0; k < AtOnce; ++k)
              packs[k] = load(inputs.at(first + k < world() ? first + k : launch.rank) + at, Whole{}, 0);
            // One loop body for all: the first is added, and the others move down.
            const u32 loaded = min(AtOnce, world() - first);
            FA_NO_UNROLL
            for (u32 added = 0; added < loaded; ++added) {
              reduction.add(elements<All>(packs[0]));
              FA_UNROLL
              for (u32 k = 0; k + 1 < AtOnce; ++k)
                packs[k] = packs[k + 1];
            }
          }
        } else {
          FA_NO_UNROLL
          for (u32 first = 0; first < world(); first += kBatch) {
            Pack packs[kBatch];
            FA_UNROLL
            for (u32 k = 0; k < kBatch; ++k)
              packs[k] = load(inputs.at(rank_or(first + k, launch.rank)) + at, Whole{}, 0);
            add_batch(&reduction, first, packs);
          }
        }
        result = pack_of(reduction.finish());
      } else if constexpr (!kIsAnyWidth<T>) {
        result = reduce_partial<T>({op_.code(), launch.dtype, 0}, world(), inputs, at, extent.bytes);
      }
      sink.put(at, i, result, extent, element());
    };
    for_each_pack(block, span, bytes, vector, reduce, partition);
  }

  // Reduces this block's share of a span over the packets in `section` from all ranks, into the sink.
  // Returns false if not all came.
  template <class Block, class Partition, class Sink>
  FA_FN bool packets(const FaLaunch &launch, Block &block, u32 epoch, u32 section, u32 sections,
                     Partition partition, Span span, u64 bytes, const Sink &sink) const {
    const Tag tag = packet_tag(launch, epoch);
    const u32 sender_slots = slots_per_sender(launch, world());
    Slot *slots = own_slots_of(launch, world(), epoch, section, sections, 0, tag);
    bool complete = true;
    if constexpr (WorldSize::known) {
      PeerPackets<kRanks> peers(launch, slots + block.first(), sender_slots);
      FA_NO_UNROLL
      for (Index i = block.first(); i < span.length; i += block.stride()) {
        Pack packs[kRanks];
        const Index pack = span.first + i;
        if (!peers.wait(filled(own_input(launch, pack), kTerms), tag, packs))
          return false;
        sink.put(u64(pack) * kPackBytes, pack, reduce_ranks<kPushedWords>(packs), Whole{}, element());
        peers.next(block.stride());
      }
      return true;
    } else {
      const auto reduce = [&](u64 at, Index i, auto extent) {
        Slot *slot = slots + (i - span.first);
        Pack sum;
        complete = complete && packet(launch, slot, sender_slots, tag, &sum);
        if (complete)
          sink.put(at, i, sum, extent, element());
      };
      for_each_pack(block, span, bytes, pack_aligned(sink.addresses()), reduce, partition);
      return complete;
    }
  }

  // Sends a pack of a sum to `count` ranks from `rank` on, to offset `slot` of each region.
  FA_FN void send(const FaLaunch &launch, u64 slot, const Pack &pack, Tag tag, u32 rank, u32 count) const {
    const Pack sent = filled(pack, tag.marks);
    FA_NO_UNROLL
    for (u32 first = 0; first < count; first += kBatch)
      for_each_of_batch<kBatch>(first, count, [&](u32 k) {
        const u32 r = wrap_rank(rank + first + k, world());
        store_relaxed_pair_below(first + k, count, reinterpret_cast<u64 *>(launch.regions[r] + slot),
                                 sent.low(), sent.high());
      });
  }

  // Waits for one packet of each rank, empties them, and reduces them, in batches of ranks. Rank 0's is at
  // `slot`, the others at multiples of `distance`. Returns false if not all came.
  template <u32 Batch = kBatch>
  FA_FN bool packet(const FaLaunch &launch, Slot *slot, u32 distance, Tag tag, Pack *sum) const {
    Reduction<T, Op, kLanes> reduction(op_, world());
    FA_NO_UNROLL
    for (u32 first = 0; first < world(); first += Batch, slot += Batch * distance) {
      Pack packs[Batch];
      if (!wait_batch(launch, first, slot, distance, tag, packs))
        return false;
      for_each_of_batch<Batch>(first, world(), [&](u32 k) { reduction.add(elements<All>(packs[k])); });
    }
    *sum = pack_of(reduction.finish());
    return true;
  }

  // The second phase of a two-shot push: reduces this rank's slice, sends it, and stores all slices.
  template <class Epilogue, class Block, class Partition, class Slices, class Outgoing>
  FA_FN void slices(const FaLaunch &launch, Block &block, u32 epoch, const Epilogue &epilogue,
                    Partition partition, const Slices &slices, u64 bytes, u8 *output,
                    const Recipients<kRanks> &recipients, [[maybe_unused]] const Outgoing &outgoing) const {
    const Span own = slices.of(launch.rank);
    const Tag inputs = packet_tag(launch, epoch),
              results = FA_NAMESPACE::packet_tag(launch, epoch,
                                                 inputs.sentinel() && kKeepsSums<Epilogue> ? kSums : kTagged);
    const auto sink = epilogue.into(
        Packets<kRanks>(output, recipients, launch, world(), epoch, kResults, kSections, own.first, results));
    if constexpr (WorldSize::known) {
      static_assert(kKeepsSums<Epilogue>, "inputs and results have the same tags");
      // One loop body for the packets of both sections.
      Pack input = outgoing.own();
      FA_NO_UNROLL
      for (u32 section = kInputs; section < kSections; ++section) {
        const u32 sender_slots = slots_per_sender(launch, world());
        Slot *slots = own_slots_of(launch, world(), epoch, section, kSections, 0, inputs);
        PeerPackets<kRanks> peers(launch, slots + block.first(), sender_slots);
        FA_NO_UNROLL
        for (Index i = block.first(); i < own.length; i += block.stride()) {
          Pack packs[kRanks];
          // In the second section the own result is stored already, and any pack takes its place.
          if (!peers.wait(filled(input, kTerms), inputs, packs))
            return;
          if (section == kInputs) {
            sink.put(u64(own.first + i) * kPackBytes, own.first + i, reduce_ranks<kPushedWords>(packs),
                     Whole{}, sizeof(T));
            // In place, this thread alone reads a pack of the own slice, before it stores the result there.
            if (i + block.stride() < own.length)
              input = own_input(launch, own.first + i + block.stride());
          } else {
            for_each_rank(world_, [&](u32 r) {
              const u64 at = u64(slices.of(r).first + i) * kPackBytes;
              store_unless(r, launch.rank, output + at, sum_of(packs[r], results));
            });
          }
          peers.next(block.stride());
        }
      }
    } else {
      const auto to = epilogue.into_gathered(Store(output));
      if (packets(launch, block, epoch, kInputs, kSections, partition, own, bytes, sink))
        receive_slices(
            launch, block, to.addresses(),
            [&](u64 at, Index i, const Pack &pack, auto extent, u32 granule) {
              to.put(at, i, pack, extent, granule);
            },
            slices, bytes, world(), epoch, kResults, kSections, results, partition);
    }
  }

  // Reduces two packs, or only the last, in one loop, because the code is long. `whole`: the sum then
  // includes all ranks, so that an average divides it.
  FA_FN Pack packs(const Pack &first, const Pack &last, bool only_last, bool whole) const {
    Reduction<T, Op, kLanes> reduction(op_, world());
    FA_NO_UNROLL
    for (u32 k = only_last; k < 2; ++k)
      reduction.add(elements<All>(select_pack(k == 0, first, last)));
    return pack_of(reduction.finish(whole));
  }

private:
  // The hot set and integers have no premultiplied sums.
  static constexpr bool kPremultiplies = kMayPremultiply<Op> && kIsFloat<typename Element<T>::Accumulate>;
  using Word = Elements<T, kLanes / 4>;

  Op op_;
  WorldSize world_;
  Reader reader_;

  // Bytes of an element.
  FA_FN u32 element() const {
    if constexpr (kIsAnyWidth<T>)
      return element_bytes(op_.dtype);
    else
      return sizeof(T);
  }

  static FA_FN Word word_of(u32 bits) {
    // An f16 can be widened from either half of a register.
    if constexpr (sizeof(T) == sizeof(bits) || kIsF16<T>) {
      return *reinterpret_cast<const Word *>(&bits);
    } else {
      // By shifts: widening a bf16 then becomes a single mask.
      Word word;
      FA_UNROLL
      for (u32 i = 0; i < Word::units; ++i)
        word.unit[i] = static_cast<typename Convert<T>::Small>(bits >> 8 * sizeof(T) * i);
      return word;
    }
  }

  // With more than 4 ranks, one loop body (two in a push) reduces all words of a pack: a call begins by
  // fetching the code.
  static constexpr u32 kWords = kRanks > 4 ? 1 : 4, kPushedWords = kRanks > 4 ? 2 : 4;
  template <u32 Words = kWords>
  FA_FN Pack reduce_ranks(Pack *packs) const {
    Pack result = {};
    FA_UNROLL_BY(Words)
    for (u32 word = 0; word < 4; ++word) {
      Reduction<T, Op, kLanes / 4> reduction(op_, world());
      for_each_rank(world_, [&](u32 r) {
        reduction.add(word_of(packs[r].word[0]));
        pop_word(&packs[r]);
      });
      push_word(&result, reduction.finish());
    }
    return result;
  }

  static FA_FN Pack premultiplied_inlined(Op op, Pack pack) {
    if constexpr (sizeof(T) == 8) {
      return pack_of(premultiplied<T>(op, elements<All>(pack), op.scale));
    } else {
      Pack result = {};
      FA_NO_UNROLL
      for (u32 word = 0; word < 4; ++word) {
        push_word(&result, premultiplied<T>(op, word_of(pack.word[0]), op.scale));
        pop_word(&pack);
      }
      return result;
    }
  }
  static FA_OUTLINED Pack premultiplied_pack(Op op, Pack pack) { return premultiplied_inlined(op, pack); }

  template <class Block, class Partition>
  static FA_OUTLINED void stage_premultiplied(Op op, const Block &block, u8 *to, const u8 *from, Span span,
                                              u64 bytes, Partition partition) {
    const u64 addresses = u64(to) | u64(from);
    const u32 granule = granule_of(addresses | bytes);
    for_each_pack(
        block, span, bytes, pack_aligned(addresses),
        [&](u64 at, Index, auto extent) {
          const Pack pack = load(from + at, in_leaf(extent), granule);
          store(to + at, op.code() == FA_PREMUL_SUM ? premultiplied_inlined(op, pack) : pack, in_leaf(extent),
                granule);
        },
        partition);
  }

  // Moves the words after the first down; the top word is then unused.
  static FA_FN void pop_word(Pack *pack) {
    const u32 *word = pack->word;
    *pack = {word[1], word[2], word[3], word[3]};
  }

  // Appends a word: after four calls the first one is at the bottom.
  static FA_FN void push_word(Pack *pack, const Word &elements) {
    const u32 *word = pack->word;
    *pack = {word[1], word[2], word[3], *reinterpret_cast<const u32 *>(&elements)};
  }

  // Whether rank r exists, in a batch that may reach beyond the last rank. Where it does not, `near` is
  // loaded instead and ignored: a branch around each load would make the loads wait for each other.
  FA_FN bool exists(u32 r) const { return WorldSize::known || kBatch == 1 || r < world(); }
  FA_FN u32 rank_or(u32 r, u32 near) const { return exists(r) ? r : near; }

  // Adds the packs of a batch of ranks. Zeros in place of missing ranks do not change a sum, because it
  // starts at +0.
  template <class Reduction>
  FA_FN void add_batch(Reduction *reduction, u32 first, const Pack *packs) const {
    static_assert(kBatch == 1 || !kMayPremultiply<Op>, "only a sum is unchanged by zeros");
    FA_UNROLL
    for (u32 k = 0; k < kBatch; ++k)
      reduction->add(elements<All>(exists(first + k) ? packs[k] : Pack{}));
  }

  // Calls body(k) for each of a batch of `count` ranks, and for ranks after the last: up to a power of two,
  // because each branch takes time.
  template <u32 Batch, class Body>
  static FA_FN void for_each_of_batch(u32 first, u32 count, Body body) {
    FA_UNROLL
    for (u32 k = 0; k < Batch; ++k) {
      if ((k == 2 || k == 4) && first + k >= count)
        break;
      body(k);
    }
  }

  // A pack of this rank's input.
  static FA_FN Pack own_input(const FaLaunch &launch, Index pack) {
    return load(reinterpret_cast<const u8 *>(launch.input) + u64(pack) * kPackBytes, Whole{}, 0);
  }

  // Waits for one packet of each rank of a batch, and empties them. The first rank's is at `slot`, the others
  // at multiples of `distance`. In a batch of several ranks, all are polled together, so that the loads
  // overlap; their packets have no tags, and the packs of ranks after the last do not change a sum.
  template <u32 Batch>
  FA_FN bool wait_batch(const FaLaunch &launch, u32 first, Slot *slot, u32 distance, Tag tag,
                        Pack (&packs)[Batch]) const {
    if constexpr (Batch == 1) {
      if (!wait_packet(launch, slot, first, tag, packs))
        return false;
      empty_packet(slot, tag);
      return true;
    } else {
      static_assert(kSendsSums<T> && !kMayPremultiply<Op>,
                    "only a sum is unchanged by zeros, and has no tags");
      u64 at[Batch];
      FA_UNROLL
      for (u32 k = 0; k < Batch; ++k) {
        at[k] = k == 0 ? u64(slot) : at[k - 1] + u64(distance) * sizeof(Slot);
        packs[k] = filled(Pack{}, kTerms);
      }
      Backoff<> backoff;
      FA_NO_UNROLL
      for (;;) {
        u32 least[Batch];
        FA_UNROLL
        for (u32 k = 0; k < Batch; ++k) {
          u64 low = packs[k].low(), high = packs[k].high();
          load_relaxed_pair_below(first + k, world(), reinterpret_cast<const u64 *>(at[k]), &low, &high);
          packs[k] = FA_NAMESPACE::pack_of(low, high);
          least[k] = least_half(packs[k]);
        }
        // In pairs, so that few of them wait for each other.
        FA_UNROLL
        for (u32 half = Batch / 2; half > 0; half /= 2) {
          FA_UNROLL
          for (u32 k = 0; k < half; ++k)
            least[k] = min(least[k], least[k + half]);
        }
        if (least[0] != 0)
          break;
        const Failure failure = backoff.pause(launch, [&] {
          u32 late = 0;
          FA_UNROLL
          for (u32 k = Batch; k-- > 0;)
            late = least_half(packs[k]) != 0 ? late : k;
          return first + late;
        });
        if (!succeeded(launch, failure, tag.epoch))
          return false;
      }
      FA_UNROLL
      for (u32 k = 0; k < Batch; ++k)
        store_relaxed_pair_below(first + k, world(), reinterpret_cast<u64 *>(at[k]), 0, 0);
      return true;
    }
  }

  template <class E>
  static FA_FN E elements(const Pack &pack) {
    return *reinterpret_cast<const E *>(&pack);
  }
  static FA_FN Pack pack_of(const All &elements) { return *reinterpret_cast<const Pack *>(&elements); }
};

} // namespace FA_NAMESPACE
