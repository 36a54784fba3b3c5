// Bounded waits. The fast path is a load and a compare; all else is in the slow path, every few hundred
// polls.
#pragma once

#include "region.cuh"

#if !FA_CUDA
#include <sched.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
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

// Records that this launch gives up; the first failure of a rank stands, or either of two blocks' that come
// at the same instant. Other blocks of the rank see it as an abort and leave too.
FA_COLD void record_failure(const FaLaunch &launch, FaFailure failure, u32 missing, u32 epoch) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  fetch_or_relaxed(&status->missing, missing);
  // The end of this kernel orders it before those that are queued behind it.
  if (FA_STREAMS)
    store_relaxed(&region_head(launch, launch.rank)->failed, 1);
  if (load_relaxed(&status->failure) == FA_OK) {
    store_relaxed(&status->epoch, epoch);
    store_relaxed(&status->failure, failure);
  }
}

// What the next failed poll of a waiting thread means.
enum Chance : u32 { kMore, kLastOfGone, kLastInTime };

// A look at the limits of a wait for `rank`, after a failed poll; `late`: has its time passed? FA_OK: go on.
// Else the failure is recorded.
template <class Late>
FA_FN FaFailure look_at_limits(const FaLaunch &launch, u32 rank, u32 epoch, bool *counted, Chance *chance,
                               Late late) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  if (!*counted) {
    *counted = true;
    fetch_add_relaxed(&status->waits[rank], 1);
  }
  u32 missing = 1u << rank;
  FaFailure reason = FA_OK;
  if (*chance != kMore) {
    reason = *chance == kLastOfGone ? FA_PEER_GONE : FA_TIMED_OUT;
  } else if ((load_acquire(&status->gone) >> rank & 1) != 0) {
    // Acquire: the bit was set after all that the rank sent, which the next poll therefore sees. A rank may
    // leave as soon as it has what it needs, while this one has yet to look at what it sent.
    *chance = kLastOfGone;
  } else if (load_relaxed(&status->abort) != 0) {
    reason = FA_ABORTED;
    missing = 0;
  } else if (const u32 failure = load_relaxed(&status->failure); failure != FA_OK) {
    // Another block's, which stands. Where time was up this one's rank is late as well; else it may do well.
    if (failure == FA_TIMED_OUT)
      fetch_or_relaxed(&status->missing, missing);
    return FaFailure(failure);
  } else if (launch.timeout_ns != 0 && late(launch.timeout_ns)) {
    // What came while this thread did not run must be seen: the limit is followed by one more poll.
    *chance = kLastInTime;
  }
  if (reason != FA_OK)
    record_failure(launch, reason, missing, epoch);
  return reason;
}

#if FA_CUDA

// Where a waiting thread is between two polls.
class Patience {
public:
  // Called after each failed poll. False: give up, the failure is recorded.
  FA_FN bool another_poll(const FaLaunch &launch, u32 rank, u32 epoch) {
    constexpr u32 kPollsBetweenLooks = 256;
    if (++polls_ % kPollsBetweenLooks != 0)
      return true;
    state_ = look(&launch, rank, epoch, state_);
    return state_ != kGivenUp;
  }

private:
  static constexpr u64 kGivenUp = ~u64(0);

  u32 polls_ = 0;
  // The deadline, but for the lowest three bits; there the chance, and whether the wait is counted. By value,
  // as what a function gets an address of is in memory.
  u64 state_ = 0;

  static FA_SLOW u64 look(const FaLaunch *launch, u32 rank, u32 epoch, u64 state) {
    bool counted = (state & 4) != 0;
    Chance chance = Chance(state & 3);
    u64 deadline = state & ~u64(7);
    // A kernel goes on while its process is stopped.
    const FaFailure failure = look_at_limits(*launch, rank, epoch, &counted, &chance, [&](u64 limit) {
      const u64 now = now_ns();
      if (deadline == 0)
        deadline = (now + limit) & ~u64(7);
      return now >= deadline;
    });
    return failure == FA_OK ? deadline | (counted ? 4 : 0) | chance : kGivenUp;
  }
};

#else

// Where a waiting thread is between two polls.
class Patience {
public:
  // Called after each failed poll. False: give up, the failure is recorded.
  FA_FN bool another_poll(const FaLaunch &launch, u32 rank, u32 epoch) {
    if (++polls_ < launch.spin) {
      relax();
      return true;
    }
    // A yield takes long enough that the limits are looked at every time.
    yield();
    return look(launch, rank, epoch);
  }

private:
  u32 polls_ = 0;
  u32 yields_ = 0;
  bool counted_ = false;
  Chance chance_ = kMore;
  u64 last_look_ = 0;
  u64 waited_ = 0;

  FA_SLOW bool look(const FaLaunch &launch, u32 rank, u32 epoch) {
    return look_at_limits(launch, rank, epoch, &counted_, &chance_,
                          [&](u64 limit) { return is_late(limit); }) == FA_OK;
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

// Polls until ready() or the limits of the launch. `rank` is whom it waits for.
template <class Ready>
FA_FN bool wait_until(const FaLaunch &launch, u32 rank, u32 epoch, Ready ready) {
  if (ready())
    return true;
  Patience patience;
  do {
    if (!patience.another_poll(launch, rank, epoch))
      return false;
  } while (!ready());
  return true;
}

} // namespace FA_NAMESPACE
