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

// Where a waiting thread is between two polls.
class Patience {
public:
  // Called after each failed poll. False: give up, the failure is recorded.
  FA_FN bool another_poll(const FaLaunch &launch, u32 rank, u32 epoch) {
    ++polls_;
#if FA_CUDA
    if (polls_ % kPollsBetweenLooks != 0)
      return true;
#else
    if (polls_ < launch.spin) {
      relax();
      return true;
    }
    // A yield takes long enough that the limits are looked at every time.
    yield();
#endif
    return within_limits(launch, rank, epoch);
  }

private:
  static constexpr u32 kPollsBetweenLooks = 256;

  // What the next failed poll means.
  enum class Chance : u8 { kMore, kLastOfGone, kLastInTime };

  u32 polls_ = 0;
  bool counted_ = false;
  Chance chance_ = Chance::kMore;
#if FA_CUDA
  u64 deadline_ = 0;
#else
  u64 last_look_ = 0;
  u64 waited_ = 0;
#endif

  FA_SLOW bool within_limits(const FaLaunch &launch, u32 rank, u32 epoch) {
    FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
    if (!counted_) {
      counted_ = true;
      fetch_add_relaxed(&status->waits[rank], 1);
    }
    if (chance_ != Chance::kMore) {
      record_failure(launch, chance_ == Chance::kLastOfGone ? FA_PEER_GONE : FA_TIMED_OUT, 1u << rank, epoch);
      return false;
    }
    // Acquire: the bit was set after all that the rank sent, which the next poll therefore sees. A rank may
    // leave as soon as it has what it needs, while this one has yet to look at what it sent.
    if ((load_acquire(&status->gone) >> rank & 1) != 0) {
      chance_ = Chance::kLastOfGone;
      return true;
    }
    if (load_relaxed(&status->abort) != 0) {
      record_failure(launch, FA_ABORTED, 0, epoch);
      return false;
    }
    const u32 failure = load_relaxed(&status->failure);
    if (failure != FA_OK) {
      // Another block's. Where time was up this one's rank is late as well; else it may do well.
      if (failure == FA_TIMED_OUT)
        fetch_or_relaxed(&status->missing, 1u << rank);
      return false;
    }
    if (launch.timeout_ns == 0)
      return true;
    // What came while this thread did not run must be seen: the limit is followed by one more poll.
    if (is_late(launch.timeout_ns))
      chance_ = Chance::kLastInTime;
    return true;
  }

#if FA_CUDA
  // A kernel goes on while its process is stopped.
  FA_FN bool is_late(u64 limit) {
    const u64 now = now_ns();
    if (deadline_ == 0)
      deadline_ = now + limit;
    return now >= deadline_;
  }
#else
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
#endif

#if !FA_CUDA
  u32 yields_ = 0;

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
#endif
};

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
