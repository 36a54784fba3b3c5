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
FA_FN void record_failure(const FaLaunch &launch, FaFailure failure, u32 missing, u32 epoch) {
  FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
  fetch_or_relaxed(&status->missing, missing);
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

  u32 polls_ = 0;
  bool counted_ = false;
  bool last_poll_ = false;
  u64 deadline_ = 0;

  FA_SLOW bool within_limits(const FaLaunch &launch, u32 rank, u32 epoch) {
    FaStatus *status = reinterpret_cast<FaStatus *>(launch.status);
    if (!counted_) {
      counted_ = true;
      fetch_add_relaxed(&status->waits[rank], 1);
    }
    if (last_poll_) {
      record_failure(launch, FA_PEER_GONE, 1u << rank, epoch);
      return false;
    }
    // Acquire: the bit was set after all that the rank sent, which the next poll therefore sees. A rank may
    // leave as soon as it has what it needs, while this one has yet to look at what it sent.
    if ((load_acquire(&status->gone) >> rank & 1) != 0) {
      last_poll_ = true;
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
    const u64 now = now_ns();
    if (deadline_ == 0)
      deadline_ = now + launch.timeout_ns;
    if (now < deadline_)
      return true;
    record_failure(launch, FA_TIMED_OUT, 1u << rank, epoch);
    return false;
  }

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
