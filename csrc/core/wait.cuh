// Bounded waits. The fast path is a load and a compare; all else is in the slow path, every few hundred
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

// Nanoseconds of a clock that only goes forward.
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

// Why a launch gives up (enum FaFailure), and the ranks that it lies with, as bits: in one word. By default
// it does not.
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

// Records that this launch gives up; the first failure of a rank stands, or either of two blocks' that come
// at the same instant. Other blocks of the rank see it as an abort and leave too.
FA_COLD void record_failure(const FaLaunch &launch, Failure failure, u32 epoch) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  fetch_or_relaxed(&status->missing, failure.missing());
  // The end of this kernel orders it before those that are queued behind it.
  if (FA_STREAMS)
    store_relaxed(&region_head(launch, launch.rank)->failed, 1);
  if (load_relaxed(&status->failure) == FA_OK) {
    store_relaxed(&status->epoch, epoch);
    store_relaxed(&status->failure, failure.code());
  }
}

#if FA_CUDA
FA_SLOW void record_failure_apart(const FaLaunch &launch, Failure failure, u32 epoch) {
  record_failure(launch, failure, epoch);
}
#endif

// True if there is no failure; else it is recorded. `Here`: in a function that calls nothing.
template <bool Here = false>
FA_FN bool succeeded(const FaLaunch &launch, Failure failure, u32 epoch) {
  if (failure.none())
    return true;
#if FA_CUDA
  if constexpr (!Here) {
    record_failure_apart(launch, failure, epoch);
    return false;
  }
#endif
  record_failure(launch, failure, epoch);
  return false;
}

// A look at the limits of a wait for `rank`, after a failed poll; `first`: of this wait; `late`: has its time
// passed? `*next` (enum FaFailure) is what this failed poll means, and then what the next one will; FA_OK:
// nothing.
template <class Late>
FA_FN Failure look_at_limits(const FaLaunch &launch, u32 rank, bool first, u32 *next, Late late) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  const u32 bit = 1u << rank;
  if (first)
    fetch_add_relaxed(&status->waits[rank], 1);
  if (*next != FA_OK)
    return {*next, bit};
  if ((load_acquire(&status->gone) & bit) != 0) {
    // Acquire: the bit was set after all that the rank sent, which the next poll therefore sees. A rank may
    // leave as soon as it has what it needs, while this one has yet to look at what it sent.
    *next = FA_PEER_GONE;
    return {};
  }
  if (load_relaxed(&status->abort) != 0)
    return {FA_ABORTED, 0};
  // Another block's failure stands. Where time was up, this block's rank is late as well; else it may do
  // well.
  const u32 failure = load_relaxed(&status->failure);
  if (failure != FA_OK)
    return {failure, failure == FA_TIMED_OUT ? bit : 0};
  // What came while this thread did not run must be seen: the limit is followed by one more poll.
  if (late(launch.timeout_ns))
    *next = FA_TIMED_OUT;
  return {};
}

#if FA_CUDA

constexpr u32 kPollsBetweenLooks = 256;

// What the looks of a wait have come to, in a word: not begun (0), what the next failed poll means (enum
// FaFailure), the deadline, or why the wait ends.
constexpr u64 kLeastDeadline = 1 << 16, kEnds = u64(1) << 63;

FA_FN u64 look(const FaLaunch &launch, u32 rank, u64 state) {
  const bool first = state == 0;
  u32 next = state < kLeastDeadline ? u32(state) : FA_OK;
  const Failure failure = look_at_limits(launch, rank, first, &next, [&](u64 limit) {
    // A kernel goes on while its process is stopped.
    const u64 now = now_ns();
    if (first)
      state = min(now + limit, kEnds - 1);
    return now >= state;
  });
  if (!failure.none())
    return kEnds | failure.word();
  return next != FA_OK ? next : state;
}

// One copy for the waits of all kernels: most of their code, which most of them do not get to.
FA_SLOW u64 check_limits_outlined(const FaLaunch &launch, u32 rank, u64 state) {
  return look(launch, rank, state);
}

// Where a waiting thread is between two polls. `Here`: in a function that calls nothing.
template <bool Here = false>
class Backoff {
public:
  // After a failed poll.
  FA_FN Failure pause(const FaLaunch &launch, u32 rank) {
    if (++polls_ % kPollsBetweenLooks != 0)
      return {};
    state_ = Here ? look(launch, rank, state_) : check_limits_outlined(launch, rank, state_);
    return state_ < kEnds ? Failure{} : Failure(u32(state_));
  }

private:
  u32 polls_ = 0;
  u64 state_ = 0;
};

#else

// Where a waiting thread is between two polls.
template <bool = false>
class Backoff {
public:
  // After a failed poll.
  FA_FN Failure pause(const FaLaunch &launch, u32 rank) {
    if (++polls_ < launch.spin) {
      relax();
      return {};
    }
    // A yield takes long enough that the limits are looked at every time.
    yield();
    return look(launch, rank);
  }

private:
  u32 polls_ = 0;
  u32 yields_ = 0;
  bool counted_ = false;
  u32 next_ = FA_OK;
  u64 last_look_ = 0;
  u64 waited_ = 0;

  FA_SLOW Failure look(const FaLaunch &launch, u32 rank) {
    const bool first = !counted_;
    counted_ = true;
    const Failure failure =
        look_at_limits(launch, rank, first, &next_, [&](u64 limit) { return is_late(limit); });
    return failure.none() && !goes_on(launch) ? Failure(FA_ABORTED, 0) : failure;
  }

  // What the program does here may take long: the next look finds that this thread did not run meanwhile.
  static bool goes_on(const FaLaunch &launch) {
    return launch.goes_on == 0 || reinterpret_cast<u32 (*)()>(launch.goes_on)() == 0;
  }

  // Adds the time since the last look to the wait. If that is longer than a look takes, this thread did not
  // run in between (its process was stopped, its core was another's), and perhaps the peer neither: then most
  // of it does not count.
  bool is_late(u64 limit) {
    constexpr u64 kLongestLook = 100000000;
    const u64 now = now_ns(), passed = last_look_ == 0 ? 0 : now - last_look_;
    u64 most = limit / 8 < kLongestLook ? limit / 8 : kLongestLook;
    most = most == 0 ? 1 : most;
    waited_ += passed < most ? passed : most;
    last_look_ = now;
    return waited_ >= limit;
  }

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }

  // Gives the core to whoever the flag is waiting for; after some milliseconds of that, sleeps, so that a
  // rank that waits for a slow peer does not burn its core.
  FA_SLOW void yield() {
    constexpr u32 kYieldsBeforeSleep = 20000;
    if (yields_ < kYieldsBeforeSleep) {
      ++yields_;
      sched_yield();
    } else {
      const timespec nap = {0, 100000};
      nanosleep(&nap, nullptr);
    }
  }
};

#endif

// Polls until ready(), or the limits of the launch. `rank` is whom it waits for, as the last poll has left
// it. `Here`: in a function that calls nothing.
template <bool Here = false, class Ready>
FA_FN Failure wait_until(const FaLaunch &launch, const u32 &rank, Ready ready) {
#if !FA_CUDA
  // Most waits need no more than this. A GPU has one poll in its code: a call begins by fetching that.
  if (ready())
    return {};
#endif
  Backoff<Here> backoff;
  FA_ROLL
  for (;;) {
    const Failure failure = backoff.pause(launch, rank);
    if (!failure.none())
      return failure;
    if (ready())
      return {};
  }
}

} // namespace FA_NAMESPACE
