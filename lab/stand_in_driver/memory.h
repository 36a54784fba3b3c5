// The registry of everything that a device pointer can point to.
#pragma once

#include <map>
#include <mutex>

#include "driver.h"

namespace stand_in {

constexpr size_t kDeviceBytes = size_t(8) << 30;
constexpr size_t kGranularity = size_t(2) << 20; // of virtual memory management

enum class Kind {
  Device,     // cuMemAlloc: one memfd each
  Pool,       // cuMemAllocAsync
  Graph,      // the same in a capture
  Host,       // cuMemHostAlloc
  Registered, // cuMemHostRegister: the caller's memory
  Ipc,        // another process's Device memory
  Virtual,    // a mapping of Physical memory
};

// Where a block of memory lies between its guard pages.
struct Mapping {
  uint64_t start = 0;
  size_t bytes = 0;
};

struct Team;

// Physical memory of cuMemCreate, or a multicast object; unmapped and closed with its last user.
struct Physical {
  int fd = -1;
  size_t bytes = 0;
  int device = 0; // CU_DEVICE_INVALID: one that this process does not see
  uint32_t handle_types = 0;
  int uses = 1; // by its handle
  // Multicast: who is in it, and where this process has mapped the members' memory.
  Team *team = nullptr;
  uint64_t parts[kMaxDevices] = {};
  ~Physical();
};

std::shared_ptr<Physical> physical_of(CUmemGenericAllocationHandle handle);
CUmemGenericAllocationHandle insert_physical(std::shared_ptr<Physical> physical);

// Memory of an allocation node. Its addresses are the same in every replay, and its graphs own them.
struct GraphMemory {
  uint64_t base = 0;
  size_t bytes = 0;
  Mapping mapping;
  ~GraphMemory();
  // Whether kernels may use it: from its allocation node to its free node.
  void set_resident(bool resident) const;
};

// Memory that several allocations are parts of: "allocations made by cudaMalloc may be sub-allocated from a
// larger block of memory for performance reasons. In such case, CUDA IPC APIs will share the entire
// underlying memory block" (Programming Guide, Interprocess Communication). With STAND_IN_SUBALLOCATE small
// ones are. It goes with the last of them.
struct Block {
  uint64_t base = 0;
  size_t bytes = 0, used = 0;
  int fd = -1;
  Mapping mapping;
  ~Block();
};

struct Allocation {
  uint64_t base = 0;
  size_t bytes = 0;
  Kind kind = Kind::Device;
  Mapping mapping;
  int device = 0;              // that holds the memory
  CUcontext context = nullptr; // that made or opened it
  int fd = -1;
  uint64_t id = 0;
  CUipcMemHandle handle = {}; // Ipc: what was opened
  int opens = 0;              // Ipc: how often
  std::shared_ptr<Physical> physical;
  CUmemAccess_flags access[kMaxDevices] = {}; // Virtual
  std::shared_ptr<Block> block;               // Device: that it is a part of
  std::weak_ptr<GraphMemory> graph;           // Graph
  bool resident = true;                       // Graph: between the two nodes of a replay
  bool freed = false;                         // by cuMemFreeAsync, whose place in its stream has not come yet

  // What IPC shares and cuMemGetAddressRange gives: all of a block.
  uint64_t range_base() const { return block ? block->base : base; }
  size_t range_bytes() const { return block ? block->bytes : bytes; }
  int range_fd() const { return block ? block->fd : fd; }

  bool contains(uint64_t address) const { return address - base < bytes; }
  bool on_device() const { return kind != Kind::Host && kind != Kind::Registered; }
};

// Keyed by base address. Entries do not overlap.
using Allocations = std::map<uint64_t, Allocation>;

class Registry {
public:
  // Holds the lock for as long as it lives.
  struct Locked {
    std::unique_lock<std::mutex> guard;
    Allocations &allocations;

    // The allocation that an address lies in, or null.
    Allocation *find(uint64_t address);
    void insert(Allocation allocation);
  };
  static Locked lock();
};

// A memfd of so many bytes in whole pages; -1 on failure. The name says which physical device it is of.
int create_device_file(size_t bytes, int device);
// The physical device of a file of create_device_file, -1 for any other file.
int device_of_file(int fd);

// Maps bytes of fd, or private memory if fd is -1, between guard pages and against the upper one, so that an
// overrun of more than 255 bytes faults. *base is aligned to 256.
bool map_guarded(int fd, size_t bytes, Mapping *mapping, uint64_t *base);
// Unmaps; the addresses are not used again for a while, so that a late access faults.
void unmap_guarded(const Mapping &mapping);
// Fresh memory holds a pattern: nothing says that it is zero.
void poison(uint64_t base, size_t bytes);

// Whether another process has opened its handle and not closed it.
bool is_open_elsewhere(const Allocation &allocation);

// Undoes the mapping of an allocation that has left the registry.
void release(Allocation &allocation);
// Everything that a context owned, when it is destroyed.
void release_memory_of(CUcontext context);

// Whether a device address range belongs to known memory.
bool is_known(uint64_t address, size_t bytes);
// The same of memory that has been freed but whose time in its stream has not come.
bool is_mapped(uint64_t address, size_t bytes);
// Whether kernels of the context can access the whole range.
bool is_accessible(const CUctx_st &context, uint64_t address, size_t bytes);
// The allocation that an address is in, if kernels of the context can access it.
bool accessible_range(const CUctx_st &context, uint64_t address, uint64_t *base, uint64_t *bytes);
// Whether it is pageable memory, which the driver copies from and to before it returns.
bool is_pageable(uint64_t address);

CUmemoryPool default_pool(CUdevice device);

// How many there are that callers have made and not given back.
uint64_t live_allocations(Kind kind);
uint64_t live_physical_memory();
// Allocations that were freed while another process had them open.
uint64_t early_frees();
uint64_t live_reservations();

} // namespace stand_in
