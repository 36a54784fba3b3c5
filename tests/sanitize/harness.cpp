// Runs the host kernels under a sanitizer: ranks and their blocks are threads, and regions are heap memory of
// one address space, so that the sanitizer sees every access of every rank. Launches follow each other at
// random speeds, without a rendezvous in between. Every result is compared with that of a plain loop.
//
// Linked with csrc/host/, whose entry point is FA_HOST_ENTRY. Arguments: seed, launches in each world, and
// `whole` for messages of whole packs only, which only vector accesses move. With FA_INJECT_YIELDS there is
// no sanitizer. Instead, each flag access may be delayed or yield, as the seed determines, in larger worlds,
// and wrong results reveal a bug.
#include "call.hpp"

#include <sched.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block);

// State of the calling thread's generator; 0 means that the thread is not disturbed.
static thread_local uint64_t disturbance = 0;

// Runs before every access to a flag: mostly nothing, otherwise a short spin, a yield, or several.
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

#if defined(FA_PLANT_ONE_MAILBOX_GENERATION)
constexpr uint64_t kTimeout = 1'000'000'000; // the planted bug loses packets
#else
constexpr uint64_t kTimeout = 60'000'000'000;
#endif

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

  void run(const Call &call) {
    switch (call.dtype) {
    case FA_BF16: return run_as<Half>(call);
    case FA_F32: return run_as<float>(call);
    case FA_F64: return run_as<double>(call);
    case FA_U8: return run_as<uint8_t>(call);
    case FA_I32: return run_as<int32_t>(call);
    default: return run_as<int64_t>(call);
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

  // Lets ranks drift apart by up to several launches.
  void dawdle() {
    const uint64_t kind = below(20);
    if (kind == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(below(300)));
    if (kind < 6)
      std::this_thread::yield();
  }

  template <class T>
  void run_as(const Call &call) {
    using S = typename Storage<T>::type;
    const uint64_t size = sizeof(S);
    const uint64_t reads = call.input_length(rank_), writes = call.output_length(rank_);
    // Any element's address may be the start: user memory is only aligned to its elements.
    Memory input(call.count * size + reads * size, below(9) * size), output(writes * size, below(9) * size);
    const bool normalises = call.normalises();
    const bool in_input = below(3) == 0 && call.algorithm != FA_TRANSFER && !call.experts;
    // With a norm, the normalised rows may overwrite the input (`in_input`); otherwise the output may.
    const bool in_place = in_input && !normalises;
    uint64_t base = reinterpret_cast<uint64_t>(input.data());

    FaLaunch launch = {};
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      launch.regions[rank] = reinterpret_cast<uint64_t>(world_.regions[rank].get());
    }
    if (below(2) == 0 && call.can_be_direct(rank_, in_input)) {
      const uint64_t id = below(kBuffers), offset = below(8) * size;
      base = world_.table[id * FA_MAX_RANKS + rank_] + offset;
      launch.source = ((id + 1) << FA_SOURCE_ID_SHIFT) + offset;
      launch.source += in_place ? call.input_skip(rank_) * size : 0;
    }
    launch.input = base + (in_place ? call.input_skip(rank_) * size : 0);
    launch.output =
        in_place ? base + call.output_skip(rank_) * size : reinterpret_cast<uint64_t>(output.data());
    set(launch, call);
    const FaTransfers transfers = call.transfers(rank_, launch.input, launch.output, size, launch.source);
    launch.operands = reinterpret_cast<uint64_t>(&transfers);
    FaShardedNorm sharded = {};
    if (call.is_sharded()) {
      launch.count = sharded.rows = uint32_t(call.count / call.row);
      launch.operands = reinterpret_cast<uint64_t>(&sharded);
    }
    const uint64_t normed_length = normalises ? writes : 0;
    const Memory residual(normed_length * size, below(9) * size), weight(call.row * size, below(9) * size);
    Memory normed(normed_length * size, below(9) * size);
    if (call.is_sharded()) {
      const auto part = [&](uint32_t first, uint32_t columns) {
        const uint64_t skip = first * size, row = call.row * size;
        return FaShardedRows{.from = launch.input + skip,
                             .to = launch.output + skip,
                             .weight = weight.address() + skip,
                             .from_stride = row,
                             .to_stride = row,
                             .row = columns,
                             .total = columns * call.world,
                             .epsilon = Call::epsilon,
                             .unit_offset = 0};
      };
      sharded.parts = call.split < call.row ? 2 : 1;
      sharded.part[0] = part(0, call.split);
      sharded.part[1] = part(call.split, call.row - call.split);
    }
    for (uint64_t i = 0; i < call.row; ++i)
      reinterpret_cast<S *>(weight.data())[i] = Storage<T>::of(call.weight(i));
    FaFused norm = {};
    // Scales of the own and of all rows; 0xEE: not written.
    std::vector<uint8_t> own_scales, all_scales;
    FaGatheredRows gathered = {};
    if (call.algorithm == FA_ALL_GATHER_ROWS) {
      set(gathered, call, &own_scales, &all_scales);
      launch.operands = reinterpret_cast<uint64_t>(&gathered);
    }
    // Each row is the sum of two halves, which is exact.
    const uint32_t rows = call.experts ? uint32_t(call.count / call.row) : 0;
    std::vector<int32_t> table;
    std::vector<float> halves;
    for (uint32_t row = 0; row < rows; ++row) {
      const int32_t expert = int32_t(rows - 1 - row);
      table.insert(table.end(), {expert, -1, expert});
      halves.insert(halves.end(), {0.5f, NAN, 0.5f});
    }
    if (normalises) {
      if (call.experts)
        norm.experts = {.top_k = 3,
                        .rows = rows,
                        .weights_dtype = FA_F32,
                        .routed_scale = 1,
                        .table = uint64_t(table.data()),
                        .weights = uint64_t(halves.data()),
                        .shared = 0,
                        .first_entry = 0};
      const uint64_t first = call.output_skip(rank_);
      set(norm, launch, call, residual, weight, in_input ? launch.input + first * size : normed.address());
      launch.operands = reinterpret_cast<uint64_t>(&norm);
      for (uint64_t i = 0; i < writes; ++i)
        reinterpret_cast<S *>(residual.data())[i] = Storage<T>::of(call.residual(first + i));
    }

    S *in = reinterpret_cast<S *>(launch.input), *out = reinterpret_cast<S *>(launch.output);
    // A peer that still read this memory, in an earlier launch, would race with these writes.
    for (uint64_t i = 0; i < reads; ++i)
      in[i] = Storage<T>::of(call.input(rank_, call.in_memory(i)));
    launch_ = launch;
    dawdle();
    start_.arrive_and_wait();
    FA_HOST_ENTRY(&launch_, 0);
    end_.arrive_and_wait();

    if (world_.regions[rank_]->status.failure != FA_OK) {
      fail(launch, call.number, "the failure", 0, world_.regions[rank_]->status.failure, FA_OK);
    }
    for (uint64_t i = 0; i < writes; ++i) {
      const double is = Storage<T>::value(out[i]), should_be = call.output(rank_, i);
      const double rounding = call.tolerance();
      if (is < should_be - rounding || is > should_be + rounding)
        fail(launch, call.number, "the output", i, is, should_be);
    }
    for (uint64_t i = 0; i < normed_length; ++i) {
      const double is = Storage<T>::value(reinterpret_cast<S *>(norm.normed)[i]);
      const double should_be = call.normalised(call.output_skip(rank_) + i);
      const double rounding = (std::abs(should_be) + 1) * (call.dtype == FA_F32 ? 1e-5 : 1.0 / 200);
      if (!(std::abs(is - should_be) <= rounding))
        fail(launch, call.number, "the output that is normalised", i, is, should_be);
    }
    if (call.algorithm == FA_ALL_GATHER_ROWS)
      check_scales(launch, call, all_scales);
    for (uint64_t i = 0; (!in_input || writes == 0) && i < reads; ++i) {
      const int was = call.input(rank_, call.in_memory(i));
      if (Storage<T>::value(in[i]) != was)
        fail(launch, call.number, "the input", i, Storage<T>::value(in[i]), was);
    }
    if (!input.lead_is_untouched() || !output.lead_is_untouched() || !normed.lead_is_untouched() ||
        !residual.lead_is_untouched())
      fail(launch, call.number, "memory before", 0, 0, 0);
  }

  static constexpr uint32_t scale_size(const Call &call) { return call.rule == FA_RULE_F32 ? 4 : 1; }

  void set(FaGatheredRows &gathered, const Call &call, std::vector<uint8_t> *own,
           std::vector<uint8_t> *all) const {
    const uint32_t size = scale_size(call);
    const uint64_t first = call.shares[rank_].first / call.row, rows = call.shares[rank_].count / call.row;
    own->assign(call.scales(rows) * size, 0xEE);
    all->assign(call.scales(call.count / call.row) * size, 0xEE);
    for (uint64_t row = 0; row < rows; ++row) {
      for (uint32_t group = 0; group < call.groups; ++group) {
        const uint32_t scale = call.scale(first + row, group);
        memcpy(own->data() + call.place(rows, row, group) * size, &scale, size);
      }
    }
    const uint32_t words = (call.groups * size + 3) / 4;
    const auto scales = [&](const std::vector<uint8_t> &of, uint64_t rows) {
      return FaScales{reinterpret_cast<uint64_t>(of.data()),
                      call.stride(rows),
                      0,
                      1,
                      call.groups,
                      call.rule,
                      call.layout};
    };
    gathered = {scales(*own, rows), scales(*all, call.count / call.row), call.row, words};
  }

  void check_scales(const FaLaunch &launch, const Call &call, const std::vector<uint8_t> &all) const {
    const uint32_t size = scale_size(call);
    std::vector<uint8_t> should_be(all.size(), 0xEE);
    const uint64_t rows = call.count / call.row;
    for (uint64_t row = 0; row < rows; ++row) {
      for (uint32_t group = 0; group < call.groups; ++group) {
        const uint32_t scale = call.scale(row, group);
        memcpy(should_be.data() + call.place(rows, row, group) * size, &scale, size);
      }
      for (uint32_t group = call.groups; call.pads_words() && group % 4 != 0; ++group)
        should_be[call.place(rows, row, group)] = 0;
    }
    for (uint64_t i = 0; i < all.size(); ++i) {
      if (all[i] != should_be[i])
        fail(launch, call.number, "the scales", i, all[i], should_be[i]);
    }
  }

  // Half of the launches add to the residual in place.
  void set(FaFused &norm, FaLaunch &launch, const Call &call, const Memory &residual, const Memory &weight,
           uint64_t normed) {
    norm.residual = residual.address();
    if (below(2) == 0)
      launch.output = norm.residual;
    norm.norm = call.norm;
    norm.normed = normed;
    norm.weight = weight.address();
    norm.row = norm.total = call.row;
    norm.rows = uint32_t(call.output_length(rank_) / call.row);
    norm.epsilon = Call::epsilon;
  }

  // Sets everything except the addresses of the call's memory.
  void set(FaLaunch &launch, const Call &call) const {
    launch.count = call.gathers() || call.scatters() ? call.shares[rank_].count : call.count;
    memcpy(launch.shares, call.shares, sizeof launch.shares);
    launch.buffers = reinterpret_cast<uint64_t>(world_.table.data());
    launch.buffer_count = kBuffers;
    launch.status = reinterpret_cast<uint64_t>(&world_.regions[rank_]->status);
    launch.mailbox_offset = kMailboxOffset;
    launch.mailbox_bytes = kMailboxBytes;
    launch.staging_offset = kStagingOffset;
    launch.staging_bytes = kMaxBytes;
    launch.staging_slot_bytes = kMaxBytes / call.staging_slots;
    launch.socket_ranks = call.socket_ranks;
    launch.staging_last_slot = call.staging_slots - 1;
    launch.swaps_staging = world_.size == 2 && call.staging_slots == 1 && !call.experts &&
                           (call.algorithm == FA_ONE_SHOT_PULL || call.algorithm == FA_ONE_SHOT_PULL_NORM ||
                            call.scatters() || call.gathers());
    launch.channel_offset = kChannelOffset;
    launch.channel_bytes = kChannelBytes;
    launch.chunk_bytes = kChunkBytes;
    launch.channel_slots = world_.channel_slots;
    launch.channel_stripes = world_.channel_stripes;
    launch.threads = call.threads ? ~0u : 0;
    launch.direct = reinterpret_cast<uint64_t>(&world_.direct[call.number % 2]);
    launch.timeout_ns = kTimeout;
    launch.rank = rank_;
    launch.own = launch.regions[rank_];
    launch.world = world_.size;
    launch.blocks = call.blocks;
    launch.dtype = call.dtype;
    launch.op = call.op;
    launch.algorithm = call.algorithm;
    launch.spin = 4;
    launch.shares_core = rank_ % 2;
    launch.streams_output = rank_ % 2;
    launch.checked = world_.checked;
    launch.root = call.root;
    launch.transport = call.transport;
    launch.window = world_.windows[rank_].address();
    launch.multicast = reinterpret_cast<uint64_t>(world_.multicast.data());
    launch.call = {uint64_t(call.algorithm) << 8 | 1, call.count};
  }
};

void run_world(uint32_t size, uint32_t workers, uint32_t algorithm, uint32_t launches, uint64_t seed,
               bool whole) {
  // The epochs wrap past 2^32 during the test.
  World world(size, seed % 4 == 0, 2u << seed % 4, 1u << seed % 3, 0u - launches / 2);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937_64 random(seed);
      Rank self(world, rank, workers, seed);
      self.disturb(seed, 0);
      for (uint32_t number = 0; number < launches; ++number) {
        Call call = draw(random, number, size, workers, algorithm, whole);
        call.channel_stripes = world.channel_stripes;
        self.run(call);
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
      // Each algorithm alone, then all mixed.
      for (uint32_t algorithm = 0; algorithm <= kMixed; ++algorithm) {
        if (only != kMixed && only != algorithm)
          continue;
        const uint64_t world_seed = seed + size * 100 + workers * 10 + algorithm;
        run_world(size, workers, algorithm, algorithm == kMixed ? 4 * launches : launches, world_seed, whole);
      }
    }
  }
  printf("all results right\n");
}
