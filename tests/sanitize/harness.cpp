// Runs the host kernels under a sanitizer: ranks and their blocks are threads, regions are heap memory of one
// address space, so that every access of every rank is seen. Launches follow each other without a rendezvous
// between them, at random speeds; every result is compared with a plain loop.
//
// Linked with csrc/host.cpp, whose entry point is FA_HOST_ENTRY. Arguments: seed, launches in each world, and
// `whole` for messages of whole packs only, which are moved by vector accesses alone. With FA_INJECT_YIELDS
// there is no sanitizer, but a delay or a yield at any flag access, drawn from the seed, in larger worlds:
// wrong results are what tells.
#include "../../csrc/abi.h"

#include <sched.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block);

// The generator of the calling thread; a thread that has none is not disturbed.
static thread_local uint64_t disturbance = 0;

// Before every access to a flag: mostly nothing, else a short spin, a yield, or several.
extern "C" void fa_inject_yield(void) {
  if (disturbance == 0)
    return;
  disturbance ^= disturbance << 13;
  disturbance ^= disturbance >> 7;
  disturbance ^= disturbance << 17;
  const uint32_t kind = disturbance >> 32 & 15, length = disturbance >> 40 & 255;
  if (kind < 3) {
    for (volatile uint32_t i = 0; i < length; i = i + 1) {
    }
  } else if (kind < 6) {
    for (uint32_t i = 0; i <= length % 4; ++i)
      sched_yield();
  }
}

namespace {

#if defined(FA_INJECT_YIELDS)
constexpr uint32_t kSmallestWorld = 3, kLargestWorld = 5;
#else
constexpr uint32_t kSmallestWorld = 1, kLargestWorld = 4;
#endif

constexpr uint64_t kMaxBytes = 16384;
constexpr uint64_t kMailboxBytes = kMaxBytes / FA_HOST_SLOT_BYTES * FA_HOST_SLOT_BYTES;
constexpr uint64_t kMailboxOffset = sizeof(FaRegionHead);
constexpr uint64_t kStagingOffset = (kMailboxOffset + 2 * kMailboxBytes + 127) / 128 * 128;
constexpr uint64_t kRegionBytes = kStagingOffset + 2 * kMaxBytes;
// Within the smallest capacity, which is that of a one-shot push between most ranks.
constexpr uint64_t kMostBytes = kLargestWorld > 4 ? 2400 : 3000;
static_assert((kMostBytes + FA_HOST_PACK_BYTES - 1) / FA_HOST_PACK_BYTES <=
              kMailboxBytes / FA_HOST_SLOT_BYTES / kLargestWorld);
#if defined(FA_PLANT_ONE_MAILBOX_GENERATION)
constexpr uint64_t kTimeout = 1'000'000'000; // the planted bug loses packets
#else
constexpr uint64_t kTimeout = 60'000'000'000;
#endif
constexpr uint32_t kBuffers = 2;
constexpr uint32_t kMixed = 4; // instead of one algorithm

// Heap memory of exactly so many bytes behind `lead` bytes, so that an access beyond its end is seen.
class Memory {
public:
  Memory(size_t bytes, size_t lead) : base_(new uint8_t[bytes + lead]), lead_(lead) {
    memset(base_.get(), 0xA5, bytes + lead);
  }
  uint8_t *data() const { return base_.get() + lead_; }
  bool lead_is_untouched() const {
    for (size_t i = 0; i < lead_; ++i) {
      if (base_[i] != 0xA5)
        return false;
    }
    return true;
  }

private:
  std::unique_ptr<uint8_t[]> base_;
  size_t lead_;
};

struct Half {}; // bfloat16 of small integers, which are exact

template <class T>
struct Storage {
  using type = T;
  static T of(int value) { return T(value); }
  static double value(T stored) { return double(stored); }
};
template <>
struct Storage<Half> {
  using type = uint16_t;
  static uint16_t of(int value) {
    const float number = float(value);
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return uint16_t(bits >> 16);
  }
  static double value(uint16_t stored) {
    const uint32_t bits = uint32_t(stored) << 16;
    float number;
    memcpy(&number, &bits, sizeof bits);
    return number;
  }
};

// Inputs are small integers: every result is exact in every type.
int input_value(uint32_t launch, uint32_t rank, uint64_t i) {
  return int((launch * 7 + rank * 3 + i) % 6) + 1;
}

double expected_value(const FaLaunch &launch, uint32_t number, uint64_t i) {
  double result = input_value(number, 0, i);
  for (uint32_t rank = 1; rank < launch.world; ++rank) {
    const double value = input_value(number, rank, i);
    switch (launch.op) {
    case FA_SUM:
    case FA_AVG: result += value; break;
    case FA_PROD: result *= value; break;
    case FA_MIN: result = value < result ? value : result; break;
    default: result = value > result ? value : result; break;
    }
  }
  if (launch.op != FA_AVG)
    return result;
  result /= launch.world;
  return launch.dtype == FA_F32 || launch.dtype == FA_F64 ? result : double(int64_t(result));
}

// What all ranks do in one launch.
struct Call {
  uint32_t algorithm, blocks, dtype, op;
  uint64_t count;
};

struct World {
  uint32_t size;
  std::vector<std::unique_ptr<FaRegionHead, void (*)(void *)>> regions;
  std::vector<std::vector<Memory>> buffers; // [buffer][rank]
  std::vector<uint64_t> table;              // [buffer][FA_MAX_RANKS], as kernels read it

  World(uint32_t size, uint32_t first_epoch) : size(size), table(kBuffers * FA_MAX_RANKS) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      void *memory = aligned_alloc(128, (kRegionBytes + 127) / 128 * 128);
      memset(memory, 0, kRegionBytes);
      regions.emplace_back(static_cast<FaRegionHead *>(memory), free);
      for (uint32_t &epoch : regions[rank]->epoch)
        epoch = first_epoch;
    }
    for (uint32_t id = 0; id < kBuffers; ++id) {
      auto &ranks = buffers.emplace_back();
      for (uint32_t rank = 0; rank < size; ++rank) {
        ranks.emplace_back(kMostBytes + 64, 0);
        table[id * FA_MAX_RANKS + rank] = reinterpret_cast<uint64_t>(ranks[rank].data());
      }
    }
  }
};

[[noreturn]] void fail(const FaLaunch &launch, uint32_t number, const char *what, uint64_t i, double is,
                       double should_be) {
  fprintf(stderr,
          "launch %u, rank %u of %u, algorithm %u, type %u, op %u, %lu elements, %u blocks: %s [%lu] is %g, "
          "not %g\n",
          number, launch.rank, launch.world, launch.algorithm, launch.dtype, launch.op, launch.count,
          launch.blocks, what, i, is, should_be);
  _Exit(3);
}

// One rank: a thread for each block beyond the first, which the rank's own thread runs.
class Rank {
public:
  Rank(World &world, uint32_t rank, uint32_t workers, uint64_t seed)
      : world_(world), rank_(rank), random_(seed * 64 + rank), start_(workers), end_(workers) {
    for (uint32_t block = 1; block < workers; ++block) {
      workers_.emplace_back([this, block, seed] {
        disturb(seed, block);
        for (;;) {
          start_.arrive_and_wait();
          if (stop_)
            return;
          if (block < launch_.blocks)
            FA_HOST_ENTRY(&launch_, block);
          end_.arrive_and_wait();
        }
      });
    }
  }

  ~Rank() {
    stop_ = true;
    start_.arrive_and_wait();
    for (std::thread &worker : workers_)
      worker.join();
  }

  // Gives the calling thread, which runs `block`, its generator.
  void disturb(uint64_t seed, uint32_t block) const {
    disturbance = (seed * FA_MAX_RANKS + rank_) * FA_MAX_BLOCKS + block + 1;
    disturbance *= 0x9E3779B97F4A7C15;
  }

  void run(const Call &call, uint32_t number) {
    switch (call.dtype) {
    case FA_BF16: return run_as<Half>(call, number);
    case FA_F32: return run_as<float>(call, number);
    case FA_F64: return run_as<double>(call, number);
    case FA_U8: return run_as<uint8_t>(call, number);
    case FA_I32: return run_as<int32_t>(call, number);
    default: return run_as<int64_t>(call, number);
    }
  }

private:
  World &world_;
  uint32_t rank_;
  std::mt19937_64 random_;
  std::barrier<> start_, end_;
  bool stop_ = false;
  FaLaunch launch_ = {};
  std::vector<std::thread> workers_;

  uint64_t below(uint64_t limit) { return random_() % limit; }

  // Ranks run apart by up to some launches' time.
  void dawdle() {
    const uint64_t kind = below(20);
    if (kind == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(below(300)));
    if (kind < 6)
      std::this_thread::yield();
  }

  template <class T>
  void run_as(const Call &call, uint32_t number) {
    using S = typename Storage<T>::type;
    const uint64_t bytes = call.count * sizeof(S);
    // Views at any element; user memory is aligned to its element and no more.
    Memory input(bytes, below(9) * sizeof(S)), output(bytes, below(9) * sizeof(S));
    const bool in_place = below(3) == 0;
    const bool direct = below(2) == 0 && !(in_place && call.algorithm == FA_ONE_SHOT_PULL);

    FaLaunch launch = {};
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      launch.regions[rank] = reinterpret_cast<uint64_t>(world_.regions[rank].get());
    }
    launch.input = reinterpret_cast<uint64_t>(input.data());
    if (direct) {
      const uint64_t id = below(kBuffers), offset = below(8) * sizeof(S);
      launch.input = world_.table[id * FA_MAX_RANKS + rank_] + offset;
      launch.source = ((id + 1) << FA_SOURCE_ID_SHIFT) + offset;
    }
    launch.output = in_place ? launch.input : reinterpret_cast<uint64_t>(output.data());
    launch.count = call.count;
    launch.buffers = reinterpret_cast<uint64_t>(world_.table.data());
    launch.buffer_count = kBuffers;
    launch.status = reinterpret_cast<uint64_t>(&world_.regions[rank_]->status);
    launch.mailbox_offset = kMailboxOffset;
    launch.mailbox_bytes = kMailboxBytes;
    launch.staging_offset = kStagingOffset;
    launch.staging_bytes = kMaxBytes;
    launch.timeout_ns = kTimeout;
    launch.rank = rank_;
    launch.world = world_.size;
    launch.blocks = call.blocks;
    launch.dtype = call.dtype;
    launch.op = call.op;
    launch.algorithm = call.algorithm;
    launch.spin = 4;

    S *in = reinterpret_cast<S *>(launch.input), *out = reinterpret_cast<S *>(launch.output);
    // A peer that still read this memory, from an earlier launch, would race with these writes.
    for (uint64_t i = 0; i < call.count; ++i)
      in[i] = Storage<T>::of(input_value(number, rank_, i));
    launch_ = launch;
    dawdle();
    start_.arrive_and_wait();
    FA_HOST_ENTRY(&launch_, 0);
    end_.arrive_and_wait();

    if (world_.regions[rank_]->status.failure != FA_OK) {
      fail(launch, number, "the failure", 0, world_.regions[rank_]->status.failure, FA_OK);
    }
    for (uint64_t i = 0; i < call.count; ++i) {
      const double is = Storage<T>::value(out[i]), should_be = expected_value(launch, number, i);
      const double rounding = call.op == FA_AVG && call.dtype == FA_F32 ? 1e-6 : 0;
      if (is < should_be - rounding || is > should_be + rounding)
        fail(launch, number, "the output", i, is, should_be);
      if (!in_place && Storage<T>::value(in[i]) != input_value(number, rank_, i)) {
        fail(launch, number, "the input", i, Storage<T>::value(in[i]), input_value(number, rank_, i));
      }
    }
    if (!input.lead_is_untouched() || !output.lead_is_untouched())
      fail(launch, number, "memory before", 0, 0, 0);
  }
};

// The same on all ranks: drawn from a generator that each rank seeds alike. At least one element: a launch of
// none would hear from nobody, and the callers of kernels start none.
Call draw(std::mt19937_64 &random, uint32_t workers, uint32_t fixed_algorithm, bool whole) {
  static constexpr uint32_t dtypes[] = {FA_BF16, FA_F32, FA_F64, FA_U8, FA_I32, FA_I64};
  static constexpr uint32_t sizes[] = {2, 4, 8, 1, 4, 8};
  const uint32_t type = random() % 6;
  Call call;
  call.algorithm = fixed_algorithm < kMixed ? fixed_algorithm : random() % 4;
  call.blocks = random() % 2 ? workers : 1;
  call.dtype = dtypes[type];
  call.op = random() % 2 ? uint32_t(FA_SUM) : random() % 5;
  // bfloat16 has 8 bits: averages would be rounded, products of 4 ranks and more too.
  if (call.dtype == FA_BF16 && (call.op == FA_AVG || call.op == FA_PROD))
    call.op = FA_SUM;
  // 6^4 does not fit 8 bits.
  if (call.dtype == FA_U8 && call.op == FA_PROD)
    call.op = FA_MAX;
  const uint64_t most = kMostBytes / sizes[type];
  switch (random() % 4) {
  case 0: call.count = 1 + random() % 3; break;
  case 1: call.count = 1 + random() % (64 / sizes[type] + 1); break;
  default: call.count = 1 + random() % most; break;
  }
  const uint64_t lanes = FA_HOST_PACK_BYTES / sizes[type];
  if (whole)
    call.count = call.count < lanes ? lanes : call.count / lanes * lanes;
  return call;
}

void run_world(uint32_t size, uint32_t workers, uint32_t algorithm, uint32_t launches, uint64_t seed,
               bool whole) {
  // The epochs pass 2^32 on the way.
  World world(size, 0u - launches / 2);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937_64 random(seed);
      Rank self(world, rank, workers, seed);
      self.disturb(seed, 0);
      for (uint32_t number = 0; number < launches; ++number) {
        self.run(draw(random, workers, algorithm, whole), number);
      }
    });
  }
  for (std::thread &rank : ranks)
    rank.join();
}

} // namespace

int main(int argc, char **argv) {
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  const uint32_t launches = argc > 2 ? uint32_t(atoi(argv[2])) : 100;
  const bool whole = argc > 3 && std::string(argv[3]) == "whole";
  const uint32_t only = argc > 4 ? uint32_t(atoi(argv[4])) : kMixed;
  printf("seed %lu, %u launches in each world\n", seed, launches);
  for (uint32_t size = kSmallestWorld; size <= kLargestWorld; ++size) {
    for (uint32_t workers : {1u, 3u}) {
      // Each algorithm after itself, then all mixed.
      for (uint32_t algorithm = 0; algorithm <= kMixed; ++algorithm) {
        if (only != kMixed && only != algorithm)
          continue;
        const uint64_t world_seed = seed + size * 100 + workers * 10 + algorithm;
        run_world(size, workers, algorithm, algorithm == kMixed ? 2 * launches : launches, world_seed, whole);
      }
    }
  }
  printf("all results right\n");
}
