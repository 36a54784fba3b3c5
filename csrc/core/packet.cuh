// Packets: data and epoch in one store, so that the arrival of the data is its own signal.
//
// A slot holds one pack. All layouts of a mailbox have their slots at the same addresses, so that a word that
// is a tag in one launch is a tag in every launch, and old data is never mistaken for a tag. On the host the
// tag also has a hash of the call, to detect ranks that make different calls.
//
// On GPUs, packets of sums have no tags, which halves their size. They have separate mailboxes, in which a
// word is empty if it has not been written since it was last read.
#pragma once

#include "check.cuh"
#include "pack.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA

// The first two of a packet's four words; each has 32 bits of data and 32 bits of epoch, as in NCCL's LL
// protocol. Each word is a single-copy atomic access, so the order between them does not matter. The other
// two are at the same offset in the upper half of the mailbox, so that a warp writes 512 adjacent bytes at a
// time, in whole sectors.
struct Slot {
  u64 word[2];
};
constexpr u32 kSlotBytes = FA_CUDA_SLOT_BYTES;
static_assert(kSlotBytes == 2 * sizeof(Slot) && sizeof(Slot) == FA_CUDA_SENTINEL_BYTES,
              "equal to the size in abi.h");

// How a packet of this launch is recognised. kTagged: by the epoch in each word. kTerms and kSums (a term of
// a sum, and a sum): by words that are not empty.
enum Marks : u32 { kTagged, kTerms, kSums };
struct Tag {
  u32 epoch = 0;
  Marks marks = kTagged;
  u64 second_half_offset = 0; // bytes from the first two words of a tagged packet to the last two

  FA_FN bool sentinel() const { return marks != kTagged; }
};
FA_FN Tag packet_tag(const FaLaunch &launch, u32 epoch, Marks marks = kTagged) {
  return {epoch, marks, launch.mailbox_bytes / 2};
}

// A sentinel packet is a pack in two words, each a single-copy atomic access. A word is empty, like fresh
// memory, if its upper half is 0.
//
// In a term the upper half is 0 if the last element of 32 bits, or the last two of 16 bits, are +0. The last
// element is then sent as -0. The result is exact, since a sum starts at +0, and +0 + -0 = +0 + +0.
//
// A sum is sent with the sign of the last element of each word flipped. No sum is -0 (opposites add up to
// +0, and nothing is rounded to 0, as inputs and sums are multiples of the type's smallest subnormal
// number), so no word is empty.
//
// The receiver empties the words that it has read. Two generations suffice: a sender writes a word again
// two launches later. By then it has heard from the receiver in the launch in between, which the receiver
// began after the launch that emptied the word had ended (lab/litmus/programs/packets/sentinel.litmus).
constexpr u32 kLastSign = 1u << 31;
static_assert(FA_CUDA_SENTINEL_BYTES == FA_CUDA_PACK_BYTES, "equal to the size in abi.h");

// The upper half of a word that is sent.
FA_FN u32 filled(u32 upper, Marks marks) {
  return marks == kSums ? upper ^ kLastSign : upper == 0 ? kLastSign : upper;
}
// A pack as its sentinel packet carries it.
FA_FN Pack filled(const Pack &pack, Marks marks) {
  return {pack.word[0], filled(pack.word[1], marks), pack.word[2], filled(pack.word[3], marks)};
}

FA_FN u64 *upper_words(const Slot *slot, Tag tag) {
  return reinterpret_cast<u64 *>(u64(slot) + tag.second_half_offset);
}

FA_FN void store_packet(Slot *slot, const Pack &pack, Tag tag) {
  if (tag.sentinel()) {
    const Pack sent = filled(pack, tag.marks);
    return store_relaxed_pair(slot->word, sent.low(), sent.high());
  }
  store_relaxed_pair(slot->word, join(pack.word[0], tag.epoch), join(pack.word[1], tag.epoch));
  store_relaxed_pair(upper_words(slot, tag), join(pack.word[2], tag.epoch), join(pack.word[3], tag.epoch));
}

// 0 if a word is empty: the lesser of the words' upper halves, which are separate registers.
FA_FN u32 least_half(const Pack &pack) { return min(pack.word[1], pack.word[3]); }

// Polls a packet once and stores its content as it was sent. Returns false if not all of it has come.
FA_FN bool load_packet(const Slot *slot, Tag expected, Pack *pack) {
  if (expected.sentinel()) {
    u64 low, high;
    load_relaxed_pair(slot->word, &low, &high);
    *pack = pack_of(low, high);
    return least_half(*pack) != 0;
  }
  const u32 tag = expected.epoch;
  u64 a, b, c, d;
  load_relaxed_pair(slot->word, &a, &b);
  load_relaxed_pair(upper_words(slot, expected), &c, &d);
  u32 tags[4];
  split(a, &pack->word[0], &tags[0]);
  split(b, &pack->word[1], &tags[1]);
  split(c, &pack->word[2], &tags[2]);
  split(d, &pack->word[3], &tags[3]);
  return ((tags[0] ^ tag) | (tags[1] ^ tag) | (tags[2] ^ tag) | (tags[3] ^ tag)) == 0;
}

// Empties a sentinel packet that has been read.
FA_FN void empty_packet(Slot *slot, Tag tag) {
  if (tag.sentinel())
    store_relaxed_pair(slot->word, 0, 0);
}

// Returns the sum that a packet carries.
FA_FN Pack sum_of(const Pack &pack, Tag tag) {
  const u32 sign = tag.marks == kSums ? kLastSign : 0;
  return {pack.word[0], pack.word[1] ^ sign, pack.word[2], pack.word[3] ^ sign};
}

FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack *pack) {
  return succeeded(launch, wait_until(launch, from, [&] { return load_packet(slot, tag, pack); }), tag.epoch);
}

#else

// A cache line of data, then its tag, released after it.
struct Slot {
  u8 data[FA_HOST_SLOT_BYTES - sizeof(u64)];
  u64 tag;
};
constexpr u32 kSlotBytes = FA_HOST_SLOT_BYTES;
static_assert(sizeof(Slot) == kSlotBytes && sizeof(Slot::data) >= kPackBytes, "equal to the size in abi.h");

// How a packet of this launch is recognised: the hash of the call above the epoch.
using Tag = u64;
FA_FN Tag packet_tag(const FaLaunch &launch, u32 epoch) { return u64(word_of(launch.call)) << 32 | epoch; }

FA_FN void store_packet(Slot *slot, const Pack &pack, Tag tag) {
  __builtin_memcpy(slot->data, &pack, kPackBytes);
  store_release(&slot->tag, tag);
}

// Waits until the data of the packet may be read.
FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag) {
  return succeeded(launch, wait_for(launch, from, u32(tag), &slot->tag, tag), u32(tag));
}

FA_FN bool wait_packet(const FaLaunch &launch, const Slot *slot, u32 from, Tag tag, Pack *pack) {
  if (!wait_packet(launch, slot, from, tag))
    return false;
  __builtin_memcpy(pack, slot->data, kPackBytes);
  return true;
}

FA_FN void empty_packet(Slot *, Tag) {}
FA_FN const Pack &sum_of(const Pack &pack, Tag) { return pack; }

#endif

// The offset in a region of the slots for packets of `from`. An algorithm divides a sender's slots into
// `sections`, one for each of its phases.
//
// A sender has the same slots whatever the algorithm: with one sender for each word, coherence alone orders
// its packets. Packets of two senders would not be ordered, as packets are relaxed, and an older one could
// remain (lab/litmus/programs/packets/mailbox_layouts.litmus).
FA_FN u32 slots_per_sender(const FaLaunch &launch, u32 world) {
  // In 32 bits: on a GPU a 64-bit division is a function call.
  return u32(launch.mailbox_bytes / kSlotBytes) / world;
}

FA_FN u64 slots_offset(const FaLaunch &launch, u32 world, u32 epoch, u32 section, u32 sections, u32 from,
                       [[maybe_unused]] Tag tag = {}) {
  const u32 sender_slots = slots_per_sender(launch, world);
  u64 slots = mailbox_offset(launch, epoch);
#if FA_CUDA
  if (tag.sentinel())
    slots = sentinel_mailbox_offset(launch, epoch);
#endif
  return slots + u64(from * sender_slots + section * (sender_slots / sections)) * sizeof(Slot);
}

// The slots in `owner`'s mailbox for packets of `from`.
FA_FN Slot *slots_of(const FaLaunch &launch, u32 world, u32 owner, u32 epoch, u32 section, u32 sections,
                     u32 from, Tag tag = {}) {
  return reinterpret_cast<Slot *>(launch.regions[owner] +
                                  slots_offset(launch, world, epoch, section, sections, from, tag));
}

// The slots in this rank's mailbox for packets of `from`.
FA_FN Slot *own_slots_of(const FaLaunch &launch, u32 world, u32 epoch, u32 section, u32 sections, u32 from,
                         Tag tag = {}) {
  return reinterpret_cast<Slot *>(launch.own +
                                  slots_offset(launch, world, epoch, section, sections, from, tag));
}

// The sections of a sender's slots in a two-shot.
constexpr u32 kInputs = 0, kResults = 1, kSections = 2;

// Sends a span of this rank's input to one peer, whose slots begin with the span's first pack.
template <class Block, class Reduce, class Partition>
FA_HOST_OUTLINED void send_packets(const Block &block, const Reduce &reduce, const u8 *from, Span span,
                                   u64 bytes, Slot *slots, Tag tag, Partition partition) {
  const u32 granule = granule_of(u64(from) | bytes);
  for_each_pack(
      block, span, bytes, pack_aligned(u64(from)),
      [&](u64 at, Index i, auto extent) {
        store_packet(slots + (i - span.first), reduce.own(from + at, extent, granule), tag);
      },
      partition);
}

// rank % world, for rank < 2 * world: less code than a division.
FA_FN u32 wrap_rank(u32 rank, u32 world) { return rank < world ? rank : rank - world; }

// The offset in each region of the first slot for this rank's packets in a section. It is computed for both
// generations before the epoch is known, while the launch state is loaded.
class SenderSlots {
public:
  FA_FN SenderSlots(const FaLaunch &launch, u32 world, u32 section, u32 sections, Tag tag)
      : first_(slots_offset(launch, world, 0, section, sections, launch.rank, tag)),
        generation_(slots_offset(launch, world, 1, section, sections, launch.rank, tag) - first_) {}

  FA_FN u64 of(u32 epoch) const { return epoch % 2 == 0 ? first_ : first_ + generation_; }

private:
  u64 first_, generation_;
};

// The ranks that get a pack, in the order in which this rank sends: it writes to one peer at a time, a
// different one from its peers. W: the number of ranks if it is known, else 0.
template <u32 W = 0>
class Recipients;

template <>
class Recipients<0> {
public:
  FA_FN Recipients(const FaLaunch &launch, u32 world) : launch_(launch), world_(world) {}

  // Sends one pack to all ranks, to offset `slot` of each region.
  FA_FN void send(u64 slot, const Pack &pack, Tag tag) const {
    FA_NO_UNROLL
    for (u32 step = kFirstStep; step < world_; ++step) {
      const u32 r = wrap_rank(launch_.rank + step, world_);
      store_packet(reinterpret_cast<Slot *>(launch_.regions[r] + slot), pack, tag);
    }
  }

private:
  const FaLaunch &launch_;
  u32 world_;
};

#if FA_CUDA
// The peers: in the hot set a rank sends nothing to itself (cuda/peer_packets.cuh).
//
// Loads the addresses before they are needed: the first access to a line of parameters is slow.
template <u32 W>
class Recipients {
public:
  FA_FN Recipients(const FaLaunch &launch, u32) {
    FA_UNROLL
    for (u32 peer = 0; peer < W - 1; ++peer) {
      regions_[peer] = launch.regions[wrap_rank(launch.rank + 1 + peer, W)];
      asm volatile("" : "+l"(regions_[peer])); // here, not where it is used
    }
  }

  FA_FN void send(u64 slot, const Pack &pack, Tag tag) const {
    FA_UNROLL
    for (u32 peer = 0; peer < W - 1; ++peer)
      store_packet(reinterpret_cast<Slot *>(regions_[peer] + slot), pack, tag);
  }
  // Sends another pack to each.
  FA_FN void send(u64 slot, const Pack (&packs)[W - 1], Tag tag) const {
    FA_UNROLL
    for (u32 peer = 0; peer < W - 1; ++peer)
      store_packet(reinterpret_cast<Slot *>(regions_[peer] + slot), packs[peer], tag);
  }

private:
  u64 regions_[W - 1];
};
#endif

// The packs of a message that this rank sends, premultiplied where the operation asks for it.
template <class Reduce, class Block, class Partition>
class Outgoing {
public:
  FA_FN Outgoing(const Reduce &reduce, const Block &block, Partition partition, const u8 *from, u64 bytes)
      : reduce_(reduce), block_(block), partition_(partition), from_(from), bytes_(bytes) {}

  // Calls body(i, pack) for each pack.
  template <class Body>
  FA_FN void for_each(bool, Body body) const {
    const u32 granule = granule_of(u64(from_) | bytes_);
    for_each_pack(
        block_, partition_.all(bytes_), bytes_, pack_aligned(u64(from_)),
        [&](u64 at, Index i, auto extent) { body(i, reduce_.own(from_ + at, extent, granule)); }, partition_);
  }

private:
  const Reduce &reduce_;
  const Block &block_;
  Partition partition_;
  const u8 *from_;
  u64 bytes_;
};

#if FA_CUDA
// Loads each pack before it sends the previous one. The constructor loads the first pack, in parallel with
// reading the launch state, which takes as long.
template <class Reduce, class Block, u32 W>
class Outgoing<Reduce, Block, WholePackPartition<W>> {
public:
  FA_FN Outgoing(const Reduce &, const Block &block, WholePackPartition<W> partition, const u8 *from,
                 u64 bytes)
      : from_(from), count_(partition.all(bytes).length), begin_(block.first()), stride_(block.stride()) {
    // A thread without a pack loads another one's: a branch would make the launch state wait for it. In
    // place, that pack's output may be stored meanwhile; the value is not used.
    first_ = pack(begin_ < count_ ? begin_ : 0);
  }

  template <class Body>
  FA_FN void for_each(bool goes_on, Body body) const {
    Pack next = first_;
    FA_NO_UNROLL
    for (Index i = goes_on ? begin_ : count_; i < count_;) {
      const Pack now = next;
      const Index after = i + stride_;
      if (after < count_)
        next = pack(after);
      body(i, now);
      i = after;
    }
  }

private:
  const u8 *from_;
  Index count_, begin_, stride_;
  Pack first_ = {};

  FA_FN Pack pack(Index i) const { return load(from_ + u64(i) * kPackBytes, Whole{}, 0); }
};
#endif

// The slices of a message, each of which this rank sends to its owner.
template <class Reduce, class Block, class Partition>
class OutgoingSlices {
public:
  FA_FN OutgoingSlices(const FaLaunch &launch, const Reduce &reduce, const Block &block, Partition partition,
                       const Slices &slices, u64 bytes)
      : launch_(launch), reduce_(reduce), block_(block), partition_(partition), slices_(slices),
        bytes_(bytes) {}

  template <class Recipients>
  FA_FN void send(bool, const Recipients &, u32 epoch, Tag tag) const {
    const u32 world = reduce_.world();
    FA_NO_UNROLL
    for (u32 step = kFirstStep; step < world; ++step) {
      // Each rank writes to one peer at a time, a different one from its peers.
      const u32 r = (launch_.rank + step) % world;
      send_packets(block_, reduce_, reinterpret_cast<const u8 *>(launch_.input), slices_.of(r), bytes_,
                   slots_of(launch_, world, r, epoch, kInputs, kSections, launch_.rank, tag), tag,
                   partition_);
    }
  }

private:
  const FaLaunch &launch_;
  const Reduce &reduce_;
  const Block &block_;
  Partition partition_;
  const Slices &slices_;
  u64 bytes_;
};

#if FA_CUDA
// Loads a pack of each peer's slice before it sends one, so that the loads overlap. The constructor loads the
// first, in parallel with the launch state.
template <class Reduce, class Block, u32 W>
class OutgoingSlices<Reduce, Block, WholePackPartition<W>> {
public:
  FA_FN OutgoingSlices(const FaLaunch &launch, const Reduce &reduce, const Block &block,
                       WholePackPartition<W>, const EqualSlices &slices, u64)
      : from_(reinterpret_cast<const u8 *>(launch.input)), rank_(launch.rank), each_(slices.each),
        begin_(block.first()), stride_(block.stride()),
        slots_(launch, W, kInputs, kSections, reduce.packet_tag(launch, 0)) {
    const Index first = begin_ < each_ ? begin_ : 0;
    load_packs(first);
    own_ = pack(0, first);
  }

  // This thread's first pack of the own slice.
  FA_FN const Pack &own() const { return own_; }

  FA_FN void send(bool goes_on, const Recipients<W> &recipients, u32 epoch, Tag tag) {
    const u64 first = slots_.of(epoch);
    FA_NO_UNROLL
    for (Index i = goes_on ? begin_ : each_; i < each_;) {
      recipients.send(first + u64(i) * sizeof(Slot), packs_, tag);
      i += stride_;
      if (i < each_)
        load_packs(i);
    }
  }

private:
  const u8 *from_;
  u32 rank_;
  Index each_, begin_, stride_;
  SenderSlots slots_;
  Pack packs_[W - 1], own_;

  FA_FN Pack pack(u32 step, Index i) const {
    return load(from_ + u64(wrap_rank(rank_ + step, W) * each_ + i) * kPackBytes, Whole{}, 0);
  }
  FA_FN void load_packs(Index i) {
    FA_UNROLL
    for (u32 peer = 0; peer < W - 1; ++peer)
      packs_[peer] = pack(1 + peer, i);
  }
};
#endif

// Receives the packets of a span from one peer, and stores them by put(at, i, pack, extent, granule) at
// `addresses`. Returns false if not all came.
template <class Block, class Put, class Partition = PackPartition>
FA_HOST_OUTLINED bool receive_packets(const FaLaunch &launch, const Block &block, u64 addresses,
                                      const Put &put, Span span, u64 bytes, Slot *slots, u32 from, Tag tag,
                                      Partition partition = {}) {
  const u32 granule = granule_of(addresses | bytes);
  bool complete = true;
  for_each_pack(
      block, span, bytes, pack_aligned(addresses),
      [&](u64 at, Index i, auto extent) {
        Pack pack;
        Slot *slot = slots + (i - span.first);
        complete = complete && wait_packet(launch, slot, from, tag, &pack);
        if (complete) {
          put(at, i, sum_of(pack, tag), extent, granule);
          empty_packet(slot, tag);
        }
      },
      partition);
  return complete;
}

// Receives the peers' slices of a message, which each peer sends in `section`.
template <class Block, class Put, class Partition = PackPartition>
FA_FN bool receive_slices(const FaLaunch &launch, const Block &block, u64 addresses, const Put &put,
                          const Slices &slices, u64 bytes, u32 world, u32 epoch, u32 section, u32 sections,
                          Tag tag, Partition partition = {}) {
  bool complete = true;
  FA_NO_UNROLL
  for (u32 step = kFirstStep; step < world && complete; ++step) {
    const u32 r = (launch.rank + step) % world;
    complete =
        receive_packets(launch, block, addresses, put, slices.of(r), bytes,
                        own_slots_of(launch, world, epoch, section, sections, r, tag), r, tag, partition);
  }
  return complete;
}

} // namespace FA_NAMESPACE
