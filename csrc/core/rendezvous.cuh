// How the host moves messages: in chunks, or, if they are large, by letting the receiver read them where they
// are: in a registered buffer of the sender, in any memory of another thread of the process, or, through the
// operating system, in private memory of another process (direct.cuh). The sender posts the address as a
// chunk and waits for its credit.
//
// A sender that fails owns its memory again while the receiver may be reading it. One word of the channel,
// the claim, decides. Both ranks change it only by read-modify-writes, which have one total order:
//
//   sender     sets kWithdrawn before its launch ends
//   receiver   has a read-modify-write after its last read
//
// If the receiver's is later, it finds kWithdrawn and discards what it read. If the sender's is later, it
// reads the value that the receiver released, or a later one in its release sequence, so that the reads
// happen before everything that the sender's caller does with the memory.
//
// Memory of a thread may then even be unmapped. So between threads the receiver sets kReading for each piece
// and clears it afterwards, and reads nothing if kWithdrawn was already set. A sender that finds kReading
// waits until it is cleared, which takes no longer than a piece. Between processes the receiver reads its own
// mapping, or the operating system reads for it and reports unmapped memory. There the sender does not wait,
// because the other process may be stopped.
//
// Where the operating system cannot read, the receiver sets `refused` next to the credit. The sender finds it
// with the credit, sends the message again as chunks, and posts no more private memory to this receiver.
//
// kWithdrawn is never cleared: a rank that has failed sends nothing more.
#pragma once

#include "channel.cuh"
#include "direct.cuh"

namespace FA_NAMESPACE {

constexpr u64 kPrivate = u64(1) << FA_SOURCE_PRIVATE_SHIFT;

constexpr u32 kReading = 1, kWithdrawn = 2;

// Bytes read between two polls of the other channels: enough to make the cost of a claim negligible, and
// more where each piece is a system call.
constexpr u64 kPieceBytes = 256 << 10, kDirectPieceBytes = 1 << 20;

FA_FN bool is_thread(const FaLaunch &launch, u32 rank) { return (launch.threads >> rank & 1) != 0; }

// Returns whether a source is private memory of another process.
FA_FN bool is_direct(const FaLaunch &launch, u32 peer, u64 source) {
  return (source & kPrivate) != 0 && !is_thread(launch, peer);
}

// The address at which this rank reads a message of `peer`; 0 if it must not.
FA_FN u64 posted_address(const FaLaunch &launch, u32 peer, u64 source) {
  u64 address;
  if ((source & kPrivate) == 0)
    return find_registered(launch, peer, source, &address) ? address : 0;
  return is_thread(launch, peer) || is_readable(launch, peer) ? source & ~kPrivate : 0;
}

enum Reading : u32 { kWasRead, kWasWithdrawn, kUnreadable };

// Checks the claim after the last read of a posted message.
FA_FN Reading check_claim(u32 *claim) {
  return (fetch_or_acq_rel(claim, 0) & kWithdrawn) != 0 ? kWasWithdrawn : kWasRead;
}

// Reads a piece of a message that `peer` has posted in memory that this process has mapped.
template <class Block>
FA_FN Reading read_mapped(const FaLaunch &launch, const Block &block, u32 peer, u64 to, u64 from, u64 bytes,
                          bool is_last) {
  u32 *claim = &region_head(launch, peer)->claims[launch.rank].word;
  if (is_thread(launch, peer)) {
    const bool withdrawn = (fetch_or_acq_rel(claim, kReading) & kWithdrawn) != 0;
    if (!withdrawn)
      copy_bytes(block, to, from, bytes);
    fetch_and_acq_rel(claim, ~kReading);
    return withdrawn ? kWasWithdrawn : kWasRead;
  }
  copy_bytes(block, to, from, bytes);
  return is_last ? check_claim(claim) : kWasRead;
}

// Reads a piece of a message in private memory of another process. Refuses it if that fails.
FA_FN Reading read_directly(const FaLaunch &launch, u32 peer, u64 to, u64 from, u64 bytes, bool is_last) {
  u32 *claim = &region_head(launch, peer)->claims[launch.rank].word;
  const bool is_read = copy_from_process(launch, peer, to, from, bytes);
  if (is_read && !is_last)
    return kWasRead;
  const Reading reading = check_claim(claim);
  if (reading == kWasWithdrawn || (is_read && read_is_valid(launch, peer)))
    return reading;
  // Released by the credit that follows.
  store_relaxed(&region_head(launch, peer)->credits[0][launch.rank].refused, 1);
  return kUnreadable;
}

// Returns whether to post a message that has a source, rather than send it as chunks.
FA_FN bool is_posted(const FaLaunch &launch, Channel &channel, const StripePart &part) {
  if (channel.mode == kUndecided) {
    const u32 peer = channel.peer();
    const bool may_be_chunks = is_direct(launch, peer, part.source);
    const u32 *first = reinterpret_cast<const FaTransfers *>(launch.operands)->first;
    const bool both = first[2 * peer + 1] != first[2 * peer + 2];
    const auto [mode, measured] =
        may_be_chunks ? choose_mode(launch, peer, part.whole, both) : Choice{kPosting, kNotMeasured};
    channel.mode = u8(mode), channel.measured = measured;
  }
  return channel.mode == kPosting || channel.mode == kPosted;
}

// Posts a message, then waits until the receiver has read it.
FA_FN u64 send_posted(const FaLaunch &launch, Channel &channel, const StripePart &part) {
  const u32 peer = channel.peer();
  if (channel.mode == kPosting) {
    const u64 readiness = poll_credit(launch, channel);
    if (readiness != kReady)
      return readiness;
    if (is_direct(launch, peer, part.source))
      touch_pages(part);
    signal_chunk(chunk_slot(launch, peer, launch.rank, channel), channel, part, part.source);
    channel.mode = kPosted;
    channel.wait = {};
    return kNotReady;
  }
  // Acquire: the receiver's reads come before what the caller does with the memory.
  FaCredit *credit = credit_from(launch, channel);
  channel.credited = load_acquire(&credit->taken);
  if (channel.credited != channel.number + 1)
    return poll_outcome(launch, channel, false);
  // A refusal is stored before the credit.
  if (is_direct(launch, peer, part.source) && load_relaxed(&credit->refused) != 0)
    return kRefused;
  return kReady;
}

// Reads a piece of a posted message, and sets *bytes to its size.
template <class Block>
FA_FN u64 receive_posted(const FaLaunch &launch, Block &block, Channel &channel, const StripePart &part,
                         u64 source, u64 *bytes) {
  const u32 peer = channel.peer();
  const u64 address = posted_address(launch, peer, source), left = part.bytes - channel.done;
  if (address == 0) {
    record_failure(launch, {FA_UNKNOWN_BUFFER, 1u << peer}, channel.number);
    return kFailed;
  }
  const bool is_elsewhere = is_direct(launch, peer, source);
  const u64 most = is_elsewhere ? kDirectPieceBytes : kPieceBytes;
  *bytes = left < most ? left : most;
  const bool is_last = *bytes == left;
  const u64 to = part.address + channel.done, from = address + channel.done;
  const Reading reading = is_elsewhere ? read_directly(launch, peer, to, from, *bytes, is_last)
                                       : read_mapped(launch, block, peer, to, from, *bytes, is_last);
  // The sender reports why it has failed when it leaves, which is soon.
  if (reading == kWasWithdrawn)
    return poll_outcome(launch, channel, false);
  if (reading == kWasRead && !is_last)
    return kPartly;
  if (reading == kWasRead && is_elsewhere && channel.measured != kNotMeasured)
    update_cost(launch, peer, part.bytes, true, channel.measured, now_ns() - channel.start);
  if (reading == kWasRead && is_elsewhere)
    fetch_add_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->read_directly, 1);
  // Release: as in `receive_chunk`. The sender waits for this credit, and then checks for a refusal.
  store_release(&credit_to(launch, channel)->taken, channel.number + 1);
  return reading == kWasRead ? kReady : kRefused;
}

// Sends one chunk of `bytes` bytes.
template <class Block>
FA_FN u64 send_chunk(const FaLaunch &launch, Block &block, Channel &channel, const StripePart &part,
                     u64 bytes) {
  const u64 readiness = poll_credit(launch, channel);
  if (readiness != kReady)
    return readiness;
  FaChunk *slot = chunk_slot(launch, channel.peer(), launch.rank, channel);
  copy_bytes(block, chunk_data(launch, slot), part.address + channel.done, bytes, part.bytes);
  signal_chunk(slot, channel, part, 0);
  return kReady;
}

// Receives one chunk of *bytes bytes; or a piece of a posted message, and sets *bytes to its size.
template <class Block>
FA_FN u64 receive_chunk(const FaLaunch &launch, Block &block, Channel &channel, const StripePart &part,
                        u64 *bytes) {
  FaChunk *slot = chunk_slot(launch, launch.rank, channel.peer(), channel);
  ChunkInfo info;
  const bool has_come = read_chunk(slot, channel, &info);
  const u64 seen = check_chunk(launch, channel, part, has_come, info);
  if (seen != kReady)
    return seen;
  if (channel.done == 0)
    channel.measured = info.measured;
  if (channel.measured != kNotMeasured && channel.done == 0)
    channel.start = now_ns();
  if (info.source != 0)
    return receive_posted(launch, block, channel, part, info.source, bytes);
  copy_bytes(block, part.address + channel.done, chunk_data(launch, slot), *bytes);
  if (channel.measured != kNotMeasured && channel.done + *bytes == part.bytes)
    update_cost(launch, channel.peer(), part.bytes, false, channel.measured, now_ns() - channel.start);
  // Release: the reads of this chunk and of earlier ones come before the slots belong to the sender again.
  if (gives_credit(launch, channel.number))
    store_release(&credit_to(launch, channel)->taken, channel.number + 1);
  return kReady;
}

// Moves the next chunk of a part, of *bytes bytes, or a piece of a posted part, and sets *bytes to its
// size.
template <class Block>
FA_FN u64 advance(const FaLaunch &launch, Block &block, Channel &channel, const StripePart &part,
                  u64 *bytes) {
  // Messages from a rank to itself use no channel.
  if (channel.peer() == launch.rank) {
    const u64 left = part.bytes - channel.done;
    *bytes = left < kDirectPieceBytes ? left : kDirectPieceBytes;
    copy_bytes(block, part.address + channel.done, part.source + channel.done, *bytes);
    return kReady;
  }
  if (!channel.sends())
    return receive_chunk(launch, block, channel, part, bytes);
  if (part.source == 0 || !is_posted(launch, channel, part))
    return send_chunk(launch, block, channel, part, *bytes);
  *bytes = part.bytes - channel.done;
  return send_posted(launch, channel, part);
}

// Withdraws what is posted to `peer`.
FA_HOST_COLD void withdraw(const FaLaunch &launch, u32 peer) {
#if defined(FA_PLANT_NO_WITHDRAWAL)
  (void)launch, (void)peer;
#else
  u32 *claim = &own_head(launch)->claims[peer].word;
  fetch_or_acq_rel(claim, kWithdrawn);
  // Acquire: the receiver's reads come before what the caller does next.
  while (is_thread(launch, peer) && (load_acquire(claim) & kReading) != 0)
    sched_yield();
#endif
}

} // namespace FA_NAMESPACE
