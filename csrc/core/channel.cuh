// Channels: one in each direction between any two ranks. On the host a channel is one ring of slots in the
// receiver's region. On a GPU it has several rings, its stripes, so that several blocks move a message in
// parallel. Each stripe moves its own part of a message. Below, "channel" means one stripe of it.
//
// A slot belongs to the sender until it stores the chunk's number, and then to the receiver until it gives
// credit. The counts of chunks and credits are in the region and only increase, so launches follow each other
// without a rendezvous, and only the two ranks of a message take part.
//
// On the host a ring is larger than a second-level cache: when a slot is written again, its lines have been
// evicted from the receiver's cache and need not be invalidated there.
//
// Ordering: the sender writes data, then releases the number. The receiver acquires the number, reads the
// data, then releases the credit. The sender acquires the credit, then writes the next data to the slot. On
// both sides, a sync before or after each flag orders the block's threads with the one that accesses it
// (lab/litmus/programs/channels/channel.litmus).
#pragma once

#include "pack.cuh"
#include "wait.cuh"

namespace FA_NAMESPACE {

// How a message is sent. On the host the mode is chosen when the message begins; on a GPU it is posted where
// possible.
enum TransferMode : u32 { kUndecided, kPosting, kPosted, kChunks };

// State of one stripe of a channel during a launch.
struct Channel {
  u8 direction; // 2 * peer, plus 1 where this rank receives
  u8 stripe;
  u8 at, end; // the current transfer, and the one after the last
  u32 number; // chunks that have gone through the stripe since the region was made
  // Written by one thread while others read the fields above; they must not read these.
  u32 credited;      // sender: chunks for which it has seen credit
  u8 mode;           // sender: enum TransferMode of the current transfer
  bool has_released; // receiver: no chunk was read in this launch after the last release
  u64 done;          // bytes of the part that have been moved
  Backoff<> wait;    // for the next chunk or credit
#if !FA_CUDA
  u32 measured; // enum Measured of core/direct.cuh, of the current transfer
  u64 start;    // time at which its first chunk was seen
#endif

  FA_FN bool is_open() const { return at != end; }
  FA_FN u32 peer() const { return direction / 2; }
  FA_FN bool sends() const { return direction % 2 == 0; }
};
static_assert(FA_MAX_TRANSFERS < 256 && FA_MAX_STRIPES < 256 && 2 * FA_MAX_RANKS < 256, "they fit in a byte");

// The part of a message that one stripe moves, with its own address, source and size.
struct StripePart : FaTransfer {
  u64 whole; // size of the message
};

// Returns whether a message has a part for the stripe. Every message has one for the first stripe.
FA_FN bool has_part(const FaTransfer &message, u32 stripe) {
  return stripe == 0 || (message.part != 0 && u64(stripe) * message.part * FA_PART_ALIGNMENT < message.bytes);
}

FA_FN StripePart part_of(const FaTransfer &message, u32 stripe) {
  StripePart part = {message, message.bytes};
  if (message.part == 0)
    return part;
  const u64 most = u64(message.part) * FA_PART_ALIGNMENT, first = stripe * most, left = part.whole - first;
  part.address += first;
  part.source += part.source != 0 ? first : 0;
  part.bytes = left < most ? left : most;
  return part;
}

// Outcome of trying to move a chunk. One thread determines it for the block. kPartly: part of a chunk that is
// larger than what is moved at a time. kRefused: the receiver could not read the posted message; it is sent
// again as chunks.
enum Readiness : u64 { kNotReady, kReady, kPartly, kRefused, kFailed };

// Calls poll() on one thread, and returns its result on all threads.
template <class Poll, class Block>
FA_FN u64 by_one_thread(Block &block, Poll poll) {
  u64 *outcome = block.scratch();
  block.lanes(1, [&](u32) { *outcome = poll(); });
  block.sync();
  const u64 seen = *outcome;
  block.sync();
  return seen;
}

// Returns the outcome of a poll. An unsuccessful poll counts against the limits of the launch, which bound
// the wait; meanwhile the caller polls other channels.
FA_FN u64 poll_outcome(const FaLaunch &launch, Channel &channel, bool ready) {
  if (ready)
    return kReady;
  return succeeded(launch, channel.wait.pause(launch, channel.peer()), channel.number) ? kNotReady : kFailed;
}

// Records the message that came, or that this rank was to receive.
FA_FN void record_other_message(const FaLaunch &launch, u32 rank, u32 tag, u64 bytes) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  store_relaxed(&status->others[rank].what, u64(1) << 32 | tag);
  store_relaxed(&status->others[rank].count, bytes);
}

// The slot for a channel's next chunk in the receiver's region: a header, room for packets, and room for
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

// The credit that this rank gets from a peer, and the one that it gives to a peer.
FA_FN FaCredit *credit_from(const FaLaunch &launch, const Channel &channel) {
  return &own_head(launch)->credits[channel.stripe][channel.peer()];
}
FA_FN FaCredit *credit_to(const FaLaunch &launch, const Channel &channel) {
  return &region_head(launch, channel.peer())->credits[channel.stripe][launch.rank];
}

// Returns whether the receiver gives credit after chunk `number`. Reading a credit takes its cache line from
// the receiver, so credit is given for a quarter of the slots at once; the others are enough to keep going.
FA_FN bool gives_credit(const FaLaunch &launch, u32 number) {
  const u32 each = launch.channel_slots < 8 ? 1 : launch.channel_slots / 4;
  return ((number + 1) & (each - 1)) == 0;
}

// Polls for a free slot for the next chunk.
FA_FN u64 poll_credit(const FaLaunch &launch, Channel &channel) {
  // The receiver owns the credit's cache line: read it only when all credits seen so far are used up.
  if (channel.number - channel.credited < launch.channel_slots)
    return kReady;
  channel.credited = load_acquire(&credit_from(launch, channel)->taken);
  return poll_outcome(launch, channel, channel.number - channel.credited < launch.channel_slots);
}

#if FA_CUDA
// The mark of a chunk; never 0, which fresh memory holds.
FA_FN u32 mark_of(const Channel &channel) { return channel.number + 1 + (channel.number == 0xFFFFFFFFu); }

// Signals a chunk to the receiver, in words that each have the mark, so that their order does not matter:
// storing the number after the other words would cost another round trip to the receiver. A fence orders
// data outside packets before the signal.
FA_FN void signal_chunk(FaChunk *signal, const Channel &channel, const StripePart &part, u64 source) {
  u64 *words = reinterpret_cast<u64 *>(signal);
  const u64 mark = u64(mark_of(channel)) << 32;
  store_relaxed_pair(words, mark | part.tag, mark | u32(part.whole));
  store_relaxed_pair(words + 2, mark | part.whole >> 32, mark | u32(source));
  store_relaxed_pair(words + 4, mark | source >> 32, mark);
}

// The fields of a chunk's header. read_chunk() returns false if not all of them have come.
struct ChunkInfo {
  u64 bytes, source;
  u32 tag;
};
FA_FN bool read_chunk(const FaChunk *signal, const Channel &channel, ChunkInfo *info) {
  const u64 *words = reinterpret_cast<const u64 *>(signal);
  const u32 mark = mark_of(channel);
  u64 tag, low, high, source_low, source_high, last;
  load_acquire_pair(words, &tag, &low);
  load_acquire_pair(words + 2, &high, &source_low);
  load_acquire_pair(words + 4, &source_high, &last);
  *info = {high << 32 | u32(low), source_high << 32 | u32(source_low), u32(tag)};
  return ((u32(tag >> 32) ^ mark) | (u32(low >> 32) ^ mark) | (u32(high >> 32) ^ mark) |
          (u32(source_low >> 32) ^ mark) | (u32(source_high >> 32) ^ mark)) == 0;
}
#else
// Signals a chunk to the receiver. `source` is 0 if the data is in the slot.
FA_FN void signal_chunk(FaChunk *signal, const Channel &channel, const StripePart &part, u64 source) {
  const u32 number = channel.number;
  store_relaxed(&signal->tag, part.tag);
  store_relaxed(&signal->bytes, part.whole);
  store_relaxed(&signal->source, source);
  store_relaxed(&signal->measured, channel.measured);
#if defined(FA_PLANT_RELAXED_CHUNK)
  store_relaxed(&signal->number, number + 1);
  return;
#endif
  // Release: the data and the other fields come before the number.
  store_release(&signal->number, number + 1);
}

// The fields of a chunk's header. read_chunk() returns false if it has not come.
struct ChunkInfo {
  u64 bytes, source;
  u32 tag, measured;
};
FA_FN bool read_chunk(const FaChunk *signal, const Channel &channel, ChunkInfo *info) {
  // Comparing for equality is enough: the sender stores the slot's next number only after it has credit for
  // this one.
  if (load_acquire(&signal->number) != channel.number + 1)
    return false;
  *info = {load_relaxed(&signal->bytes), load_relaxed(&signal->source), load_relaxed(&signal->tag),
           load_relaxed(&signal->measured)};
  return true;
}
#endif

// Checks the header of a chunk, on one thread, and returns the outcome. The chunk may belong to a different
// message than the expected one. Only the first stripe, which every message uses, reports that; the others
// keep waiting until it has.
FA_FN u64 check_chunk(const FaLaunch &launch, Channel &channel, const StripePart &part, bool has_come,
                      const ChunkInfo &info) {
  const bool is_other = has_come && (info.tag != part.tag || info.bytes != part.whole);
  if (!is_other || channel.stripe != 0)
    return poll_outcome(launch, channel, has_come && !is_other);
  record_other_message(launch, channel.peer(), info.tag, info.bytes);
  record_other_message(launch, launch.rank, part.tag, part.whole);
  record_failure(launch, {FA_OTHER_MESSAGE, 1u << channel.peer()}, channel.number);
  return kFailed;
}

#if FA_CUDA
constexpr u32 kPacksAtOnce = 8;
#endif

// Copies bytes, fewer than 2^32 packs, by the threads of this block alone. `total`: size of the whole copy,
// if this is a piece of one.
template <class Block>
FA_HOST_OUTLINED void copy_bytes(const Block &block, u64 to, u64 from, u64 bytes, u64 total = 0) {
  u8 *target = reinterpret_cast<u8 *>(to);
  const u8 *source = reinterpret_cast<const u8 *>(from);
#if FA_CUDA
  (void)total;
  // The two sides are independent: the side that crosses the link uses whole packs if its own address allows
  // it.
  const bool aligned_to = pack_aligned(to), aligned_from = pack_aligned(from);
  const u32 granule_to = granule_of(to | bytes), granule_from = granule_of(from | bytes);
  const u32 whole = aligned_to && aligned_from ? u32(bytes / kPackBytes) : 0;
  // Several packs of a thread are in flight at once.
  block.template for_several_in_block<kPacksAtOnce>(whole, [&](u32 first, u32 stride) {
    Pack packs[kPacksAtOnce] = {};
    FA_UNROLL
    for (u32 i = 0, at = first; i < kPacksAtOnce; ++i, at += stride)
      load_if(at < whole, source + u64(at) * kPackBytes, &packs[i]);
    FA_UNROLL
    for (u32 i = 0, at = first; i < kPacksAtOnce; ++i, at += stride)
      store_if(at < whole, target + u64(at) * kPackBytes, packs[i]);
  });
  block.for_each_in_block(u32(packs_of(bytes)) - whole, [&](u32 i) {
    const u64 at = u64(whole + i) * kPackBytes, left = bytes - at;
    const u32 length = left < kPackBytes ? u32(left) : kPackBytes;
    const Pack pack = load(source + at, Extent{length, aligned_from && left >= kPackBytes}, granule_from);
    store(target + at, pack, Extent{length, aligned_to && left >= kPackBytes}, granule_to);
  });
#else
  // As in `copy_out`. It is ordered like plain stores: the C library ends non-temporal stores with a fence.
  if ((bytes > total ? bytes : total) >= kLongCopy) {
    __builtin_memcpy(target, source, bytes);
    return;
  }
  const u64 whole = bytes / kPackBytes;
  block.for_each_in_block(whole, [&](u64 i) {
    store(target + i * kPackBytes, load(source + i * kPackBytes, Whole{}, 1), Whole{}, 1);
  });
  const u64 at = whole * kPackBytes;
  if (at < bytes)
    __builtin_memcpy(target + at, source + at, bytes - at);
#endif
}

} // namespace FA_NAMESPACE
