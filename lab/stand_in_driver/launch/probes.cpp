#include "probes.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "../memory/memory.h"

namespace stand_in {
namespace {

// The pretended GPU. Times are in ns, rates in GB/s, which is B/ns.
constexpr double kGhz = 1.5, kThrottledGhz = 1.35;
constexpr double kArithmeticCycles = 4, kSharedCycles = 28, kL1Cycles = 36, kL2Cycles = 240,
                 kDramCycles = 690, kTranslationCycles = 210, kAcquireCycles = 9;
constexpr double kRemoteLoadNs = 820, kHostLoadNs = 1100, kSignalNs = 60, kRemoteFlightNs = 400;
constexpr double kFenceBlockCycles = 12, kFenceGpuNs = 140, kFenceSystemNs = 560, kFenceScNs = 640,
                 kStoreNs = 5;
constexpr double kSyncCycles = 20, kSyncWarpCycles = 2, kParameterCycles = 100, kColdLineCycles = 42;
constexpr double kL2Rate = 5400, kDramRate = 3200, kMultiprocessorBytes = 60, kMultiprocessorRemoteBytes = 20;
constexpr double kLinkRate = 450, kLinkPacketBytes = 128, kLinkHeaderBytes = 16, kLinkPartialBytes = 16;
constexpr uint64_t kL1Bytes = 32 << 10, kL2Bytes = 50 << 20, kLine = 128, kSector = 32, kPage = 2 << 20;

constexpr const char *kNames[] = {
    "cost_arithmetic",
    "cost_load_weak",
    "cost_load_relaxed",
    "cost_load_acquire",
    "cost_load_once",
    "cost_load_shared",
    "cost_sync",
    "cost_fence_block",
    "cost_fence_gpu",
    "cost_fence_system",
    "cost_fence_sc",
    "cost_signal",
    "cost_signal_first",
    "cost_signal_second",
    "rate_peers_store",
    "rate_peers_load",
    "rate_load",
    "rate_store",
    "cost_code",
    "evict_code",
    "empty",
    "empty_dependent",
    "parameters_64",
    "parameters_576",
    "spin",
    "raise",
};

std::atomic<bool> has_worked{false};
// A GPU that was idle has a low clock at first.
std::atomic<uint32_t> clock_runs{0};

double ghz() {
  constexpr uint32_t kColdRuns = 3;
  if (clock_runs < kColdRuns)
    return kGhz * (1 + clock_runs) / (1 + kColdRuns);
  return settings().throttle && has_worked ? kThrottledGhz : kGhz;
}

uint64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

enum class Place { Own, Peer, Host };

// A range that the context's kernels can access.
struct Range {
  uint64_t base = 0, bytes = 0;
  Place place = Place::Own;

  bool covers(uint64_t address, uint64_t length) const {
    return address >= base && address - base <= bytes && length <= bytes - (address - base);
  }
};

// Illegal accesses end the context, as on a GPU.
struct IllegalAddress {};

Range range_of(CUcontext context, uint64_t address) {
  Range range;
  if (!accessible_range(*context, address, &range.base, &range.bytes))
    throw IllegalAddress();
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(address);
  if (allocation && !allocation->on_device())
    range.place = Place::Host;
  else if (allocation && allocation->device != context->device)
    range.place = Place::Peer;
  return range;
}

template <class T>
T *at(const Range &range, uint64_t address) {
  if (!range.covers(address, sizeof(T)))
    throw IllegalAddress();
  return reinterpret_cast<T *>(address);
}

uint32_t load(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

bool poll(const uint32_t *word, uint32_t value) {
  constexpr uint64_t kLimit = 20'000'000'000;
  for (const uint64_t start = now_ns(); load(word) != value; std::this_thread::yield()) {
    if (now_ns() - start > kLimit)
      return false;
  }
  return true;
}

// Follows a ring, and returns the cycles of a step.
double chase(CUcontext context, const ProbeLaunch &launch) {
  const Range range = range_of(context, launch.memory);
  const bool once = launch.name == "cost_load_once";
  uint64_t offset = 0, extent = 0; // of the ring
  for (uint64_t step = 0; step < uint64_t(launch.iterations) * (once ? 1 : 2); ++step) {
    offset = *at<uint64_t>(range, launch.memory + offset);
    extent = std::max(extent, offset);
  }
  *at<uint64_t>(range_of(context, launch.sink), launch.sink) = offset;
  double cycles;
  if (range.place != Place::Own)
    cycles = (range.place == Place::Host ? kHostLoadNs : kRemoteLoadNs) * ghz();
  else if (launch.name == "cost_load_weak" && extent <= kL1Bytes)
    cycles = kL1Cycles;
  else if (once)
    cycles = kDramCycles;
  else
    cycles = extent <= kL2Bytes ? kL2Cycles : kDramCycles + kTranslationCycles;
  return cycles + (launch.name == "cost_load_acquire" ? kAcquireCycles : 0);
}

double fence_cycles(CUcontext context, const ProbeLaunch &launch) {
  if (launch.count > 0)
    at<uint64_t>(range_of(context, launch.memory),
                 launch.memory + (uint64_t(launch.blocks) * launch.threads * launch.count - 1) * kLine);
  if (launch.name == "cost_fence_block")
    return kFenceBlockCycles;
  const double fence = launch.name == "cost_fence_gpu"      ? kFenceGpuNs
                       : launch.name == "cost_fence_system" ? kFenceSystemNs
                                                            : kFenceScNs;
  return (fence + kStoreNs * double(launch.count)) * ghz();
}

// The first or the second of two kernels that signal each other. Returns the ns of a timed round; 0 if a
// signal does not come.
double ping_pong(CUcontext context, const ProbeLaunch &launch) {
  const Range peer_range = range_of(context, launch.count);
  uint32_t *own = at<uint32_t>(range_of(context, launch.memory), launch.memory);
  uint32_t *peer = at<uint32_t>(peer_range, launch.count);
  const bool first = launch.name == "cost_signal_first";
  if (settings().lost_stores && peer_range.place == Place::Peer)
    return 0; // as after polling in vain
  for (uint32_t round = 1; round < launch.iterations + 3; ++round) {
    if (first)
      store(peer, round);
    if (!poll(own, round))
      return 0;
    if (!first)
      store(peer, round);
  }
  const double flight = peer_range.place == Place::Peer ? kRemoteFlightNs : kSignalNs;
  return 2 * (flight + kL2Cycles / ghz());
}

struct Peers {
  uint64_t count, payload, value, address[16];
};

// Accesses the peers' lines, and returns the ns that a link takes for them. A multiprocessor limits a single
// block.
double access_peers(CUcontext context, const ProbeLaunch &launch, bool stores) {
  const Peers peers = *at<Peers>(range_of(context, launch.memory), launch.memory);
  if (peers.count == 0 || peers.count > 16 || peers.payload == 0 || peers.payload > kLine)
    throw IllegalAddress();
  for (unsigned block = 0; block < launch.blocks; ++block) {
    const uint64_t start = peers.address[block % peers.count] + block / peers.count * launch.count * kLine;
    const Range range = range_of(context, start);
    if (!range.covers(start, launch.count * kLine))
      throw IllegalAddress();
    std::vector<uint32_t> words(peers.payload / sizeof(uint32_t), uint32_t(peers.value));
    const bool arrives = stores && !(settings().lost_stores && range.place == Place::Peer);
    for (uint64_t line = 0; arrives && line < launch.count; ++line)
      memcpy(reinterpret_cast<void *>(start + line * kLine), words.data(), peers.payload);
  }
  const double lines = double(launch.blocks) * double(launch.count) * launch.iterations;
  const double partial = peers.payload < kSector ? kLinkPartialBytes : 0;
  const double packets = double(peers.payload) / std::min(double(peers.payload), kLinkPacketBytes);
  const double wire = lines * (double(peers.payload) + packets * kLinkHeaderBytes + partial);
  const double issue = double(launch.count) * launch.iterations * double(peers.payload);
  return std::max(wire / kLinkRate, issue / kMultiprocessorRemoteBytes / ghz());
}

double rate_ns(CUcontext context, const ProbeLaunch &launch) {
  const Range range = range_of(context, launch.memory);
  const double bytes = double(launch.count) * launch.blocks;
  if (!range.covers(launch.memory, launch.count * launch.blocks))
    throw IllegalAddress();
  if (launch.name == "rate_store")
    memset(reinterpret_cast<void *>(launch.memory), int(launch.iterations & 0xFF),
           launch.count * launch.blocks);
  const double all = bytes > double(kL2Bytes) ? kDramRate : kL2Rate, one = kMultiprocessorBytes * ghz();
  return bytes * launch.iterations / std::min(all, one * launch.blocks);
}

void spin(CUcontext context, const ProbeLaunch &launch) {
  const Range range = range_of(context, launch.memory);
  uint32_t *flag = at<uint32_t>(range, launch.memory);
  store(at<uint32_t>(range, launch.memory + 8), 1);
  const uint64_t start = now_ns();
  while (load(flag) == 0 && now_ns() - start < launch.count)
    std::this_thread::yield();
  uint64_t *results = at<uint64_t>(range_of(context, launch.results), launch.results);
  results[0] = load(flag) != 0;
  results[1] = start;
  results[2] = now_ns();
}

// Runs the kernel, and returns the cycles that it counts; `ns` is the time that it claims to have taken.
double run(CUcontext context, const ProbeLaunch &launch, double *ns) {
  const std::string &name = launch.name;
  const auto is = [&](const char *prefix) { return name.compare(0, strlen(prefix), prefix) == 0; };
  double cycles = 0;
  if (name == "cost_arithmetic") {
    cycles = 64 * kArithmeticCycles * launch.iterations;
    ++clock_runs;
  } else if (name == "cost_load_shared") {
    cycles = kSharedCycles * launch.iterations;
  } else if (is("cost_load")) {
    cycles = chase(context, launch) * launch.iterations;
  } else if (name == "cost_sync") {
    cycles = (kSyncCycles + kSyncWarpCycles * ((launch.threads + 31) / 32)) * launch.iterations;
  } else if (is("cost_fence")) {
    cycles = fence_cycles(context, launch) * launch.iterations;
  } else if (name == "cost_signal") {
    range_of(context, launch.memory);
    cycles = 2 * (kSignalNs * ghz() + kL2Cycles) * launch.iterations;
  } else if (is("cost_signal_")) {
    cycles = ping_pong(context, launch) * ghz() * launch.iterations;
  } else if (is("rate_peers")) {
    *ns = access_peers(context, launch, name == "rate_peers_store");
    return *ns * ghz();
  } else if (is("rate_")) {
    *ns = rate_ns(context, launch);
    return *ns * ghz();
  } else if (name == "cost_code") {
    const Range sink = range_of(context, launch.sink);
    const double warm = 1024 * kArithmeticCycles;
    for (uint32_t pass = 0; pass < launch.iterations; ++pass)
      *at<uint64_t>(sink, launch.sink + 8 * pass) = uint64_t(warm + (pass == 0 ? 128 * kColdLineCycles : 0));
  } else if (is("parameters_")) {
    cycles = kParameterCycles;
  } else if (name == "raise") {
    store(at<uint32_t>(range_of(context, launch.memory), launch.memory), 1);
  }
  *ns = cycles / ghz();
  return cycles;
}

} // namespace

void note_work() { has_worked = true; }

void add_stamps(CUcontext context, uint64_t sums, uint64_t blocks, uint32_t repetitions) {
  constexpr uint64_t kStamps = 12, kPhaseCycles = 150;
  if (!is_accessible(*context, sums, blocks * kStamps * sizeof(uint64_t)))
    return context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  for (uint64_t block = 0; block < blocks; ++block) {
    uint64_t *own = reinterpret_cast<uint64_t *>(sums) + block * kStamps;
    own[0] += repetitions;
    for (uint64_t point = 1; point < kStamps; ++point)
      own[point] += point * kPhaseCycles * repetitions;
  }
}

bool is_probe(const std::string &name) {
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

ProbeLaunch probe_launch(const std::string &name, unsigned blocks, unsigned threads, void **parameters) {
  ProbeLaunch launch = {name, blocks, threads, 0, 0, 0, 0, 0};
  const auto read = [&](int number, auto *value) { memcpy(value, parameters[number], sizeof(*value)); };
  read(0, &launch.results);
  // Kernels that measure parameters have one other, of words.
  if (name.compare(0, 11, "parameters_") != 0) {
    read(1, &launch.memory);
    read(2, &launch.count);
    read(3, &launch.iterations);
    read(4, &launch.sink);
  }
  return launch;
}

void run_probe(CUcontext context, const ProbeLaunch &launch) {
  try {
    if (launch.name == "spin")
      return spin(context, launch);
    double ns = 0;
    const uint64_t start = now_ns();
    const double cycles = run(context, launch, &ns);
    if (launch.name != "cost_arithmetic")
      note_work();
    const bool measures = launch.name != "raise" && launch.name.compare(0, 5, "empty") != 0;
    for (unsigned block = 0; measures && block < launch.blocks; ++block) {
      uint64_t *own = at<uint64_t>(range_of(context, launch.results), launch.results + 24 * block);
      own[0] = uint64_t(cycles + 0.5);
      own[1] = start;
      own[2] = start + uint64_t(ns + 0.5);
    }
  } catch (const IllegalAddress &) {
    context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  }
}

} // namespace stand_in
