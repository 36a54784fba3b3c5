// Registered inputs whose owner fails while peers still read them, where launches run in streams. Linked with
// csrc/host/, compiled with FA_STREAMS=1. Rank 0 waits for a shorter time than the others, and overwrites its
// input as soon as its launch has ended, like work queued after the launch. A launch that succeeds must have
// the right result. Arguments: seed, rounds.
#include "region.hpp"

#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block);

// The generator of the calling thread.
static thread_local std::minstd_rand disturbance;

// Runs before every access to a flag: now and then it waits about as long as a rank waits before it fails.
extern "C" void fa_inject_yield(void) {
  const uint32_t drawn = disturbance();
  if (drawn % 16 != 0)
    return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(drawn / 16 % 60000);
  while (std::chrono::steady_clock::now() < end) {
  }
}

namespace {

constexpr uint64_t kCount = 50000, kBytes = kCount * sizeof(uint32_t);
constexpr uint64_t kStaging = sizeof(FaRegionHead), kRegion = kStaging + 2 * kBytes;
constexpr uint32_t kOverwritten = 0xDEAD0000;

uint32_t input(uint32_t rank) { return 1u << 8 * rank; }

using Words = std::vector<uint32_t>;

struct Rank {
  std::unique_ptr<FaRegionHead, void (*)(void *)> region{
      static_cast<FaRegionHead *>(aligned_alloc(128, (kRegion + 127) / 128 * 128)), free};
  Words buffer = Words(kCount), output;
};

// Runs one launch of every rank. Returns the number that succeeded; ends the program if one of them is wrong.
uint32_t round(uint32_t world, uint32_t algorithm, uint64_t limit, uint32_t seed) {
  std::vector<Rank> ranks(world);
  Words table(2 * FA_MAX_RANKS);
  for (uint32_t rank = 0; rank < world; ++rank) {
    memset(ranks[rank].region.get(), 0, kRegion);
    ranks[rank].buffer.assign(kCount, input(rank));
    ranks[rank].output.assign(kCount * world, 0);
    const uint64_t address = reinterpret_cast<uint64_t>(ranks[rank].buffer.data());
    memcpy(&table[2 * rank], &address, sizeof address);
  }
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      disturbance.seed(seed + rank);
      FaLaunch launch = {};
      for (uint32_t other = 0; other < world; ++other) {
        launch.regions[other] = reinterpret_cast<uint64_t>(ranks[other].region.get());
        const uint64_t share = kCount / world;
        launch.shares[other] =
            algorithm == FA_ALL_GATHER ? FaShare{other * kCount, kCount} : FaShare{other * share, share};
      }
      launch.input = reinterpret_cast<uint64_t>(ranks[rank].buffer.data());
      launch.output = reinterpret_cast<uint64_t>(ranks[rank].output.data());
      launch.count = kCount;
      launch.source = uint64_t(1) << FA_SOURCE_ID_SHIFT;
      launch.buffers = reinterpret_cast<uint64_t>(table.data());
      launch.buffer_count = 1;
      launch.status = reinterpret_cast<uint64_t>(&ranks[rank].region->status);
      launch.mailbox_offset = launch.staging_offset = kStaging;
      launch.staging_bytes = kBytes;
      launch.timeout_ns = rank == 0 ? limit : 100 * 1000 * 1000;
      launch.rank = rank;
      launch.own = launch.regions[rank];
      launch.world = world;
      launch.blocks = 1;
      launch.dtype = FA_U32;
      launch.op = FA_SUM;
      launch.algorithm = algorithm;
      launch.spin = 1;
      launch.shares_core = 1;
      FA_HOST_ENTRY(&launch, 0);
      if (rank == 0)
        std::fill(ranks[0].buffer.begin(), ranks[0].buffer.end(), kOverwritten);
    });
  }
  for (std::thread &thread : threads)
    thread.join();

  uint32_t succeeded = 0, sum = 0;
  for (uint32_t rank = 0; rank < world; ++rank)
    sum += input(rank);
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (ranks[rank].region->status.failure != FA_OK)
      continue;
    ++succeeded;
    const bool shares = algorithm == FA_REDUCE_SCATTER;
    const uint64_t length = algorithm == FA_ALL_GATHER ? kCount * world : shares ? kCount / world : kCount;
    for (uint64_t i = 0; i < length; ++i) {
      const uint32_t should_be = algorithm == FA_ALL_GATHER ? input(i / kCount) : sum;
      if (ranks[rank].output[i] != should_be) {
        fprintf(stderr, "rank %u of %u, algorithm %u: the output [%lu] is %x, not %x\n", rank, world,
                algorithm, i, ranks[rank].output[i], should_be);
        _Exit(3);
      }
    }
  }
  return succeeded;
}

} // namespace

int main(int argc, char **argv) {
  std::mt19937_64 random(argc > 1 ? strtoull(argv[1], nullptr, 10) : 1);
  const uint32_t rounds = argc > 2 ? uint32_t(atoi(argv[2])) : 200;
  const bool gathered = argc > 3 && std::string(argv[3]) == "gathered";
  std::vector<uint32_t> algorithms = {FA_ONE_SHOT_PULL, FA_TWO_SHOT_PULL, FA_REDUCE_SCATTER, FA_ALL_GATHER};
  if (gathered)
    algorithms.assign(4, FA_TWO_SHOT_PULL);
  uint64_t succeeded = 0, launches = 0;
  for (uint32_t number = 0; number < rounds; ++number) {
    for (uint32_t algorithm : algorithms) {
      const uint32_t world = gathered ? 3 : 2 + random() % 2;
      const uint64_t limit = 1 + random() % 150000;
      succeeded += round(world, algorithm, limit, uint32_t(random()));
      launches += world;
    }
  }
  printf("%lu of %lu launches succeeded\n", succeeded, launches);
  // Rounds in which all or none fail would prove nothing.
  return succeeded > 0 && succeeded < launches ? 0 : 4;
}
