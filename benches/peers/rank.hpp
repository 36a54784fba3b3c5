// A rank of the comparison: its protocol with run.py, and the timed loop. Each engine supplies its allreduce.
//
// A rank connects to the Unix socket PEERS_SOCKET and exchanges lines:
//
//   rank -> driver  rank R
//   rank -> driver  share TEXT      rank 0, if the engine needs it: the driver forwards TEXT to the others
//   rank -> driver  ready WHAT      the engine's version
//   driver -> rank  measure BYTES CALLS out|in
//   rank -> driver  took MEDIAN MEAN WRONG     nanoseconds for each call, number of wrong elements
//
// It ends when the driver closes the connection. Between measurements it is blocked in a read.
#pragma once

#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace peers {

// In place each call multiplies the values by the number of ranks, a power of two, from 2^-110 on. The
// buffers are checked and filled again before the exponent has grown by 200.
constexpr int kScale = -110, kGrowth = 200;

// Inputs repeat with this period.
constexpr size_t kPeriod = 1021;

[[noreturn]] inline void fail(const std::string &why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(1);
}

inline std::string variable(const char *name) {
  const char *value = getenv(name);
  if (!value)
    fail(std::string(name) + " is not set: run.py starts the ranks");
  return value;
}

inline float input(int rank, size_t i) {
  return std::ldexp(float((i * 13 + rank * 7) % kPeriod + 1), kScale);
}

struct Free {
  void operator()(float *pointer) const { free(pointer); }
};

// Private memory aligned to a page. The caller touches it first, when it fills it.
inline std::unique_ptr<float[], Free> buffer(size_t count) {
  void *memory = nullptr;
  if (posix_memalign(&memory, 4096, count * sizeof(float)) != 0)
    fail("no memory for a buffer of " + std::to_string(count) + " elements");
  return std::unique_ptr<float[], Free>(static_cast<float *>(memory));
}

class Rank {
public:
  explicit Rank(int rank) : rank(rank), ranks(atoi(variable("PEERS_RANKS").c_str())) {
    if (rank >= ranks || ranks < 2 || (ranks & (ranks - 1)) != 0)
      fail("the number of ranks is not a power of two, or the launcher has started others");
    for (size_t i = 0; i < kPeriod; i++) {
      own.push_back(input(rank, i));
      total.push_back(0);
      for (int r = 0; r < ranks; r++)
        total[i] += input(r, i);
    }
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core(rank), &cores);
    if (sched_setaffinity(0, sizeof cores, &cores) != 0)
      fail("this rank cannot be pinned to its core");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strncpy(address.sun_path, variable("PEERS_SOCKET").c_str(), sizeof address.sun_path - 1);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket < 0 || connect(socket, reinterpret_cast<sockaddr *>(&address), sizeof address) != 0)
      fail("the driver's socket cannot be reached");
    // A stream for each direction: a single stream needs a seek between reading and writing.
    from_driver = fdopen(socket, "r");
    to_driver = fdopen(dup(socket), "w");
    if (!from_driver || !to_driver)
      fail("no stream to the driver");
    say("rank " + std::to_string(rank));
  }

  void say(const std::string &line) {
    if (fprintf(to_driver, "%s\n", line.c_str()) < 0 || fflush(to_driver) != 0)
      fail("the driver has gone");
  }

  // Reads the next line. Returns false at the end.
  bool line(std::string &text) {
    char read[4096];
    if (!fgets(read, sizeof read, from_driver))
      return false;
    text = read;
    text.erase(text.find_last_not_of('\n') + 1);
    return true;
  }

  // Measures on request. `reduce(in, out, count)` is an allreduce that sums; in == out if the driver requests
  // that.
  template <typename Reduce>
  void serve(Reduce reduce) {
    for (std::string command; line(command);) {
      size_t bytes = 0, calls = 0;
      char where[8] = "";
      if (sscanf(command.c_str(), "measure %zu %zu %7s", &bytes, &calls, where) != 3 || calls == 0)
        fail("not understood: " + command);
      measure(bytes / sizeof(float), calls, strcmp(where, "in") == 0, reduce);
    }
  }

  const int rank, ranks;

private:
  // The core of a rank. Ranks share cores if there are fewer.
  static int core(int rank) {
    std::vector<int> cores;
    std::istringstream list(variable("PEERS_CORES"));
    for (std::string number; std::getline(list, number, ',');)
      cores.push_back(stoi(number));
    return cores.at(rank % cores.size());
  }

  template <typename Reduce>
  void measure(size_t count, size_t calls, bool in_place, Reduce reduce) {
    const auto in = buffer(count);
    const auto separate = in_place ? nullptr : buffer(count);
    float *const out = in_place ? in.get() : separate.get();
    const int doublings = __builtin_ctz(unsigned(ranks));
    const size_t chunk = kGrowth / doublings - 10;
    size_t wrong = 0;
    std::vector<double> times;
    while (times.size() < calls) {
      const size_t timed = std::min(calls - times.size(), chunk);
      const size_t untimed = std::clamp<size_t>(timed / 2, 1, 10);
      for (size_t i = 0; i < count; i++) {
        out[i] = std::numeric_limits<float>::quiet_NaN();
        in[i] = own[i % kPeriod];
      }
      for (size_t i = 0; i < untimed; i++)
        reduce(in.get(), out, count);
      auto before = std::chrono::steady_clock::now();
      for (size_t i = 0; i < timed; i++) {
        reduce(in.get(), out, count);
        const auto now = std::chrono::steady_clock::now();
        times.push_back(std::chrono::duration<double, std::nano>(now - before).count());
        before = now;
      }
      // f64, because an f32 cannot hold the factor; it can hold the products.
      const double factor = std::ldexp(1.0, in_place ? doublings * int(untimed + timed - 1) : 0);
      for (size_t i = 0; i < count; i++)
        wrong += out[i] != float(total[i % kPeriod] * factor);
    }
    double mean = 0;
    for (double time : times)
      mean += time / times.size();
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    say("took " + std::to_string(times[times.size() / 2]) + " " + std::to_string(mean) + " " +
        std::to_string(wrong));
  }

  std::vector<float> own, total; // one period of this rank's input and of the sum
  FILE *from_driver, *to_driver;
};

} // namespace peers
