// How a GPU moves the parts of messages: small ones as packets, without a fence. Those in a registered
// buffer of the sender are posted: the sender gives their address, and the receiver reads them there.
// Others are sent in chunks.
//
// A posted part takes as many signals as one chunk: the sender's, which says where the part is, and the
// credit. Writing to the receiver's buffer instead would take one more: the sender would have to learn where
// that buffer is, and would have to wait for every receiver, registered or not.
#pragma once

#include "channel.cuh"
#include "packet.cuh"

namespace FA_NAMESPACE {

// Whether a part is sent as packets depends only on its size, which the receiver knows as well.
FA_FN bool sent_as_packets(const FaLaunch &launch, const StripePart &part) {
  return part.bytes <= launch.packet_bytes;
}
FA_FN bool is_posted(const FaLaunch &launch, const StripePart &part) {
  return part.source != 0 && !sent_as_packets(launch, part);
}

// The tag of a part's packets, which follow the chunk's header: the first halves of all packets, then the
// second halves.
FA_FN Tag part_tag(const FaLaunch &launch, const Channel &channel) {
  return {mark_of(channel), kTagged, launch.packet_bytes};
}

// Polls once for this thread's packets of a part, and stores each where it belongs. Returns whether all have
// come.
template <class Block>
FA_FN bool take_packets(const FaLaunch &launch, const Block &block, const Channel &channel,
                        const StripePart &part, const FaChunk *slot) {
  bool whole = true;
  block.lanes(1, [&](u32) {
    ChunkInfo info;
    whole = read_chunk(slot, channel, &info) && info.tag == part.tag && info.bytes == part.whole;
  });
  const u32 granule = granule_of(part.address | part.bytes);
  block.for_each_in_block(u32(packs_of(part.bytes)), [&](u32 i) {
    with_extent(i, part.bytes, pack_aligned(part.address), [&](u64 at, u32, auto extent) {
      Pack pack;
      if (load_packet(reinterpret_cast<const Slot *>(slot + 1) + i, part_tag(launch, channel), &pack))
        store(reinterpret_cast<u8 *>(part.address) + at, pack, extent, granule);
      else
        whole = false;
    });
  });
  return whole;
}

template <class Block>
FA_FN void send_packets(const FaLaunch &launch, const Block &block, const Channel &channel,
                        const StripePart &part, FaChunk *slot) {
  const u32 granule = granule_of(part.address | part.bytes);
  block.for_each_in_block(u32(packs_of(part.bytes)), [&](u32 i) {
    with_extent(i, part.bytes, pack_aligned(part.address), [&](u64 at, u32, auto extent) {
      store_packet(reinterpret_cast<Slot *>(slot + 1) + i,
                   load(reinterpret_cast<const u8 *>(part.address) + at, extent, granule),
                   part_tag(launch, channel));
    });
  });
}

// Polls once, on one thread, whether a part or its next chunk can be sent. A posted part is complete when
// the receiver has read it.
//
// Nothing in a posted part was written in this launch. That the writes of earlier kernels are complete
// system-wide is the axiom of send_signal (signal.cuh), so the signal needs no fence.
FA_FN u64 poll_send(const FaLaunch &launch, Channel &channel, const StripePart &part) {
  if (channel.mode == kPosted) {
    // Acquire: the receiver's reads come before later kernels' writes to the memory.
    channel.credited = load_acquire(&credit_from(launch, channel)->taken);
    return poll_outcome(launch, channel, channel.credited == channel.number + 1);
  }
  const u64 readiness = poll_credit(launch, channel);
  if (readiness != kReady || !is_posted(launch, part))
    return readiness;
  signal_chunk(chunk_slot(launch, channel.peer(), launch.rank, channel), channel, part, part.source);
  channel.mode = kPosted;
  channel.wait = {};
  return kNotReady;
}

// Polls, on one thread, for the next chunk. Sets `*posted` to the address of a posted part, and leaves it at
// 0 if the data is in the slot.
FA_FN u64 poll_receive(const FaLaunch &launch, Channel &channel, const StripePart &part, u64 *posted) {
  ChunkInfo info;
  const FaChunk *slot = chunk_slot(launch, launch.rank, channel.peer(), channel);
  const bool has_come = read_chunk(slot, channel, &info);
  const u64 seen = check_chunk(launch, channel, part, has_come, info);
  if (seen != kReady)
    return seen;
  // The header has come, but not all of the packets.
  if (sent_as_packets(launch, part))
    return poll_outcome(launch, channel, false);
  if (info.source == 0 || find_registered(launch, channel.peer(), info.source, posted))
    return kReady;
  record_failure(launch, {FA_UNKNOWN_BUFFER, 1u << channel.peer()}, channel.number);
  return kFailed;
}

// Signals a chunk after its data has been copied. Packets need no ordering.
FA_FN void end_send(const FaLaunch &launch, const Channel &channel, const StripePart &part, FaChunk *slot) {
  if (!sent_as_packets(launch, part))
    fence_release();
  signal_chunk(slot, channel, part, 0);
}

// Gives credit after a chunk, the last piece of a posted part, or packets have been read.
//
// After a posted part, the receiver checks whether the sender has failed and owns its buffer again. As in
// `revoke` (barrier.cuh): let W be a write of the sender's caller that a read R of this block sees. The fence
// here is after R; the sender's is after its store to `revoked` and before W. If the fence here came first in
// the total order, R could not see W. So the sender's comes first, and the check after the fence sees its
// store.
//
// For packets the credit is relaxed: it is given only after all of them have been read, and later packets in
// the same slot have a different mark (lab/litmus/programs/channels/channel_packets.litmus).
FA_FN u64 end_receive(const FaLaunch &launch, Channel &channel, const StripePart &part, bool posted) {
  const bool gives = posted || gives_credit(launch, channel.number);
  const bool in_order = posted || (gives && !(sent_as_packets(launch, part) && channel.has_released));
  if (in_order)
    fence_sc();
  if (posted && load_relaxed(&own_head(launch)->revoked[channel.peer()]) != 0) {
    record_failure(launch, {FA_REVOKED, 1u << channel.peer()}, channel.number);
    return kFailed;
  }
  if (gives)
    store_relaxed(&credit_to(launch, channel)->taken, channel.number + 1);
  channel.has_released = in_order || (channel.has_released && sent_as_packets(launch, part));
  return kReady;
}

// Moves as much of a part as possible, at most *bytes, and sets *bytes to the number moved. All kinds of
// copies share one loop, because it is long.
template <class Block>
FA_FN u64 advance(const FaLaunch &launch, Block &block, Channel &channel, const StripePart &part,
                  u64 *bytes) {
  constexpr u64 kPieceBytes = 256 << 10;
  const bool sends = channel.sends(), is_own = channel.peer() == launch.rank;
  const bool packets = !is_own && sent_as_packets(launch, part);
  FaChunk *slot = is_own ? nullptr
                         : chunk_slot(launch, sends ? channel.peer() : launch.rank,
                                      sends ? launch.rank : channel.peer(), channel);
  u64 *posted = block.scratch() + 1, where = 0, to = part.address + channel.done,
      from = part.source + channel.done;
  const bool have_come = packets && !sends && block.all(take_packets(launch, block, channel, part, slot));
  if (!is_own && !have_come) {
    const u64 readiness = by_one_thread(block, [&] {
      *posted = 0;
      return sends ? poll_send(launch, channel, part) : poll_receive(launch, channel, part, posted);
    });
    if (readiness != kReady)
      return readiness;
    where = *posted;
    if (sends && is_posted(launch, part)) {
      *bytes = part.bytes;
      return kReady;
    }
    if (packets)
      send_packets(launch, block, channel, part, slot);
    else if (sends)
      from = to, to = chunk_data(launch, slot);
    else
      from = where != 0 ? where + channel.done : chunk_data(launch, slot);
  }
  const bool is_read = where != 0;
  const u64 left = part.bytes - channel.done;
  if (is_read)
    *bytes = left < kPieceBytes ? left : kPieceBytes;
  if (!packets)
    copy_bytes(block, to, from, *bytes);
  if (is_own)
    return kReady;
  if (is_read && *bytes != left)
    return kPartly;
  block.sync();
  return by_one_thread(block, [&]() -> u64 {
    if (!sends)
      return end_receive(launch, channel, part, is_read);
    end_send(launch, channel, part, slot);
    return kReady;
  });
}

// Revokes what is posted to `peer`: see `end_receive`.
FA_FN void withdraw(const FaLaunch &launch, u32 peer) {
#if !defined(FA_PLANT_NO_WITHDRAWAL)
  store_relaxed(&region_head(launch, peer)->revoked[launch.rank], 1);
#endif
  fence_sc();
}

} // namespace FA_NAMESPACE
