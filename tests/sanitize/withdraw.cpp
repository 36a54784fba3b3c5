// Messages that the receiver reads from the sender's memory, while the sender fails. Linked with csrc/host/.
// The sender waits for a random time. As soon as its launch has ended it overwrites the message, and frees it
// unless the receiver has it mapped. A launch that succeeds must have received the message that was sent.
// Arguments: seed, rounds, and where the receiver reads the message: `threads`, `mapped`, through the
// operating system in this process (`direct`), or in a process that is no longer the sender's (`dead`: a
// child with other data at the address; the sender goes on).
#include "region.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" void FA_HOST_ENTRY(const FaLaunch *launch, uint32_t block);

namespace {

constexpr uint64_t kWords = 200000, kBytes = kWords * sizeof(uint32_t);
constexpr uint64_t kChannels = sizeof(FaRegionHead), kRegion = kChannels + 8 * (sizeof(FaChunk) + 128);
constexpr uint64_t kLongNs = 20 * 1000 * 1000;
constexpr uint32_t kSent = 0x01020304, kOverwritten = 0xDEAD0000;

using Region = std::unique_ptr<FaRegionHead, void (*)(void *)>;

Region region() {
  void *memory = aligned_alloc(128, (kRegion + 127) / 128 * 128);
  memset(memory, 0, kRegion);
  return {static_cast<FaRegionHead *>(memory), free};
}

enum class Where { kThreads, kMapped, kDirect, kDead };

// Starts a process with other data in place of the message, which runs until it is killed.
pid_t other_process(uint32_t *message) {
  void *page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  volatile uint32_t *filled = static_cast<uint32_t *>(page);
  const pid_t child = fork();
  if (child == 0) {
    for (uint64_t i = 0; i < kWords; ++i)
      message[i] = kOverwritten;
    *filled = 1;
    for (;;)
      pause();
  }
  while (*filled == 0)
    usleep(100);
  munmap(page, 4096);
  return child;
}

// Sends one message. Returns whether sender and receiver succeeded; ends the program if the received data is
// wrong.
std::pair<bool, bool> round(Where where, bool always, uint64_t limit, uint64_t delay) {
  const Region regions[2] = {region(), region()};
  uint32_t *message = new uint32_t[kWords];
  std::fill(message, message + kWords, kSent);
  std::vector<uint32_t> output(kWords, 0);
  std::vector<uint64_t> table(FA_MAX_RANKS);
  table[0] = reinterpret_cast<uint64_t>(message);
  const bool threads = where == Where::kThreads;
  const uint32_t exit_futex = where == Where::kDead ? FUTEX_OWNER_DIED | 1 : 1;
  FaDirect direct = {};
  direct.exit_futex[0] = reinterpret_cast<uint64_t>(&exit_futex);
  direct.process[0] = uint32_t(where == Where::kDead ? other_process(message) : getpid());
  direct.always = always;
  const auto run = [&](uint32_t rank, uint64_t timeout, const FaTransfer &transfer) {
    FaTransfers transfers = {};
    // Of channels 0 to 3, rank 0 sends through 2, and rank 1 receives through 1.
    for (uint32_t c = rank == 0 ? 3 : 2; c < 5; ++c)
      transfers.first[c] = transfers.stripes[c] = 1;
    transfers.transfer[0] = transfer;
    FaLaunch launch = {};
    for (uint32_t other = 0; other < 2; ++other)
      launch.regions[other] = reinterpret_cast<uint64_t>(regions[other].get());
    launch.buffers = reinterpret_cast<uint64_t>(table.data());
    launch.buffer_count = 1;
    launch.status = reinterpret_cast<uint64_t>(&regions[rank]->status);
    launch.channel_offset = kChannels;
    launch.chunk_bytes = 128;
    launch.channel_slots = 8;
    launch.channel_stripes = 1;
    launch.threads = threads ? 3 : 0;
    launch.direct = reinterpret_cast<uint64_t>(&direct);
    launch.operands = reinterpret_cast<uint64_t>(&transfers);
    launch.timeout_ns = timeout;
    launch.rank = rank;
    launch.own = launch.regions[rank];
    launch.world = 2;
    launch.blocks = 1;
    launch.algorithm = FA_TRANSFER;
    launch.spin = 1;
    launch.shares_core = 1;
    FA_HOST_ENTRY(&launch, 0);
    return regions[rank]->status.failure == FA_OK;
  };
  bool sent = false, received = false;
  std::thread sender([&] {
    const uint64_t source = where == Where::kMapped ? uint64_t(1) << FA_SOURCE_ID_SHIFT
                                                    : table[0] | uint64_t(1) << FA_SOURCE_PRIVATE_SHIFT;
    sent = run(0, limit, {table[0], kBytes, source, 7, 0});
    std::fill(message, message + kWords, kOverwritten);
    if (where != Where::kMapped)
      delete[] message;
  });
  std::thread receiver([&] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(delay));
    received = run(1, kLongNs, {reinterpret_cast<uint64_t>(output.data()), kBytes, 0, 7, 0});
  });
  sender.join();
  receiver.join();
  if (where == Where::kMapped)
    delete[] message;
  if (where == Where::kDead) {
    kill(pid_t(direct.process[0]), SIGKILL);
    waitpid(pid_t(direct.process[0]), nullptr, 0);
  }
  for (uint64_t i = 0; received && i < kWords; ++i) {
    if (output[i] != kSent) {
      fprintf(stderr, "the output [%lu] is %x, not %x\n", i, output[i], kSent);
      _Exit(3);
    }
  }
  return {sent, received};
}

// The median time in ns of a few messages, from the start of the sender until they are received.
uint64_t time_of_a_message(Where where) {
  std::array<uint64_t, 9> times;
  for (uint64_t &time : times) {
    const auto begin = std::chrono::steady_clock::now();
    round(where, true, kLongNs, 0);
    time = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

} // namespace

int main(int argc, char **argv) {
  std::mt19937_64 random(argc > 1 ? strtoull(argv[1], nullptr, 10) : 1);
  const std::string name = argc > 3 ? argv[3] : "mapped";
  const Where where = name == "threads"  ? Where::kThreads
                      : name == "direct" ? Where::kDirect
                      : name == "dead"   ? Where::kDead
                                         : Where::kMapped;
  const uint32_t asked = argc > 2 ? uint32_t(atoi(argv[2])) : 200;
  const uint32_t rounds = where == Where::kDead ? std::min(asked, 40u) : asked;
  // Limits and delays are about as long as a message takes here, instrumented and next to other programs.
  const uint64_t message_ns = where == Where::kDead ? kLongNs : time_of_a_message(where);
  uint64_t sent = 0, received = 0;
  for (uint32_t number = 0; number < rounds; ++number) {
    const uint64_t limit = where == Where::kDead ? kLongNs : 1 + random() % (2 * message_ns);
    const auto [sender, receiver] = round(where, random() % 8 != 0, limit, random() % message_ns);
    sent += sender;
    received += receiver;
    if (sender && !receiver) {
      fprintf(stderr, "a message was sent that was not received\n");
      return 3;
    }
  }
  printf("%lu of %u sent, %lu received\n", sent, rounds, received);
  // Rounds in which all or none fail would prove nothing.
  return received > 0 && (sent < rounds || where == Where::kDead) ? 0 : 4;
}
