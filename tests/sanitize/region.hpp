// Memory that the launches of a world share: regions and registered buffers on the heap, exactly as large as
// the kernels may access. Also their element types.
#pragma once

#include "../../csrc/abi.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <unistd.h>

#if defined(FA_INJECT_YIELDS)
constexpr uint32_t kSmallestWorld = 3, kLargestWorld = 5;
#else
constexpr uint32_t kSmallestWorld = 1, kLargestWorld = 4;
#endif

constexpr uint64_t kMaxBytes = 16384;
constexpr uint64_t kMailboxSlots = kMaxBytes / FA_HOST_SLOT_BYTES;
constexpr uint64_t kMailboxBytes = kMailboxSlots * FA_HOST_SLOT_BYTES;
constexpr uint64_t kMailboxOffset = sizeof(FaRegionHead);
constexpr uint64_t kStagingOffset = (kMailboxOffset + 2 * kMailboxBytes + 127) / 128 * 128;
constexpr uint64_t kChannelOffset = kStagingOffset + 2 * kMaxBytes;
// Chunks of 128 bytes, so that a message has many.
constexpr uint64_t kChunkBytes = 128, kMostChannelSlots = 16;
// The host has one stripe, but the code for several, as on GPUs, is the same.
constexpr uint32_t kMostStripes = 4;
constexpr uint64_t kChannelBytes =
    (sizeof(FaChunk) + kChunkBytes) * kMostChannelSlots * kMostStripes * (kLargestWorld - 1);
constexpr uint64_t kRegionBytes = kChannelOffset + kChannelBytes;
// Within the capacity of a one-shot push between kLargestWorld ranks.
constexpr uint64_t kMostBytes = kLargestWorld > 4 ? 2400 : 3000;
static_assert((kMostBytes + FA_HOST_PACK_BYTES - 1) / FA_HOST_PACK_BYTES <= kMailboxSlots / kLargestWorld);
constexpr uint32_t kBuffers = 2;

// Heap memory of exactly `bytes` bytes after `lead` bytes, so that the sanitizer sees an access beyond its
// end.
class Memory {
public:
  Memory(size_t bytes, size_t lead) : base_(new uint8_t[bytes + lead]), lead_(lead) {
    memset(base_.get(), 0xA5, bytes + lead);
  }
  uint8_t *data() const { return base_.get() + lead_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data()); }
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

struct Half {}; // bfloat16 values of small integers, which are exact

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

struct World {
  uint32_t size;
  bool checked; // ranks compare their calls first
  uint32_t channel_slots, channel_stripes;
  std::vector<std::unique_ptr<FaRegionHead, void (*)(void *)>> regions;
  std::vector<std::vector<Memory>> buffers; // [buffer][rank]
  std::vector<uint64_t> table;              // [buffer][FA_MAX_RANKS], as kernels read it
  std::vector<Memory> windows;              // each rank's window, and their addresses
  std::vector<uint64_t> multicast;
  uint32_t exit_futex = 1;
  FaDirect direct[2] = {}; // [0] reads directly where that is faster, [1] always

  World(uint32_t size, bool checked, uint32_t channel_slots, uint32_t channel_stripes, uint32_t first_epoch)
      : size(size), checked(checked), channel_slots(channel_slots), channel_stripes(channel_stripes),
        table(kBuffers * FA_MAX_RANKS) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      void *memory = aligned_alloc(128, (kRegionBytes + 127) / 128 * 128);
      memset(memory, 0, kRegionBytes);
      regions.emplace_back(static_cast<FaRegionHead *>(memory), free);
      for (uint32_t &epoch : regions[rank]->epoch)
        epoch = first_epoch;
    }
    for (uint32_t rank = 0; rank < size; ++rank)
      multicast.push_back(windows.emplace_back(2 * kMaxBytes, 0).address());
    for (uint32_t id = 0; id < kBuffers; ++id) {
      auto &ranks = buffers.emplace_back();
      for (uint32_t rank = 0; rank < size; ++rank) {
        // Up to 7 messages, each a quarter plus one element, at an offset.
        ranks.emplace_back(2 * kMostBytes + 128, 0);
        table[id * FA_MAX_RANKS + rank] = reinterpret_cast<uint64_t>(ranks[rank].data());
      }
    }
    for (uint32_t rank = 0; rank < size; ++rank) {
      for (uint32_t always : {0, 1}) {
        direct[always].exit_futex[rank] = reinterpret_cast<uint64_t>(&exit_futex);
        direct[always].process[rank] = uint32_t(getpid());
        direct[always].always = always;
      }
    }
  }
};
