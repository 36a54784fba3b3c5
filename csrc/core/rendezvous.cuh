// Large messages of the host that the receiver reads where they are: in a registered buffer of the sender;
// between threads of one process, anywhere; in another process's private memory, through the kernel
// (direct.cuh). The sender posts the address as a chunk, and waits for its credit.
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
  store_relaxed(&region_head(launch, peer)->credits[launch.rank].refused, 1);
  return kUnreadable;
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
