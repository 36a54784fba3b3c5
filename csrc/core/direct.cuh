// Direct reads: the receiver of a large message has the kernel copy it from private memory of the sender, in
// another process (process_vm_readv, "cross-memory attach"). One copy instead of the channel's two, but the
// kernel pins each page first, and no two chunks overlap: which is faster depends on how fast lines travel
// between the cores. So both are measured while messages are sent.
//
// The sender measures a chunk that it writes and says so with it, the receiver one that it reads and what it
// reads directly. The receiver compares the two for each size, and tells the sender which it would rather
// have; the sender decides. Now and then it takes the other way, so that both costs stay known: machines
// change.
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

// In ns for a MiB; not 0, which is none.
FA_FN u32 cost_of(u64 ns, u64 bytes) {
  const u64 cost = (ns << 20) / bytes, most = ~u32(0);
  return u32(cost == 0 ? 1 : cost < most ? cost : most);
}

// A lower cost counts at once, since what disturbs a copy makes it longer; of a higher one a quarter.
FA_FN void note_cost(u32 *cost, u32 sample) {
  *cost = *cost == 0 || sample < *cost ? sample : *cost + (sample - *cost) / 4;
}

// How a message is sent.
enum Way : u32 { kUndecided, kPosting, kPosted, kChunks, kMeasuredChunks };

// For a message that its receiver could read directly.
FA_FN Way choose_way(const FaLaunch &launch, u32 peer, u64 bytes) {
  constexpr u32 kTrials = 128, kMeasured = 8;
  if (direct_reads(launch).always != 0)
    return kPosting;
  FaRegionHead *head = region_head(launch, launch.rank);
  const u32 size = direct_size(bytes), number = ++head->offered[peer][size];
  // The 2nd, 4th, 8th, ... and each 128th.
  const bool is_trial = (number > 1 && (number & (number - 1)) == 0) || number % kTrials == 0;
  const bool is_direct = (load_relaxed(&head->credits[peer].direct) >> size & 1) != 0;
  if (is_direct != is_trial)
    return kPosting;
  return is_trial || number % kMeasured == 1 ? kMeasuredChunks : kChunks;
}

// Tells the sender which way is the cheaper, once both are known.
FA_COLD void compare_costs(const FaLaunch &launch, u32 peer, u32 size) {
  const FaCosts &costs = region_head(launch, launch.rank)->costs[peer];
  const u32 channel = costs.channel[size], direct = costs.direct[size];
  if (channel == 0 || direct == 0)
    return;
  u32 *word = &region_head(launch, peer)->credits[launch.rank].direct;
  const u32 chosen = load_relaxed(word), bit = 1u << size;
  const bool was_direct = (chosen & bit) != 0;
  // Nothing changes for less than a tenth.
  const bool is_direct = was_direct ? direct <= channel : direct < channel - channel / 10;
  if (is_direct != was_direct)
    store_relaxed(word, chosen ^ bit);
}

// A piece that has been read directly, since `start`.
FA_FN void note_direct(const FaLaunch &launch, u32 peer, u64 message_bytes, u64 start, u64 bytes) {
  const u32 size = direct_size(message_bytes);
  note_cost(&region_head(launch, launch.rank)->costs[peer].direct[size], cost_of(now_ns() - start, bytes));
  compare_costs(launch, peer, size);
}

// A chunk that has been read since `start`, and what it had cost to write. A rank that also sends does both
// for each chunk; between others, one writes while the other reads.
FA_FN void note_chunk(const FaLaunch &launch, u32 peer, u64 message_bytes, u64 start, u64 bytes, u32 written,
                      bool sends) {
  const u32 size = direct_size(message_bytes), read = cost_of(now_ns() - start, bytes);
  const u32 both = written + read < read ? ~u32(0) : written + read, longer = written < read ? read : written;
  note_cost(&region_head(launch, launch.rank)->costs[peer].channel[size], sends ? both : longer);
  compare_costs(launch, peer, size);
}

} // namespace FA_NAMESPACE
