// Channels: one in each direction between any two ranks. On the host a channel is one ring of slots in the
// receiver's region. On a GPU it has several, its stripes, so that several blocks move a message: each has a
// part of it, and is a channel of its own in all that follows.
//
// A slot belongs to the sender until it sets the number of the chunk in it, and to the receiver from then
// until it gives credit. Both counts live in the region and never go back, so that launches follow each other
// without a rendezvous, and only the two ranks of a message take part in it.
//
// On the host a ring is larger than the second-level caches: when a slot is written again, its lines have
// left the cache of the receiver, which they would have to be taken from.
//
// Ordering: the sender's data, then its release of the number; the receiver's acquire of it, then its reads,
// then its release of the credit; the sender's acquire of that, then its next data in the slot. A sync on
// both sides of each flag joins the threads of a block to the one that accesses it
// (lab/litmus/programs/protocol/channel.litmus).
#pragma once

#include "pack.cuh"
#include "wait.cuh"

namespace FA_NAMESPACE {

// How a message is sent: on the host in a way that is chosen when it is begun; on a GPU posted if it may be.
enum TransferMode : u32 { kUndecided, kPosting, kPosted, kChunks };

// One stripe of a channel, as far as the launch has come.
struct Channel {
  u8 direction; // 2 * peer, and 1 more where this rank receives
  u8 stripe;
  u8 at, end; // the transfer that is next or under way, and the one after the last
  u32 number; // chunks that have gone through the stripe, ever
  // One thread's, which others must not read beside what is above.
  u32 credited;      // where this rank sends: chunks for which it has seen credit
  u8 mode;           // enum TransferMode: how this rank sends the transfer
  bool has_released; // where it receives: no chunk was read in this launch after the last release
  u64 done;          // bytes of the part that have gone through
  Backoff<> wait;    // for the next chunk or credit
#if !FA_CUDA
  u32 measured; // enum Measured of core/direct.cuh: the transfer
  u64 start;    // when the first of it was seen
#endif

  FA_FN bool is_open() const { return at != end; }
  FA_FN u32 peer() const { return direction / 2; }
  FA_FN bool sends() const { return direction % 2 == 0; }
};
static_assert(FA_MAX_TRANSFERS < 256 && FA_MAX_STRIPES < 256 && 2 * FA_MAX_RANKS < 256, "they are bytes");

// A stripe's part of a message, with its own address, source and number of bytes.
struct Portion : FaTransfer {
  u64 whole; // bytes of the message
};

// Whether a message has a part for a stripe. All have one for the first.
FA_FN bool has_part(const FaTransfer &message, u32 stripe) {
  return stripe == 0 || (message.part != 0 && u64(stripe) * message.part * FA_PART_ALIGNMENT < message.bytes);
}

FA_FN Portion part_of(const FaTransfer &message, u32 stripe) {
  Portion part = {message, message.bytes};
  if (message.part == 0)
    return part;
  const u64 most = u64(message.part) * FA_PART_ALIGNMENT, first = stripe * most, left = part.whole - first;
  part.address += first;
  part.source += part.source != 0 ? first : 0;
  part.bytes = left < most ? left : most;
  return part;
}

// Whether a channel can move a chunk now, or has. The outcome is that of one thread, seen by all. kPartly: of
// a chunk that is larger than what is moved at a time. kAgain: the chunk said where the message is, which
// could not be read there; it comes as chunks.
enum Readiness : u64 { kNotYet, kReady, kPartly, kAgain, kGivenUp };

template <class Poll, class Block>
FA_FN u64 ask(Block &block, Poll poll) {
  u64 *outcome = block.scratch();
  block.lanes(1, [&](u32) { *outcome = poll(); });
  block.sync();
  const u64 seen = *outcome;
  block.sync();
  return seen;
}

// A failed poll counts against the limits of the launch, which bound the wait; the caller goes on to another
// channel in between.
FA_FN u64 look(const FaLaunch &launch, Channel &channel, bool ready) {
  if (ready)
    return kReady;
  return succeeded(launch, channel.wait.pause(launch, channel.peer()), channel.number) ? kNotYet : kGivenUp;
}

// What came, or what this rank was to receive.
FA_FN void record_other_message(const FaLaunch &launch, u32 rank, u32 tag, u64 bytes) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  store_relaxed(&status->others[rank].what, u64(1) << 32 | tag);
  store_relaxed(&status->others[rank].count, bytes);
}

// The slot for a channel's next chunk in the region of `receiver`: the signal, room for packets, and for
// data.
FA_FN FaChunk *chunk_slot(const FaLaunch &launch, u32 receiver, u32 sender, const Channel &channel) {
  // No rank has a channel to itself.
  const u64 number = sender < receiver ? sender : sender - 1;
  const u64 slot = (number * launch.channel_stripes + channel.stripe) * launch.channel_slots +
                   (channel.number & (launch.channel_slots - 1));
  return reinterpret_cast<FaChunk *>(launch.regions[receiver] + launch.channel_offset +
                                     slot * (sizeof(FaChunk) +
                                             FA_CUDA_SLOT_BYTES / FA_CUDA_PACK_BYTES * launch.packet_bytes +
                                             launch.chunk_bytes));
}

FA_FN u64 chunk_data(const FaLaunch &launch, FaChunk *slot) {
  return u64(slot + 1) + FA_CUDA_SLOT_BYTES / FA_CUDA_PACK_BYTES * launch.packet_bytes;
}

// The credits that this rank has from a peer, and those that it gives.
FA_FN FaCredit *credit_from(const FaLaunch &launch, const Channel &channel) {
  return &region_head(launch, launch.rank)->credits[channel.stripe][channel.peer()];
}
FA_FN FaCredit *credit_to(const FaLaunch &launch, const Channel &channel) {
  return &region_head(launch, channel.peer())->credits[channel.stripe][launch.rank];
}

// Whether the receiver gives credit after chunk `number`. A sender that reads a credit takes its line from
// the receiver, so credit comes for a quarter of the slots at once: the others are enough to go on.
FA_FN bool gives_credit(const FaLaunch &launch, u32 number) {
  const u32 each = launch.channel_slots < 8 ? 1 : launch.channel_slots / 4;
  return ((number + 1) & (each - 1)) == 0;
}

// Whether there is a slot for the next chunk.
FA_FN u64 look_for_credit(const FaLaunch &launch, Channel &channel) {
  // The line of the credits is the receiver's: it is read when those that were seen are used up.
  if (channel.number - channel.credited < launch.channel_slots)
    return kReady;
  channel.credited = load_acquire(&credit_from(launch, channel)->taken);
  return look(launch, channel, channel.number - channel.credited < launch.channel_slots);
}

#if FA_CUDA
// What a chunk is marked with: never what fresh memory holds.
FA_FN u32 mark_of(const Channel &channel) { return channel.number + 1 + (channel.number == 0xFFFFFFFFu); }

// Tells the receiver of a chunk, in words which each have its mark, so that no order between them is needed:
// to send the number after the others would take the way to the receiver and back. What the chunk says of
// data that is not in packets comes after a fence.
FA_FN void signal_chunk(FaChunk *signal, const Channel &channel, const Portion &part, u64 source) {
  u64 *words = reinterpret_cast<u64 *>(signal);
  const u64 mark = u64(mark_of(channel)) << 32;
  store_relaxed_pair(words, mark | part.tag, mark | u32(part.whole));
  store_relaxed_pair(words + 2, mark | part.whole >> 32, mark | u32(source));
  store_relaxed_pair(words + 4, mark | source >> 32, mark);
}

// What a chunk says. False: not all of it has come.
struct Arrived {
  u64 bytes, source;
  u32 tag;
};
FA_FN bool look_at_chunk(const FaChunk *signal, const Channel &channel, Arrived *arrived) {
  const u64 *words = reinterpret_cast<const u64 *>(signal);
  const u32 mark = mark_of(channel);
  u64 tag, low, high, source_low, source_high, last;
  load_acquire_pair(words, &tag, &low);
  load_acquire_pair(words + 2, &high, &source_low);
  load_acquire_pair(words + 4, &source_high, &last);
  *arrived = {high << 32 | u32(low), source_high << 32 | u32(source_low), u32(tag)};
  return ((u32(tag >> 32) ^ mark) | (u32(low >> 32) ^ mark) | (u32(high >> 32) ^ mark) |
          (u32(source_low >> 32) ^ mark) | (u32(source_high >> 32) ^ mark)) == 0;
}
#else
// Tells the receiver of a chunk. `source` is 0 if its data is in the slot.
FA_FN void signal_chunk(FaChunk *signal, const Channel &channel, const Portion &part, u64 source) {
  const u32 number = channel.number;
  store_relaxed(&signal->tag, part.tag);
  store_relaxed(&signal->bytes, part.whole);
  store_relaxed(&signal->source, source);
  store_relaxed(&signal->measured, channel.measured);
#if defined(FA_PLANT_RELAXED_CHUNK)
  store_relaxed(&signal->number, number + 1);
  return;
#endif
  // Release: the data and what is said of it come before the number.
  store_release(&signal->number, number + 1);
}

// What a chunk says. False: it has not come.
struct Arrived {
  u64 bytes, source;
  u32 tag, measured;
};
FA_FN bool look_at_chunk(const FaChunk *signal, const Channel &channel, Arrived *arrived) {
  // Equality is enough: the sender sets the slot's next number only when it has the credit for this one.
  if (load_acquire(&signal->number) != channel.number + 1)
    return false;
  *arrived = {load_relaxed(&signal->bytes), load_relaxed(&signal->source), load_relaxed(&signal->tag),
              load_relaxed(&signal->measured)};
  return true;
}
#endif

// What a look at a chunk means, by one thread: its message may be another than the one that this rank is to
// receive. Of that the first stripe tells, through which all messages go; the others wait until it has.
FA_FN u64 check_chunk(const FaLaunch &launch, Channel &channel, const Portion &part, bool has_come,
                      const Arrived &arrived) {
  const bool is_other = has_come && (arrived.tag != part.tag || arrived.bytes != part.whole);
  if (!is_other || channel.stripe != 0)
    return look(launch, channel, has_come && !is_other);
  record_other_message(launch, channel.peer(), arrived.tag, arrived.bytes);
  record_other_message(launch, launch.rank, part.tag, part.whole);
  record_failure(launch, {FA_OTHER_MESSAGE, 1u << channel.peer()}, channel.number);
  return kGivenUp;
}

#if FA_CUDA
constexpr u32 kPacksAtOnce = 8;

// A whole pack, if that is wanted: without a branch, so that several are under way at once.
FA_FN void load_if(bool wanted, const u8 *from, Pack *pack) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
               "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "+r"(pack->word[0]), "+r"(pack->word[1]), "+r"(pack->word[2]), "+r"(pack->word[3])
               : "l"(from), "r"(u32(wanted))
               : "memory");
}
FA_FN void store_if(bool wanted, u8 *to, const Pack &pack) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
               "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(to),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3]), "r"(u32(wanted))
               : "memory");
}
#endif

// Copies bytes by the threads of this block alone, as a part of `all` bytes: fewer than 2^32 packs.
template <class Block>
FA_STEP void copy_bytes(const Block &block, u64 to, u64 from, u64 bytes, u64 all = 0) {
  u8 *target = reinterpret_cast<u8 *>(to);
  const u8 *source = reinterpret_cast<const u8 *>(from);
#if FA_CUDA
  (void)all;
  // What one side needs, the other need not do: whole packs go over a link if they may on its side.
  const bool aligned_to = pack_aligned(to), aligned_from = pack_aligned(from);
  const u32 granule_to = granule_of(to | bytes), granule_from = granule_of(from | bytes);
  const u32 whole = aligned_to && aligned_from ? u32(bytes / kPackBytes) : 0;
  // Several packs of a thread are under way at once.
  block.template for_several_alone<kPacksAtOnce>(whole, [&](u32 first, u32 stride) {
    Pack packs[kPacksAtOnce] = {};
    FA_UNROLL
    for (u32 i = 0, at = first; i < kPacksAtOnce; ++i, at += stride)
      load_if(at < whole, source + u64(at) * kPackBytes, &packs[i]);
    FA_UNROLL
    for (u32 i = 0, at = first; i < kPacksAtOnce; ++i, at += stride)
      store_if(at < whole, target + u64(at) * kPackBytes, packs[i]);
  });
  block.for_each_alone(u32(packs_of(bytes)) - whole, [&](u32 i) {
    const u64 at = u64(whole + i) * kPackBytes, left = bytes - at;
    const u32 length = left < kPackBytes ? u32(left) : kPackBytes;
    const Pack pack = load(source + at, Extent{length, aligned_from && left >= kPackBytes}, granule_from);
    store(target + at, pack, Extent{length, aligned_to && left >= kPackBytes}, granule_to);
  });
#else
  // As in `copy_out`. It is ordered as plain stores are: the C library ends stores that bypass caches by a
  // fence.
  if ((bytes > all ? bytes : all) >= kLongCopy) {
    __builtin_memcpy(target, source, bytes);
    return;
  }
  const u64 whole = bytes / kPackBytes;
  block.for_each_alone(whole, [&](u64 i) {
    store(target + i * kPackBytes, load(source + i * kPackBytes, Whole{}, 1), Whole{}, 1);
  });
  const u64 at = whole * kPackBytes;
  if (at < bytes)
    __builtin_memcpy(target + at, source + at, bytes - at);
#endif
}

} // namespace FA_NAMESPACE
