// Transfers: any number of messages between pairs of ranks in one launch. All channels go on side by side, a
// chunk at a time, so that no order in which ranks name their messages can make them wait for each other in a
// circle. Ranks that no message is to or from take no part: the launch has no epoch.
//
// A channel is one block's, whatever the launch: block c % blocks has channel c.
#pragma once

#include "../core/channel.cuh"
#if !FA_CUDA
#include "../core/rendezvous.cuh"
#endif

namespace FA_NAMESPACE {

// One direction between this rank and a peer, as far as the launch has come.
struct Channel {
  u32 at;       // the transfer that is next or under way
  u32 number;   // chunks that have gone through the channel, ever
  u32 credited; // where this rank sends: those of them for which it has seen credit
  u32 way;      // enum Way: how this rank sends the transfer, where the receiver may read it where it is
  u64 done;     // bytes of the transfer that have gone through
  Backoff wait; // for the next chunk or credit
#if !FA_CUDA
  u32 measured = kNotMeasured; // enum Measured: the transfer
  u64 start = 0;               // when the first of it was seen
#endif
};

// What of a message of the host to itself is copied at a time. In between the other channels go on.
constexpr u64 kOwnPieceBytes = 1 << 20;

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
FA_FN u64 look(const FaLaunch &launch, Channel &channel, u32 peer, bool ready) {
  if (ready)
    return kReady;
  return succeeded(launch, channel.wait.pause(launch, peer), channel.number) ? kNotYet : kGivenUp;
}

// What came, or what this rank was to receive.
FA_FN void record_other_message(const FaLaunch &launch, u32 rank, u32 tag, u64 bytes) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  store_relaxed(&status->others[rank].what, u64(1) << 32 | tag);
  store_relaxed(&status->others[rank].count, bytes);
}

// Whether there is a slot for the next chunk.
FA_FN u64 look_for_credit(const FaLaunch &launch, Channel &channel, u32 peer) {
  // The line of the credits is the receiver's: it is read when those that were seen are used up.
  if (channel.number - channel.credited < launch.channel_slots)
    return kReady;
  channel.credited = load_acquire(&region_head(launch, launch.rank)->credits[peer].taken);
  return look(launch, channel, peer, channel.number - channel.credited < launch.channel_slots);
}

// Tells the receiver of a chunk. `source` is 0 if its data is in the slot.
FA_FN void signal_chunk(FaChunk *signal, const Channel &channel, const FaTransfer &message, u64 source) {
  const u32 number = channel.number;
  store_relaxed(&signal->tag, message.tag);
  store_relaxed(&signal->bytes, message.bytes);
  store_relaxed(&signal->source, source);
#if !FA_CUDA
  store_relaxed(&signal->measured, channel.measured);
#endif
#if defined(FA_PLANT_RELAXED_CHUNK)
  store_relaxed(&signal->number, number + 1);
  return;
#endif
  // Release: the data and what is said of it come before the number.
  store_release(&signal->number, number + 1);
}

// Sends one chunk, of so many bytes.
template <class Block>
FA_FN u64 send_chunk(const FaLaunch &launch, Block &block, u32 peer, Channel &channel,
                     const FaTransfer &message, u64 bytes) {
  const u32 number = channel.number;
  const u64 readiness = ask(block, [&] { return look_for_credit(launch, channel, peer); });
  if (readiness != kReady)
    return readiness;
  FaChunk *signal = chunk_slot(launch, peer, launch.rank, number);
  copy_bytes(block, chunk_data(signal), message.address + channel.done, bytes, message.bytes);
  block.sync();
  block.lanes(1, [&](u32) { signal_chunk(signal, channel, message, 0); });
  return kReady;
}

#if !FA_CUDA
// Whether a message that has a source is sent by that, and not as chunks.
FA_FN bool is_posted(const FaLaunch &launch, Channel &channel, u32 peer, const FaTransfer &message) {
  if (channel.way == kUndecided) {
    const bool may_be_chunks = is_direct(launch, peer, message.source);
    const u32 *first = reinterpret_cast<const FaTransfers *>(launch.operands)->first;
    const bool both = first[2 * peer + 1] != first[2 * peer + 2];
    const auto [way, measured] =
        may_be_chunks ? choose_way(launch, peer, message.bytes, both) : Choice{kPosting, kNotMeasured};
    channel.way = way, channel.measured = measured;
  }
  return channel.way == kPosting || channel.way == kPosted;
}

// Has the receiver read a message where it is.
FA_FN u64 send_posted(const FaLaunch &launch, Channel &channel, u32 peer, const FaTransfer &message) {
  if (channel.way == kPosting) {
    const u64 readiness = look_for_credit(launch, channel, peer);
    if (readiness != kReady)
      return readiness;
    if (is_direct(launch, peer, message.source))
      touch_pages(message);
    FaChunk *signal = chunk_slot(launch, peer, launch.rank, channel.number);
    signal_chunk(signal, channel, message, message.source);
    channel.way = kPosted;
    channel.wait = {};
    return kNotYet;
  }
  // Acquire: the receiver's reads come before what the caller does with the memory.
  FaCredit *credit = &region_head(launch, launch.rank)->credits[peer];
  channel.credited = load_acquire(&credit->taken);
  if (channel.credited != channel.number + 1)
    return look(launch, channel, peer, false);
  // A refusal comes before the credit.
  if (is_direct(launch, peer, message.source) && load_relaxed(&credit->refused) != 0)
    return kAgain;
  return kReady;
}

// Reads a piece of a message where it is, of `bytes` bytes.
template <class Block>
FA_FN u64 receive_posted(const FaLaunch &launch, Block &block, u32 peer, Channel &channel,
                         const FaTransfer &message, u64 source, u64 *bytes) {
  const u64 address = posted_address(launch, peer, source), left = message.bytes - channel.done;
  if (address == 0) {
    record_failure(launch, {FA_UNKNOWN_BUFFER, 1u << peer}, channel.number);
    return kGivenUp;
  }
  const bool is_elsewhere = is_direct(launch, peer, source);
  const u64 most = is_elsewhere ? kDirectPieceBytes : kPieceBytes;
  *bytes = left < most ? left : most;
  const bool is_last = *bytes == left;
  const u64 to = message.address + channel.done, from = address + channel.done;
  const Reading reading = is_elsewhere ? read_directly(launch, peer, to, from, *bytes, is_last)
                                       : read_mapped(launch, block, peer, to, from, *bytes, is_last);
  // Why the sender has given up it tells when it leaves, in a moment.
  if (reading == kWasWithdrawn)
    return look(launch, channel, peer, false);
  if (reading == kWasRead && !is_last)
    return kPartly;
  if (reading == kWasRead && is_elsewhere && channel.measured != kNotMeasured)
    note_cost(launch, peer, message.bytes, true, channel.measured, now_ns() - channel.start);
  if (reading == kWasRead && is_elsewhere)
    fetch_add_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->read_directly, 1);
  // Release: as in `receive_chunk`. The sender waits for this credit, and looks for a refusal with it.
  store_release(&region_head(launch, peer)->credits[launch.rank].taken, channel.number + 1);
  return reading == kWasRead ? kReady : kAgain;
}
#endif

// Receives one chunk, of so many bytes; or a piece of a message that is elsewhere, and sets how many.
template <class Block>
FA_FN u64 receive_chunk(const FaLaunch &launch, Block &block, u32 peer, Channel &channel,
                        const FaTransfer &message, u64 *bytes) {
  const u32 number = channel.number;
  FaChunk *signal = chunk_slot(launch, launch.rank, peer, number);
  const u64 readiness = ask(block, [&]() -> u64 {
    // Equality is enough: the sender sets the slot's next number only when it has the credit for this one.
    if (load_acquire(&signal->number) != number + 1)
      return look(launch, channel, peer, false);
    const u32 tag = load_relaxed(&signal->tag);
    const u64 sent = load_relaxed(&signal->bytes);
    if (tag == message.tag && sent == message.bytes)
      return kReady;
    record_other_message(launch, peer, tag, sent);
    record_other_message(launch, launch.rank, message.tag, message.bytes);
    record_failure(launch, {FA_OTHER_MESSAGE, 1u << peer}, number);
    return kGivenUp;
  });
  if (readiness != kReady)
    return readiness;
#if !FA_CUDA
  if (channel.done == 0)
    channel.measured = load_relaxed(&signal->measured);
  if (channel.measured != kNotMeasured && channel.done == 0)
    channel.start = now_ns();
  if (const u64 source = load_relaxed(&signal->source); source != 0)
    return receive_posted(launch, block, peer, channel, message, source, bytes);
#endif
  copy_bytes(block, message.address + channel.done, chunk_data(signal), *bytes);
#if !FA_CUDA
  if (channel.measured != kNotMeasured && channel.done + *bytes == message.bytes)
    note_cost(launch, peer, message.bytes, false, channel.measured, now_ns() - channel.start);
#endif
  block.sync();
  // Release: the reads, of this chunk and of those before it, come before the slots are the sender's again.
  if (gives_credit(launch, number))
    block.lanes(
        1, [&](u32) { store_release(&region_head(launch, peer)->credits[launch.rank].taken, number + 1); });
  return kReady;
}

// The end of a launch that fails: nobody reads what is posted any more. is_open(c): channel c has a transfer
// left.
template <class Block, class IsOpen>
FA_FN void give_up(const FaLaunch &launch, const Block &block, const Channel *channels, IsOpen is_open) {
#if FA_CUDA
  (void)launch, (void)block, (void)channels, (void)is_open;
#else
  for (u32 c = block.index(); c < 2 * launch.world; c += block.count()) {
    if (c % 2 == 0 && is_open(c) && channels[c].way == kPosted)
      withdraw(launch, c / 2);
  }
#endif
}

template <class Block>
FA_FN void transfer(const FaLaunch &launch, Block &block, const FaTransfers &transfers) {
  FaRegionHead *head = region_head(launch, launch.rank);
  // As in `same_call`.
  if (FA_STREAMS && !block.all(load_relaxed(&head->failed) == 0))
    return;
#if FA_CUDA
  // One thread changes them, between two syncs: an array of each thread's own would be a stack frame.
  __shared__ __align__(8) u8 storage[2 * FA_MAX_RANKS * sizeof(Channel)];
#else
  // Not all are used, and small messages feel what is set for nothing.
  alignas(Channel) u8 storage[2 * FA_MAX_RANKS * sizeof(Channel)];
#endif
  Channel *channels = reinterpret_cast<Channel *>(storage);
  const u32 count = 2 * launch.world, stride = block.count();
  const auto is_used = [&](u32 c) { return transfers.first[c] != transfers.first[c + 1]; };
  block.lanes(1, [&](u32) {
    for (u32 c = block.index(); c < count; c += stride) {
      const u32 peer = c / 2;
      const bool sends = c % 2 == 0;
      // The counts of the other direction may be another block's.
      if (is_used(c))
        channels[c] = {transfers.first[c],
                       sends ? head->sent[peer] : head->received[peer],
                       sends ? head->credited[peer] : 0,
                       0,
                       0,
                       {}};
    }
  });
  block.sync();
  const auto is_open = [&](u32 c) { return is_used(c) && channels[c].at != transfers.first[c + 1]; };

  for (bool busy = true; busy;) {
    busy = false;
    for (u32 c = block.index(); c < count; c += stride) {
      if (!is_open(c))
        continue;
      Channel &channel = channels[c];
      const u32 at = channel.at;
      busy = true;
      const u32 peer = c / 2;
      const FaTransfer &message = transfers.transfer[at];
      const u64 left = message.bytes - channel.done;
      u64 bytes = left < launch.chunk_bytes ? left : launch.chunk_bytes;
      u64 outcome = kReady;
      // What a rank sends itself goes through no channel.
      if (!FA_CUDA && peer == launch.rank)
        bytes = left < kOwnPieceBytes ? left : kOwnPieceBytes;
      if (peer == launch.rank)
        copy_bytes(block, message.address + channel.done, message.source + channel.done, bytes);
#if !FA_CUDA
      else if (c % 2 == 0 && message.source != 0 && is_posted(launch, channel, peer, message))
        outcome = send_posted(launch, channel, peer, message), bytes = left;
#endif
      else if (c % 2 == 0)
        outcome = send_chunk(launch, block, peer, channel, message, bytes);
      else
        outcome = receive_chunk(launch, block, peer, channel, message, &bytes);
      if (outcome == kGivenUp)
        return give_up(launch, block, channels, is_open);
      if (outcome == kNotYet)
        continue;
      // All threads have read it.
      block.sync();
      block.lanes(1, [&](u32) {
        const bool is_whole = outcome != kAgain && bytes == left;
        channel.number += peer != launch.rank && outcome != kPartly;
        channel.wait = {};
#if !FA_CUDA
        channel.way = outcome == kAgain ? u32(kChunks) : is_whole ? u32(kUndecided) : channel.way;
        if (is_whole || outcome == kAgain)
          channel.measured = kNotMeasured;
#endif
        channel.done = is_whole || outcome == kAgain ? 0 : channel.done + bytes;
        channel.at += is_whole;
      });
      block.sync();
    }
  }

  // No other block has these channels.
  block.lanes(1, [&](u32) {
    for (u32 c = block.index(); c < count; c += stride) {
      if (!is_used(c))
        continue;
      // Through a pointer: the sanitizer of GCC 12 takes the index of a conditional array wrongly.
      u32 *const numbers = c % 2 == 0 ? head->sent : head->received;
      numbers[c / 2] = channels[c].number;
      if (c % 2 == 0)
        head->credited[c / 2] = channels[c].credited;
    }
  });
}

} // namespace FA_NAMESPACE
