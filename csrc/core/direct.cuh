// Direct reads: the receiver of a large message has the operating system copy it from private memory of the
// sender, in another process (process_vm_readv, "cross-memory attach"). That is one copy instead of the
// channel's two, but the system pins each page first, and nothing overlaps. Which is faster depends on how
// fast cache lines travel between the cores. So the cost of both modes is measured while messages are sent.
//
// The receiver measures a message, if its sender asks for it, from the first sight of it to its end, and
// writes the cost to the sender's region. For each size the sender uses the cheaper mode, and now and then
// tries the other one, because conditions change. If a launch has messages in both directions, the costs of
// both count, so that both ranks choose the same: a rank that reads directly while its own message goes as
// chunks would keep its peer waiting.
#pragma once

#include "wait.cuh"

#include <linux/futex.h>
#include <sys/uio.h>

namespace FA_NAMESPACE {

FA_FN const FaDirect &direct_reads(const FaLaunch &launch) {
  return *reinterpret_cast<const FaDirect *>(launch.direct);
}

// Returns whether this rank can read memory of the process of `rank`.
FA_FN bool is_readable(const FaLaunch &launch, u32 rank) {
  return launch.direct != 0 && direct_reads(launch).process[rank] != 0;
}

// Reads a byte of each page of a message that its receiver is to read. process_vm_readv waits for pages
// without a limit, say for a file whose server does not answer; so the owner of the memory waits first. It
// touches all pages before it posts, because later the rank may itself be in a direct read.
FA_FN void touch_pages(const FaTransfer &message) {
  constexpr u64 kPage = 4096;
  const u64 end = message.address + message.bytes;
  for (u64 at = message.address; at < end; at = (at & ~(kPage - 1)) + kPage)
    (void)*reinterpret_cast<const volatile u8 *>(at);
}

// Copies from memory of `rank`, in its process. Returns false if not all of it could be read.
FA_HOST_COLD bool copy_from_process(const FaLaunch &launch, u32 rank, u64 to, u64 from, u64 bytes) {
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

// Returns whether the data that was read came from the process of `rank`. By now its id may belong to another
// process, or the process may run another program. The operating system marks the word before either; if
// it is not marked after the reads, they were of the rank's memory. The fence orders the check after the
// reads.
FA_HOST_COLD bool read_is_valid(const FaLaunch &launch, u32 rank) {
#if defined(FA_PLANT_NO_LIFE)
  (void)launch, (void)rank;
  return true;
#else
  fence_sc();
  const u32 exit_futex = load_acquire(reinterpret_cast<const u32 *>(direct_reads(launch).exit_futex[rank]));
  return exit_futex != 0 && (exit_futex & FUTEX_OWNER_DIED) == 0;
#endif
}

// Index of a message's size class, by which costs are kept.
FA_FN u32 direct_size(u64 bytes) {
  constexpr u32 kLeast = 31 - __builtin_clz(FA_LEAST_DIRECT_BYTES);
  const u32 size = 63 - u32(__builtin_clzll(bytes | FA_LEAST_DIRECT_BYTES)) - kLeast;
  return size < FA_DIRECT_SIZES ? size : FA_DIRECT_SIZES - 1;
}

// What the receiver does with the cost of a message: nothing; average it in; replace the previous cost; take
// the minimum.
enum Measured : u32 { kNotMeasured, kMeasured, kMeasuredReplacing, kMeasuredMinimum };

struct Choice {
  TransferMode mode;
  Measured measured;
};

// The costs of both modes for one size; zeros unless both are known.
struct Comparison {
  u64 channel;
  u64 direct;
};

FA_FN Comparison compare_modes(const FaCosts &costs, u32 size) {
  const u32 channel = load_relaxed(&costs.channel[size]), direct = load_relaxed(&costs.direct[size]);
  return channel != 0 && direct != 0 ? Comparison{channel, direct} : Comparison{0, 0};
}

// Returns whether messages of a size to `peer` are read directly. `both`: this launch also has messages from
// it.
FA_FN bool prefers_direct(const FaLaunch &launch, u32 peer, u32 size, bool both) {
  FaRegionHead *head = own_head(launch);
  const Comparison there = compare_modes(head->costs[peer], size);
  const Comparison here =
      both ? compare_modes(region_head(launch, peer)->costs[launch.rank], size) : Comparison{0, 0};
  const u64 channel = there.channel + here.channel, direct = there.direct + here.direct;
  const u32 bit = 1u << size;
  // Switch only for a gain of more than a tenth.
  const bool is_direct =
      (head->direct[peer] & bit) != 0 ? direct <= channel : direct < channel - channel / 10;
  head->direct[peer] = is_direct ? head->direct[peer] | bit : head->direct[peer] & ~bit;
  return is_direct;
}

// Chooses the mode of a message that its receiver could read directly.
FA_FN Choice choose_mode(const FaLaunch &launch, u32 peer, u64 bytes, bool both) {
  FaRegionHead *head = own_head(launch);
  // The receiver has failed to read directly once: do not ask again.
  if (load_relaxed(&head->credits[0][peer].refused) != 0)
    return {kChunks, kNotMeasured};
  if (direct_reads(launch).always != 0)
    return {kPosting, kNotMeasured};
  // A trial is four messages, of which the first warms the caches and is not counted; or two, if they do not
  // fit in a cache anyway.
  constexpr u64 kCachedBytes = 1 << 20;
  constexpr u32 kRuns = 128, kSample = 8;
  const bool is_cached = bytes < kCachedBytes;
  const u32 size = direct_size(bytes), number = head->offered[peer][size]++;
  const u32 length = is_cached ? 4 : 2, first = is_cached ? 1 : 0;
  const u32 run = number / length, index = number % length;
  const bool is_trial = run == 1 || run == 8 || (run != 0 && run % kRuns == 0);
  const bool is_direct = prefers_direct(launch, peer, size, both);
  const TransferMode mode = is_direct != is_trial ? kPosting : kChunks;
  if (is_trial || run == 0)
    return {mode, index < first ? kNotMeasured : index == first ? kMeasuredReplacing : kMeasuredMinimum};
  return {mode, number % kSample == 0 ? kMeasured : kNotMeasured};
}

// Updates the cost of a mode after a complete message, `ns` after its first chunk was seen.
FA_HOST_COLD void update_cost(const FaLaunch &launch, u32 peer, u64 bytes, bool was_direct, u32 measured,
                              u64 ns) {
  const u32 size = direct_size(bytes);
  FaCosts *costs = &region_head(launch, peer)->costs[launch.rank];
  u32 *cost = was_direct ? &costs->direct[size] : &costs->channel[size];
  // A chunk is seen after it has been written, when about half of its time is over.
  const u64 unseen = was_direct ? 0 : (bytes < launch.chunk_bytes ? bytes : launch.chunk_bytes) / 2;
  const u64 most = ~u32(0) >> 1, per_mib = (ns << 20) / (bytes - unseen + 1);
  const u32 sample = u32(per_mib == 0 ? 1 : per_mib < most ? per_mib : most);
  const i64 before = load_relaxed(cost);
  if (before == 0 || measured == kMeasuredReplacing || (measured == kMeasuredMinimum && sample < before))
    return store_relaxed(cost, sample);
  if (measured == kMeasuredMinimum)
    return;
  // At most twice the previous cost: the rank may not have been running.
  const i64 now = sample < 2 * before ? sample : 2 * before;
  store_relaxed(cost, u32(before + (now - before) / 4));
}

} // namespace FA_NAMESPACE
