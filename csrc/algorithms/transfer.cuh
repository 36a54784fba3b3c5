// Transfers: any number of messages between pairs of ranks in one launch. All channels go on side by side, a
// chunk at a time, so that no order in which ranks name their messages can make them wait for each other in a
// circle. Ranks that no message is to or from take no part: this is no launch of the region's turns.
//
// A channel is one block's, whatever the launch: block c % blocks has channel c.
#pragma once

#include "../core/channel.cuh"

namespace FA_NAMESPACE {

// One direction between this rank and a peer, as far as the launch has come.
struct Channel {
  u32 at;        // the transfer that is next or under way
  u32 number;    // chunks that have gone through the channel, ever
  u64 done;      // bytes of the transfer that have gone through
  Patience wait; // for the next chunk or credit
};

// Whether a channel can move a chunk now. The outcome is that of one thread, seen by all.
enum Readiness : u64 { kNotYet, kReady, kGivenUp };

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
FA_FN u64 look(const FaLaunch &launch, Channel &channel, u32 peer, bool ready) {
  if (ready)
    return kReady;
  return channel.wait.another_poll(launch, peer, channel.number) ? kNotYet : kGivenUp;
}

// What came, or what this rank was to receive.
FA_FN void record_other_message(const FaLaunch &launch, u32 rank, u32 tag, u64 bytes) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  store_relaxed(&status->others[rank].what, u64(1) << 32 | tag);
  store_relaxed(&status->others[rank].count, bytes);
}

// Sends one chunk, of so many bytes.
template <class Block>
FA_FN u64 send_chunk(const FaLaunch &launch, Block &block, u32 peer, Channel &channel,
                     const FaTransfer &message, u64 bytes) {
  const u32 number = channel.number;
  const u64 readiness = ask(block, [&] {
    const u32 taken = load_acquire(&region_head(launch, launch.rank)->credits[peer].taken);
    return look(launch, channel, peer, number - taken < FA_CHANNEL_SLOTS);
  });
  if (readiness != kReady)
    return readiness;
  copy_bytes(block, u64(chunk_slot(launch, peer, launch.rank, number)), message.address + channel.done,
             bytes);
  block.sync();
  block.lanes(1, [&](u32) {
    FaChunk *signal = chunk_signal(launch, peer, launch.rank, number);
    store_relaxed(&signal->tag, message.tag);
    store_relaxed(&signal->bytes, message.bytes);
#if defined(FA_PLANT_RELAXED_CHUNK)
    store_relaxed(&signal->number, number + 1);
    return;
#endif
    // Release: the data and what is said of it come before the number.
    store_release(&signal->number, number + 1);
  });
  return kReady;
}

// Receives one chunk.
template <class Block>
FA_FN u64 receive_chunk(const FaLaunch &launch, Block &block, u32 peer, Channel &channel,
                        const FaTransfer &message, u64 bytes) {
  const u32 number = channel.number;
  const u64 readiness = ask(block, [&]() -> u64 {
    const FaChunk *signal = chunk_signal(launch, launch.rank, peer, number);
    // Equality is enough: the sender sets the slot's next number only when it has the credit for this one.
    if (load_acquire(&signal->number) != number + 1)
      return look(launch, channel, peer, false);
    const u32 tag = load_relaxed(&signal->tag);
    const u64 sent = load_relaxed(&signal->bytes);
    if (tag == message.tag && sent == message.bytes)
      return kReady;
    record_other_message(launch, peer, tag, sent);
    record_other_message(launch, launch.rank, message.tag, message.bytes);
    record_failure(launch, FA_OTHER_MESSAGE, 1u << peer, number);
    return kGivenUp;
  });
  if (readiness != kReady)
    return readiness;
  copy_bytes(block, message.address + channel.done, u64(chunk_slot(launch, launch.rank, peer, number)),
             bytes);
  block.sync();
  // Release: the reads come before the slot is the sender's again.
  block.lanes(
      1, [&](u32) { store_release(&region_head(launch, peer)->credits[launch.rank].taken, number + 1); });
  return kReady;
}

template <class Block>
FA_FN void transfer(const FaLaunch &launch, Block &block, const FaTransfers &transfers) {
  FaRegionHead *head = region_head(launch, launch.rank);
  if (FA_STREAMS && load_relaxed(&head->failed) != 0)
    return;
#if FA_CUDA
  // One thread changes them, between two syncs: an array of each thread's own would be a stack frame.
  __shared__ __align__(8) u8 storage[2 * FA_MAX_RANKS * sizeof(Channel)];
  Channel *channels = reinterpret_cast<Channel *>(storage);
#else
  Channel channels[2 * FA_MAX_RANKS];
#endif
  const u32 count = 2 * launch.world, stride = block.count();
  block.lanes(1, [&](u32) {
    for (u32 c = block.index(); c < count; c += stride) {
      const u32 peer = c / 2;
      channels[c] = {transfers.first[c], c % 2 == 0 ? head->sent[peer] : head->received[peer], 0, {}};
    }
  });
  block.sync();

  for (bool busy = true; busy;) {
    busy = false;
    for (u32 c = block.index(); c < count; c += stride) {
      Channel &channel = channels[c];
      const u32 at = channel.at;
      if (at == transfers.first[c + 1])
        continue;
      busy = true;
      const u32 peer = c / 2;
      const FaTransfer &message = transfers.transfer[at];
      const u64 left = message.bytes - channel.done;
      // What a rank sends itself goes through no channel.
      const u64 most = peer == launch.rank ? left : chunk_bytes(launch), bytes = left < most ? left : most;
      u64 outcome = kReady;
      if (peer == launch.rank)
        copy_bytes(block, message.address, message.source, bytes);
      else if (c % 2 == 0)
        outcome = send_chunk(launch, block, peer, channel, message, bytes);
      else
        outcome = receive_chunk(launch, block, peer, channel, message, bytes);
      if (outcome == kGivenUp)
        return;
      if (outcome == kNotYet)
        continue;
      // All threads have read it.
      block.sync();
      block.lanes(1, [&](u32) {
        channel.number += peer != launch.rank;
        channel.wait = {};
        channel.done = bytes == left ? 0 : channel.done + bytes;
        channel.at += bytes == left;
      });
      block.sync();
    }
  }

  // No other block has these channels.
  block.lanes(1, [&](u32) {
    for (u32 c = block.index(); c < count; c += stride) {
      u32 *number = c % 2 == 0 ? &head->sent[c / 2] : &head->received[c / 2];
      *number = channels[c].number;
    }
  });
}

} // namespace FA_NAMESPACE
