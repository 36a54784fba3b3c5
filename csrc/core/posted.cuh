// How a GPU moves the parts of messages: small ones as packets, without a fence; those that lie in a
// registered buffer of the sender, which posts where, by reads of the receiver; others in chunks.
//
// A posted part takes as many signals as one chunk: the sender's, which says where the part is, and the
// credit. To write to the receiver's buffer instead would take one more: the sender would have to hear where
// that is, and would have to wait for every receiver, registered or not.
#pragma once

#include "channel.cuh"
#include "packet.cuh"

namespace FA_NAMESPACE {

// How a part is moved. Packets by the length alone, which the receiver knows as well.
FA_FN bool is_packets(const FaLaunch &launch, const Portion &part) {
  return part.bytes <= launch.packet_bytes;
}
FA_FN bool is_posted(const FaLaunch &launch, const Portion &part) {
  return part.source != 0 && !is_packets(launch, part);
}

// Of the packets of a part, which follow a chunk's signal: first the lower halves of all.
FA_FN Tag part_tag(const FaLaunch &launch, const Channel &channel) {
  return {mark_of(channel), kTagged, launch.packet_bytes};
}

// Whether a thread's packets of a part have come; they go where they belong as they come.
template <class Block>
FA_FN bool take_packets(const FaLaunch &launch, const Block &block, const Channel &channel,
                        const Portion &part, const FaChunk *slot) {
  bool whole = true;
  block.lanes(1, [&](u32) {
    Arrived arrived;
    whole = look_at_chunk(slot, channel, &arrived) && arrived.tag == part.tag && arrived.bytes == part.whole;
  });
  const u32 granule = granule_of(part.address | part.bytes);
  block.for_each_alone(u32(packs_of(part.bytes)), [&](u32 i) {
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
                        const Portion &part, FaChunk *slot) {
  const u32 granule = granule_of(part.address | part.bytes);
  block.for_each_alone(u32(packs_of(part.bytes)), [&](u32 i) {
    with_extent(i, part.bytes, pack_aligned(part.address), [&](u64 at, u32, auto extent) {
      store_packet(reinterpret_cast<Slot *>(slot + 1) + i,
                   load(reinterpret_cast<const u8 *>(part.address) + at, extent, granule),
                   part_tag(launch, channel));
    });
  });
}

// Whether a part, or its next chunk, can be sent; by one thread. What is posted is sent when the receiver has
// read it.
//
// Nothing of a posted part was written in this launch. That what earlier kernels wrote is complete for all of
// the system is the axiom of send_signal (signal.cuh), so the signal needs no fence.
FA_FN u64 look_to_send(const FaLaunch &launch, Channel &channel, const Portion &part) {
  if (channel.mode == kPosted) {
    // Acquire: the receiver's reads come before what later kernels do with the memory.
    channel.credited = load_acquire(&credit_from(launch, channel)->taken);
    return look(launch, channel, channel.credited == channel.number + 1);
  }
  const u64 readiness = look_for_credit(launch, channel);
  if (readiness != kReady || !is_posted(launch, part))
    return readiness;
  signal_chunk(chunk_slot(launch, channel.peer(), launch.rank, channel), channel, part, part.source);
  channel.mode = kPosted;
  channel.wait = {};
  return kNotYet;
}

// Whether the next chunk has come, or where the part was posted to be; by one thread, for all: 0 is in the
// slot.
FA_FN u64 look_to_receive(const FaLaunch &launch, Channel &channel, const Portion &part, u64 *posted) {
  Arrived arrived;
  const FaChunk *slot = chunk_slot(launch, launch.rank, channel.peer(), channel);
  const bool has_come = look_at_chunk(slot, channel, &arrived);
  const u64 seen = check_chunk(launch, channel, part, has_come, arrived);
  if (seen != kReady)
    return seen;
  // Not all packets had come.
  if (is_packets(launch, part))
    return look(launch, channel, false);
  if (arrived.source == 0 || find_registered(launch, channel.peer(), arrived.source, posted))
    return kReady;
  record_failure(launch, {FA_UNKNOWN_BUFFER, 1u << channel.peer()}, channel.number);
  return kGivenUp;
}

// After a chunk has been copied, or packets have: tells the receiver. Packets need no order.
FA_FN void end_send(const FaLaunch &launch, const Channel &channel, const Portion &part, FaChunk *slot) {
  if (!is_packets(launch, part))
    fence_release();
  signal_chunk(slot, channel, part, 0);
}

// After a chunk has been read, or the last piece of what was posted, or packets: gives credit.
//
// After what was posted the receiver looks whether the sender has given up, and owns its buffer again. As in
// `revoke` (barrier.cuh): let W be a write of the sender's caller that a read R of this block sees. Were the
// fence here, after R, before the sender's, which is after its store and before W, then R could not see W. So
// it is the other way about, and the look after the fence sees the store.
//
// For packets the credit is relaxed: nobody comes here before they have all been read, and what comes into
// their place later has another mark (lab/litmus/programs/protocol/channel_packets.litmus).
FA_FN u64 end_receive(const FaLaunch &launch, Channel &channel, const Portion &part, bool posted) {
  const bool gives = posted || gives_credit(launch, channel.number);
  const bool in_order = posted || (gives && !(is_packets(launch, part) && channel.has_released));
  if (in_order)
    fence_sc();
  if (posted && load_relaxed(&region_head(launch, launch.rank)->revoked[channel.peer()]) != 0) {
    record_failure(launch, {FA_REVOKED, 1u << channel.peer()}, channel.number);
    return kGivenUp;
  }
  if (gives)
    store_relaxed(&credit_to(launch, channel)->taken, channel.number + 1);
  channel.has_released = in_order || (channel.has_released && is_packets(launch, part));
  return kReady;
}

// Moves what can be moved of a part, at most so many bytes, and sets how many. One body of a copy, whatever
// it is between: it is long.
template <class Block>
FA_FN u64 advance(const FaLaunch &launch, Block &block, Channel &channel, const Portion &part, u64 *bytes) {
  constexpr u64 kPieceBytes = 256 << 10;
  const bool sends = channel.sends(), is_own = channel.peer() == launch.rank;
  const bool packets = !is_own && is_packets(launch, part);
  FaChunk *slot = is_own ? nullptr
                         : chunk_slot(launch, sends ? channel.peer() : launch.rank,
                                      sends ? launch.rank : channel.peer(), channel);
  u64 *posted = block.scratch() + 1, where = 0, to = part.address + channel.done,
      from = part.source + channel.done;
  const bool are_taken = packets && !sends && block.all(take_packets(launch, block, channel, part, slot));
  if (!is_own && !are_taken) {
    const u64 readiness = ask(block, [&] {
      *posted = 0;
      return sends ? look_to_send(launch, channel, part) : look_to_receive(launch, channel, part, posted);
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
  return ask(block, [&]() -> u64 {
    if (!sends)
      return end_receive(launch, channel, part, is_read);
    end_send(launch, channel, part, slot);
    return kReady;
  });
}

// Has `peer` know that what is posted to it is withdrawn: see `end_receive`.
FA_FN void withdraw(const FaLaunch &launch, u32 peer) {
#if !defined(FA_PLANT_NO_WITHDRAWAL)
  store_relaxed(&region_head(launch, peer)->revoked[launch.rank], 1);
#endif
  fence_sc();
}

} // namespace FA_NAMESPACE
