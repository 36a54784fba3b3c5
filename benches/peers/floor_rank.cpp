// A rank that measures the floor: the exchange of a one-shot or two-shot pull between two ranks, and nothing
// else. There are no arguments to check, no failures, no time limits, no other types or numbers of ranks. See
// rank.hpp, and csrc/algorithms/one_shot_pull.cuh and two_shot_pull.cuh, which have the argument for two
// generations of staging. With PEERS_FLOOR_STREAMS the sums of two-shots bypass the caches on their way to
// the output.
#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>

#include "rank.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

// Messages up to here take one exchange. Longer ones take two, in pieces whose staging stays in the caches.
constexpr size_t kOneShot = 8 << 10, kPiece = 512 << 10;

// What each rank writes. Its peer polls the counts.
struct Part {
  alignas(64) std::atomic<uint64_t> count;
  alignas(4096) float staging[2][kPiece / sizeof(float)];
};

class Floor {
public:
  explicit Floor(int rank) {
    const std::string name = "/" + peers::variable("PEERS_WORLD");
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, 2 * sizeof(Part)) != 0)
      peers::fail("no shared memory");
    void *mapped =
        mmap(nullptr, 2 * sizeof(Part), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (mapped == MAP_FAILED)
      peers::fail("no shared memory");
    own = static_cast<Part *>(mapped) + rank;
    peer = static_cast<Part *>(mapped) + (1 - rank);
    is_second = rank == 1;
    streams = getenv("PEERS_FLOOR_STREAMS") != nullptr;
#if !defined(__SSE__)
    if (streams)
      peers::fail("this machine has no streaming stores");
#endif
  }

  void reduce(const float *in, float *out, size_t count) {
    if (count * sizeof(float) <= kOneShot)
      return one_shot(in, out, count);
    for (size_t piece = kPiece / sizeof(float); count > 0;) {
      const size_t now = std::min(count, piece);
      two_shot(in, out, now);
      in += now, out += now, count -= now;
    }
  }

private:
  void one_shot(const float *in, float *out, size_t count) {
    float *const staged = own->staging[pulls++ % 2];
    const float *const theirs = peer->staging[(pulls - 1) % 2];
    memcpy(staged, in, count * sizeof(float));
    signal();
    for (size_t i = 0; i < count; i += 16)
      __builtin_prefetch(&own->staging[pulls % 2][i], 1);
    wait();
    add(out, in, theirs, count);
  }

  // The peer reads the other half where it was staged, and puts the sum there.
  void two_shot(const float *in, float *out, size_t count) {
    const size_t half = count / 2 / 16 * 16, mine = is_second ? half : 0, other = half - mine;
    const size_t my_count = is_second ? count - half : half, other_count = count - my_count;
    float *const staged = own->staging[pulls % 2], *const theirs = peer->staging[pulls % 2];
    pulls++;
    memcpy(staged, in + other, other_count * sizeof(float));
    meet();
#if defined(__SSE__)
    // Of whole packs at addresses of whole lines.
    if (streams && my_count % 16 == 0 && reinterpret_cast<uintptr_t>(out + mine) % 64 == 0)
      add_and_stream(out + mine, theirs, in + mine, my_count);
    else
#endif
      add_twice(out + mine, theirs, in + mine, my_count);
    meet();
    memcpy(out + other, staged, other_count * sizeof(float));
  }

  static void add(float *out, const float *in, const float *theirs, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++)
      out[i] = in[i] + theirs[i];
  }

  static void add_twice(float *out, float *theirs, const float *in, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++)
      out[i] = theirs[i] = in[i] + theirs[i];
  }

#if defined(__SSE__)
  static void add_and_stream(float *out, float *theirs, const float *in, size_t count) {
    for (size_t i = 0; i < count; i += 16) {
      for (size_t k = i; k < i + 16; k++)
        theirs[k] += in[k];
      for (size_t k = i; k < i + 16; k += 4)
        _mm_stream_ps(out + k, _mm_loadu_ps(theirs + k));
    }
    _mm_sfence();
  }
#endif

  void meet() {
    signal();
    wait();
  }

  // Release and acquire: what a rank stored before its signal is visible after the wait, and its loads are
  // done.
  void signal() { own->count.store(++epoch, std::memory_order_release); }
  void wait() const {
    while (peer->count.load(std::memory_order_acquire) < epoch) {
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
  }

  Part *own, *peer;
  bool is_second, streams;
  uint64_t epoch = 0, pulls = 0;
};

} // namespace

int main() {
  peers::Rank rank(atoi(peers::variable("PEERS_RANK").c_str()));
  if (rank.ranks != 2)
    peers::fail("the floor is for 2 ranks");
  Floor floor(rank.rank);
  rank.say("ready floor");
  rank.serve([&](float *in, float *out, size_t count) { floor.reduce(in, out, count); });
}
