// Bounded waits. The fast path is a load and a compare; the slow path checks the limits every few hundred
// polls.
#pragma once

#include "region.cuh"

#if !FA_CUDA
#include <sched.h>
#include <time.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#endif

namespace FA_NAMESPACE {

// Time in ns of a monotonic clock.
FA_FN u64 now_ns() {
#if FA_CUDA
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000u + u64(now.tv_nsec);
#endif
}

// Why a launch fails (enum FaFailure), and a bit for each rank that is responsible, in one word. The default
// is no failure.
class Failure {
public:
  Failure() = default;
  FA_FN explicit Failure(u32 word) : word_(word) {}
  FA_FN Failure(u32 code, u32 missing) : word_(missing << 16 | code) {}

  FA_FN bool none() const { return word_ == 0; }
  FA_FN u32 code() const { return word_ & 0xFFFF; }
  FA_FN u32 missing() const { return word_ >> 16; }
  FA_FN u32 word() const { return word_; }

private:
  u32 word_ = FA_OK;
};

// Records that this launch fails. The first failure of a rank is kept (or either one, if two blocks fail
// at the same time). Other blocks of the rank treat it as an abort and leave, too.
FA_HOST_COLD void record_failure(const FaLaunch &launch, Failure failure, u32 epoch) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  fetch_or_relaxed(&status->missing, failure.missing());
  // The end of this kernel orders the store before the launches queued behind it.
  if (FA_STREAMS)
    store_relaxed(&own_head(launch)->failed, 1);
  if (load_relaxed(&status->failure) == FA_OK) {
    store_relaxed(&status->epoch, epoch);
    store_relaxed(&status->failure, failure.code());
  }
}

#if !FA_CUDA
// Returns whether a block of this rank has recorded a failure.
FA_FN bool has_failed(const FaLaunch &launch) {
  return load_relaxed(&reinterpret_cast<const FaStatus *>(launch.status)->failure) != FA_OK;
}
#endif

#if FA_CUDA
FA_OUTLINED_COLD void record_failure_outlined(const FaLaunch &launch, Failure failure, u32 epoch) {
  record_failure(launch, failure, epoch);
}
#endif

// Returns whether there is no failure; records one otherwise. `Leaf`: the caller is an out-of-line function,
// which must not call functions.
template <bool Leaf = false>
FA_FN bool succeeded(const FaLaunch &launch, Failure failure, u32 epoch) {
  if (failure.none())
    return true;
#if FA_CUDA
  if constexpr (!Leaf) {
    record_failure_outlined(launch, failure, epoch);
    return false;
  }
#endif
  record_failure(launch, failure, epoch);
  return false;
}

// Checks the limits of a wait for `rank` after an unsuccessful poll. `first`: it is the first check of this
// wait. late(limit) returns whether time is up. `*next` (enum FaFailure) is the failure that this
// unsuccessful poll proves, FA_OK for none; it is set to the one that the next unsuccessful poll will
// prove.
template <class Late>
FA_FN Failure limit_failure(const FaLaunch &launch, u32 rank, bool first, u32 *next, Late late) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  // Some blocks wait for others of their own rank. Those name the peer that they wait for.
  const bool is_peer = rank != launch.rank;
  const u32 bit = is_peer ? 1u << rank : 0;
  if (first && is_peer)
    fetch_add_relaxed(&status->waits[rank], 1);
#if !FA_CUDA
  if (first)
    fetch_add_relaxed(&status->slow, 1);
  store_relaxed(&status->waiting, bit);
#endif
  if (*next != FA_OK)
    return {*next, bit};
  if ((load_acquire(&status->gone) & bit) != 0) {
    // Acquire: the bit was set after everything that the rank sent, so the next poll sees all of it. A rank
    // may leave as soon as it is done, before this one has read what it sent.
    *next = FA_PEER_GONE;
    return {};
  }
  if (load_relaxed(&status->abort) != 0)
    return {FA_ABORTED, 0};
  // Another block has failed: that failure is kept. If it timed out, the rank that this block waits for is
  // late as well; otherwise it may be fine.
  const u32 failure = load_relaxed(&status->failure);
  if (failure != FA_OK)
    return {failure, failure == FA_TIMED_OUT ? bit : 0};
  // Data may have come while this thread was not running: after the limit there is one more poll.
  if (late(launch.timeout_ns))
    *next = FA_TIMED_OUT;
  return {};
}

#if FA_CUDA

constexpr u32 kPollsBetweenChecks = 256;

// State of a wait in one word: 0: not begun; below kLeastDeadline: the failure that the next unsuccessful
// poll proves (enum FaFailure); from there on: the deadline; with kEnds: why the wait ends.
constexpr u64 kLeastDeadline = 1 << 16, kEnds = u64(1) << 63;

FA_FN u64 check_limits(const FaLaunch &launch, u32 rank, u64 state) {
  const bool first = state == 0;
  u32 next = state < kLeastDeadline ? u32(state) : FA_OK;
  const Failure failure = limit_failure(launch, rank, first, &next, [&](u64 limit) {
    // A kernel keeps running while its process is stopped, so a deadline is enough.
    const u64 now = now_ns();
    if (first)
      state = min(now + limit, kEnds - 1);
    return now >= state;
  });
  if (!failure.none())
    return kEnds | failure.word();
  return next != FA_OK ? next : state;
}

// One copy for all waits of a kernel: it is most of their code, and rarely runs.
FA_OUTLINED_COLD u64 check_limits_outlined(const FaLaunch &launch, u32 rank, u64 state) {
  return check_limits(launch, rank, state);
}

// Backoff of a waiting thread between two polls. `Leaf`: the caller is an out-of-line function.
template <bool Leaf = false>
class Backoff {
public:
  // Call it after each failed poll. rank() returns the rank waited for.
  template <class Rank>
  FA_FN Failure pause(const FaLaunch &launch, Rank rank) {
    if (++polls_ % kPollsBetweenChecks != 0)
      return {};
    state_ = Leaf ? check_limits(launch, rank(), state_) : check_limits_outlined(launch, rank(), state_);
    return state_ < kEnds ? Failure{} : Failure(u32(state_));
  }
  FA_FN Failure pause(const FaLaunch &launch, u32 rank) {
    return pause(launch, [rank] { return rank; });
  }

private:
  u32 polls_ = 0;
  u64 state_ = 0;
};

#else

// Backoff of a waiting thread between two polls.
template <bool = false>
class Backoff {
public:
  // Call it after each failed poll.
  FA_FN Failure pause(const FaLaunch &launch, u32 rank) {
    if (++polls_ < launch.spin) {
      relax();
      return {};
    }
    // A yield takes long enough to check the limits each time.
    yield(launch.shares_core != 0);
    return check_limits(launch, rank);
  }

private:
  u32 polls_ = 0;
  u32 yields_ = 0;
  bool counted_ = false;
  u32 next_ = FA_OK;
  u64 last_check_ = 0;
  u64 waited_ = 0;

  FA_OUTLINED_COLD Failure check_limits(const FaLaunch &launch, u32 rank) {
    const bool first = !counted_;
    counted_ = true;
    const Failure failure =
        limit_failure(launch, rank, first, &next_, [&](u64 limit) { return is_late(launch, rank, limit); });
    return failure.none() && !goes_on(launch) ? Failure(FA_ABORTED, 0) : failure;
  }

  // The callback may take long; the next check then finds that this thread did not run meanwhile.
  static bool goes_on(const FaLaunch &launch) {
    return launch.goes_on == 0 || reinterpret_cast<u32 (*)()>(launch.goes_on)() == 0;
  }

  // Adds the time since the last check to the time waited. If it is much longer than a check takes, this
  // thread did not run in between (its process was stopped, or its core was busy), and perhaps the peer did
  // not either, so most of that time does not count.
  bool is_late(const FaLaunch &launch, u32 rank, u64 limit) {
    constexpr u64 kLongestCheck = 100000000;
    const u64 now = now_ns(), passed = last_check_ == 0 ? 0 : now - last_check_;
    fetch_add_relaxed(&reinterpret_cast<FaStatus *>(launch.status)->waited_ns[rank], passed);
    u64 most = limit / 8 < kLongestCheck ? limit / 8 : kLongestCheck;
    most = most == 0 ? 1 : most;
    waited_ += passed < most ? passed : most;
    last_check_ = now;
    return waited_ >= limit;
  }

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }

  // Yields the core to the thread that the flag depends on. After some milliseconds it sleeps instead, so
  // that waiting for a slow peer does not burn a core.
  //
  // Linux yields to threads of the same scheduling group alone: not to ranks of another session (autogroup)
  // or container, which run when this thread's time slice has ended. So a thread that shares its core soon
  // sleeps, for as short a time as the system's timers can.
  FA_OUTLINED_COLD void yield(bool shares_core) {
    constexpr u32 kYieldsBeforeNap = 128, kYieldsBeforeSleep = 20000;
    yields_ += yields_ < kYieldsBeforeSleep;
    if (yields_ < (shares_core ? kYieldsBeforeNap : kYieldsBeforeSleep)) {
      sched_yield();
      return;
    }
    const timespec nap = {0, yields_ < kYieldsBeforeSleep ? 1000 : 100000};
    // A sandbox may refuse it.
    if (nanosleep(&nap, nullptr) != 0)
      sched_yield();
  }
};

#endif

// Polls until ready() or until a limit is reached. `rank` is the rank waited for; ready() may change it.
// `Leaf`: the caller is an out-of-line function.
template <bool Leaf = false, class Ready>
FA_FN Failure wait_until(const FaLaunch &launch, const u32 &rank, Ready ready) {
#if !FA_CUDA
  // Most waits end here. A GPU has only one copy of the poll: a call begins by fetching its code.
  if (ready())
    return {};
#endif
  Backoff<Leaf> backoff;
  FA_NO_UNROLL
  for (;;) {
    const Failure failure = backoff.pause(launch, rank);
    if (!failure.none())
      return failure;
    if (ready())
      return {};
  }
}

} // namespace FA_NAMESPACE
