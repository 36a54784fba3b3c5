// How the host moves messages: in chunks, or large ones by reads of the receiver where they are. In a
// registered buffer of the sender; between threads of one process, anywhere; in another process's private
// memory, through the kernel (direct.cuh). The sender posts the address as a chunk, and waits for its credit.
//
// A sender that gives up owns its memory again, which the receiver may be reading. One word of the channel,
// the claim, decides between them. Both change it by read-modify-writes alone, which are in one order:
//
//   sender     sets kWithdrawn before its launch ends
//   receiver   has a read-modify-write after its last read
//
// If the receiver's is the later one it finds kWithdrawn: what it read goes to nobody. If the sender's is the
// later one it reads what the receiver released, or what follows that in a release sequence: the reads happen
// before all that the sender's caller does with the memory.
//
// The memory of a thread may then be unmapped, too. There the receiver sets kReading for each piece and
// clears it after the piece, and reads nothing if kWithdrawn was there before; and a sender that finds
// kReading waits until it is cleared, which takes no longer than a piece. In another process the receiver
// reads a mapping of its own, or has the kernel read, which finds nothing where nothing is mapped any more;
// and the sender waits for nobody: that process may stand still.
//
// Where the kernel does not read, the receiver refuses, beside the credit. The sender finds that with the
// credit, sends the message again as chunks, and posts no private memory to this receiver any more.
//
// kWithdrawn stays: a rank that has given up sends nothing more.
#pragma once

#include "channel.cuh"
#include "direct.cuh"

namespace FA_NAMESPACE {

constexpr u64 kHere = u64(1) << FA_SOURCE_HERE_SHIFT;

constexpr u32 kReading = 1, kWithdrawn = 2;

// What is read between two looks at the other channels. Beside it, claiming a piece takes no time; a system
// call takes more.
constexpr u64 kPieceBytes = 256 << 10, kDirectPieceBytes = 1 << 20;

FA_FN bool is_thread(const FaLaunch &launch, u32 rank) { return (launch.threads >> rank & 1) != 0; }

// Whether a source is private memory, and the other rank another process.
FA_FN bool is_direct(const FaLaunch &launch, u32 peer, u64 source) {
  return (source & kHere) != 0 && !is_thread(launch, peer);
}

// Where the receiver finds a message of `peer`; 0 where it may not look.
FA_FN u64 posted_address(const FaLaunch &launch, u32 peer, u64 source) {
  u64 address;
  if ((source & kHere) == 0)
    return find_registered(launch, peer, source, &address) ? address : 0;
  return is_thread(launch, peer) || is_readable(launch, peer) ? source & ~kHere : 0;
}

enum Reading : u32 { kWasRead, kWasWithdrawn, kUnreadable };

// The claim on what is posted after the last read.
FA_FN Reading after_reading(u32 *claim) {
  return (fetch_or_acq_rel(claim, 0) & kWithdrawn) != 0 ? kWasWithdrawn : kWasRead;
}

// Reads a piece of what `peer` has posted in memory that this process has mapped.
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
  return is_last ? after_reading(claim) : kWasRead;
}

// The same in its private memory, in another process. What cannot be read is refused.
FA_FN Reading read_directly(const FaLaunch &launch, u32 peer, u64 to, u64 from, u64 bytes, bool is_last) {
  u32 *claim = &region_head(launch, peer)->claims[launch.rank].word;
  const bool is_read = copy_from_process(launch, peer, to, from, bytes);
  if (is_read && !is_last)
    return kWasRead;
  const Reading reading = after_reading(claim);
  if (reading == kWasWithdrawn || (is_read && was_there(launch, peer)))
    return reading;
  // The credit that follows releases it.
  store_relaxed(&region_head(launch, peer)->credits[0][launch.rank].refused, 1);
  return kUnreadable;
}

// Whether a message that has a source is sent by that, and not as chunks.
FA_FN bool is_posted(const FaLaunch &launch, Channel &channel, const Portion &part) {
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

// Has the receiver read a message where it is.
FA_FN u64 send_posted(const FaLaunch &launch, Channel &channel, const Portion &part) {
  const u32 peer = channel.peer();
  if (channel.mode == kPosting) {
    const u64 readiness = look_for_credit(launch, channel);
    if (readiness != kReady)
      return readiness;
    if (is_direct(launch, peer, part.source))
      touch_pages(part);
    signal_chunk(chunk_slot(launch, peer, launch.rank, channel), channel, part, part.source);
    channel.mode = kPosted;
    channel.wait = {};
    return kNotYet;
  }
  // Acquire: the receiver's reads come before what the caller does with the memory.
  FaCredit *credit = credit_from(launch, channel);
  channel.credited = load_acquire(&credit->taken);
  if (channel.credited != channel.number + 1)
    return look(launch, channel, false);
  // A refusal comes before the credit.
  if (is_direct(launch, peer, part.source) && load_relaxed(&credit->refused) != 0)
    return kAgain;
  return kReady;
}

// Reads a piece of a message where it is, and sets of how many bytes.
template <class Block>
FA_FN u64 receive_posted(const FaLaunch &launch, Block &block, Channel &channel, const Portion &part,
                         u64 source, u64 *bytes) {
  const u32 peer = channel.peer();
  const u64 address = posted_address(launch, peer, source), left = part.bytes - channel.done;
  if (address == 0) {
    record_failure(launch, {FA_UNKNOWN_BUFFER, 1u << peer}, channel.number);
    return kGivenUp;
  }
  const bool is_elsewhere = is_direct(launch, peer, source);
  const u64 most = is_elsewhere ? kDirectPieceBytes : kPieceBytes;
  *bytes = left < most ? left : most;
  const bool is_last = *bytes == left;
  const u64 to = part.address + channel.done, from = address + channel.done;
  const Reading reading = is_elsewhere ? read_directly(launch, peer, to, from, *bytes, is_last)
                                       : read_mapped(launch, block, peer, to, from, *bytes, is_last);
  // Why the sender has given up it tells when it leaves, in a moment.
  if (reading == kWasWithdrawn)
    return look(launch, channel, false);
  if (reading == kWasRead && !is_last)
    return kPartly;
  if (reading == kWasRead && is_elsewhere && channel.measured != kNotMeasured)
    note_cost(launch, peer, part.bytes, true, channel.measured, now_ns() - channel.start);
  if (reading == kWasRead && is_elsewhere)
    fetch_add_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->read_directly, 1);
  // Release: as in `receive_chunk`. The sender waits for this credit, and looks for a refusal with it.
  store_release(&credit_to(launch, channel)->taken, channel.number + 1);
  return reading == kWasRead ? kReady : kAgain;
}

// Sends one chunk, of so many bytes.
template <class Block>
FA_FN u64 send_chunk(const FaLaunch &launch, Block &block, Channel &channel, const Portion &part, u64 bytes) {
  const u64 readiness = look_for_credit(launch, channel);
  if (readiness != kReady)
    return readiness;
  FaChunk *slot = chunk_slot(launch, channel.peer(), launch.rank, channel);
  copy_bytes(block, chunk_data(launch, slot), part.address + channel.done, bytes, part.bytes);
  signal_chunk(slot, channel, part, 0);
  return kReady;
}

// Receives one chunk, of so many bytes; or a piece of what is elsewhere, and sets how many.
template <class Block>
FA_FN u64 receive_chunk(const FaLaunch &launch, Block &block, Channel &channel, const Portion &part,
                        u64 *bytes) {
  FaChunk *slot = chunk_slot(launch, launch.rank, channel.peer(), channel);
  Arrived arrived;
  const bool has_come = look_at_chunk(slot, channel, &arrived);
  const u64 seen = check_chunk(launch, channel, part, has_come, arrived);
  if (seen != kReady)
    return seen;
  if (channel.done == 0)
    channel.measured = arrived.measured;
  if (channel.measured != kNotMeasured && channel.done == 0)
    channel.start = now_ns();
  if (arrived.source != 0)
    return receive_posted(launch, block, channel, part, arrived.source, bytes);
  copy_bytes(block, part.address + channel.done, chunk_data(launch, slot), *bytes);
  if (channel.measured != kNotMeasured && channel.done + *bytes == part.bytes)
    note_cost(launch, channel.peer(), part.bytes, false, channel.measured, now_ns() - channel.start);
  // Release: the reads, of this chunk and of those before it, come before the slots are the sender's again.
  if (gives_credit(launch, channel.number))
    store_release(&credit_to(launch, channel)->taken, channel.number + 1);
  return kReady;
}

// Moves what can be moved of a part, so many bytes or others, and sets how many.
template <class Block>
FA_FN u64 advance(const FaLaunch &launch, Block &block, Channel &channel, const Portion &part, u64 *bytes) {
  // What a rank sends itself goes through no channel.
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

// Has `peer` know that what is posted to it is withdrawn.
FA_COLD void withdraw(const FaLaunch &launch, u32 peer) {
#if defined(FA_PLANT_NO_WITHDRAWAL)
  (void)launch, (void)peer;
#else
  u32 *claim = &region_head(launch, launch.rank)->claims[peer].word;
  fetch_or_acq_rel(claim, kWithdrawn);
  // Acquire: the reads come before what the caller does next.
  while (is_thread(launch, peer) && (load_acquire(claim) & kReading) != 0)
    sched_yield();
#endif
}

} // namespace FA_NAMESPACE
