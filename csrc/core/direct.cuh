// Direct reads: the receiver of a large message has the kernel copy it from private memory of the sender, in
// another process (process_vm_readv, "cross-memory attach"). One copy instead of the channel's two, but the
// kernel pins each page first, and nothing overlaps: which is faster depends on how fast lines travel between
// the cores. So both ways are measured while messages are sent.
//
// The receiver measures, from the first that it sees of a message to its end, where the sender says so, and
// writes the costs to the sender. The sender compares those of both ways for each size, and now and then
// takes the other way for some messages: machines change. Where messages go both ways, the costs of both
// directions count, so that both ranks come to the same: one that reads while the other sends chunks would
// keep it waiting.
#pragma once

#include "wait.cuh"

#include <linux/futex.h>
#include <sys/uio.h>

namespace FA_NAMESPACE {

FA_FN const FaDirect &direct_reads(const FaLaunch &launch) {
  return *reinterpret_cast<const FaDirect *>(launch.direct);
}

// Whether this rank can read in the process of `rank`.
FA_FN bool is_readable(const FaLaunch &launch, u32 rank) {
  return launch.direct != 0 && direct_reads(launch).process[rank] != 0;
}

// Reads a byte of each page of a message that its receiver is to read. No limit of ours ends process_vm_readv
// while it waits for a page, of a file whose server does not answer, say: so the rank whose memory it is
// waits first. Not piece by piece beside the reading, as a rank that also reads has no time for it then.
FA_FN void touch_pages(const FaTransfer &message) {
  constexpr u64 kPage = 4096;
  const u64 end = message.address + message.bytes;
  for (u64 at = message.address; at < end; at = (at & ~(kPage - 1)) + kPage)
    (void)*reinterpret_cast<const volatile u8 *>(at);
}

// Copies from memory of `rank`, in its process. False: not all of it could be read.
FA_COLD bool copy_from_process(const FaLaunch &launch, u32 rank, u64 to, u64 from, u64 bytes) {
  const pid_t process = pid_t(direct_reads(launch).process[rank]);
  while (bytes != 0) {
    const iovec here = {reinterpret_cast<void *>(to), bytes};
    const iovec there = {reinterpret_cast<void *>(from), bytes};
    const ssize_t copied = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (copied <= 0)
      return false;
    to += u64(copied), from += u64(copied), bytes -= u64(copied);
  }
  return true;
}

// Whether what has been read came from the process of `rank`. Its id may be another process's by now, or its
// memory that of another program. Before either, the kernel marks the word; so if it has not been marked
// after the reads, they were of the rank's memory. The fence: the look comes after the reads.
FA_COLD bool was_there(const FaLaunch &launch, u32 rank) {
#if defined(FA_PLANT_NO_LIFE)
  (void)launch, (void)rank;
  return true;
#else
  fence_sc();
  const u32 life = load_acquire(reinterpret_cast<const u32 *>(direct_reads(launch).life[rank]));
  return life != 0 && (life & FUTEX_OWNER_DIED) == 0;
#endif
}

// Which of the sizes that are measured apart a message is of.
FA_FN u32 direct_size(u64 bytes) {
  constexpr u32 kLeast = 31 - __builtin_clz(FA_LEAST_DIRECT_BYTES);
  const u32 size = 63 - u32(__builtin_clzll(bytes | FA_LEAST_DIRECT_BYTES)) - kLeast;
  return size < FA_DIRECT_SIZES ? size : FA_DIRECT_SIZES - 1;
}

// What the receiver is to do about the cost of a message: nothing; note it; forget what it knew of this way
// before; note it if it is lower.
enum Measured : u32 { kNotMeasured, kMeasured, kMeasuredAnew, kMeasuredLeast };

struct Choice {
  TransferMode mode;
  Measured measured;
};

// The costs of both ways for one size; of none, as long as one is not known.
struct Comparison {
  u64 channel;
  u64 direct;
};

FA_FN Comparison compare_modes(const FaCosts &costs, u32 size) {
  const u32 channel = load_relaxed(&costs.channel[size]), direct = load_relaxed(&costs.direct[size]);
  return channel != 0 && direct != 0 ? Comparison{channel, direct} : Comparison{0, 0};
}

// Whether messages of a size to `peer` are read directly. `both`: this launch has some from it, too.
FA_FN bool prefers_direct(const FaLaunch &launch, u32 peer, u32 size, bool both) {
  FaRegionHead *head = region_head(launch, launch.rank);
  const Comparison there = compare_modes(head->costs[peer], size);
  const Comparison here =
      both ? compare_modes(region_head(launch, peer)->costs[launch.rank], size) : Comparison{0, 0};
  const u64 channel = there.channel + here.channel, direct = there.direct + here.direct;
  const u32 bit = 1u << size;
  // Nothing changes for less than a tenth.
  const bool is_direct =
      (head->direct[peer] & bit) != 0 ? direct <= channel : direct < channel - channel / 10;
  head->direct[peer] = is_direct ? head->direct[peer] | bit : head->direct[peer] & ~bit;
  return is_direct;
}

// For a message that its receiver could read directly.
FA_FN Choice choose_mode(const FaLaunch &launch, u32 peer, u64 bytes, bool both) {
  FaRegionHead *head = region_head(launch, launch.rank);
  // What it could not read once it is not asked to read again.
  if (load_relaxed(&head->credits[0][peer].refused) != 0)
    return {kChunks, kNotMeasured};
  if (direct_reads(launch).always != 0)
    return {kPosting, kNotMeasured};
  // Trials are of four messages, of which the first finds what the way needs in no cache, and says little of
  // the others; or of two that no cache holds.
  constexpr u64 kCachedBytes = 1 << 20;
  constexpr u32 kRuns = 128, kSample = 8;
  const bool is_cached = bytes < kCachedBytes;
  const u32 size = direct_size(bytes), number = head->offered[peer][size]++;
  const u32 length = is_cached ? 4 : 2, first = is_cached ? 1 : 0;
  const u32 run = number / length, place = number % length;
  const bool is_trial = run == 1 || run == 8 || (run != 0 && run % kRuns == 0);
  const bool is_direct = prefers_direct(launch, peer, size, both);
  const TransferMode mode = is_direct != is_trial ? kPosting : kChunks;
  if (is_trial || run == 0)
    return {mode, place < first ? kNotMeasured : place == first ? kMeasuredAnew : kMeasuredLeast};
  return {mode, number % kSample == 0 ? kMeasured : kNotMeasured};
}

// A message has come whole, `ns` after the first of it was seen.
FA_COLD void note_cost(const FaLaunch &launch, u32 peer, u64 bytes, bool was_direct, u32 measured, u64 ns) {
  const u32 size = direct_size(bytes);
  FaCosts *costs = &region_head(launch, peer)->costs[launch.rank];
  u32 *cost = was_direct ? &costs->direct[size] : &costs->channel[size];
  // A chunk is seen when it has been written: about half of its time is over.
  const u64 unseen = was_direct || bytes <= launch.chunk_bytes ? 0 : launch.chunk_bytes / 2;
  const u64 most = ~u32(0) >> 1, per_mib = (ns << 20) / (bytes - unseen + 1);
  const u32 sample = u32(per_mib == 0 ? 1 : per_mib < most ? per_mib : most);
  const i64 before = load_relaxed(cost);
  if (before == 0 || measured == kMeasuredAnew || (measured == kMeasuredLeast && sample < before))
    return store_relaxed(cost, sample);
  if (measured == kMeasuredLeast)
    return;
  // A rank that did not run meanwhile counts as one that took twice the time.
  const i64 now = sample < 2 * before ? sample : 2 * before;
  store_relaxed(cost, u32(before + (now - before) / 4));
}

} // namespace FA_NAMESPACE
