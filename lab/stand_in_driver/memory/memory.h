// Memory: allocations of every kind, their sharing among processes, and copies. This header declares the
// registry of everything that a device pointer can point to.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "../driver.h"

namespace stand_in {

constexpr size_t kDeviceBytes = size_t(8) << 30;
constexpr size_t kGuard = 4096; // inaccessible bytes before and after each mapping of map_guarded
constexpr size_t kGranularity = size_t(2) << 20; // of virtual memory management

enum class Kind {
  Device,     // cuMemAlloc: a memfd for each
  Pool,       // cuMemAllocAsync
  Graph,      // cuMemAllocAsync in a capture
  Host,       // cuMemHostAlloc
  Registered, // cuMemHostRegister: the caller's memory
  Ipc,        // another process's Device memory
  Virtual,    // a mapping of Physical memory
};

// Address range of a block of memory with its guard pages.
struct Mapping {
  uint64_t start = 0;
  size_t bytes = 0;
};

struct MulticastGroup;

// Physical memory of cuMemCreate, or a multicast object; unmapped and closed with its last user.
struct Physical {
  int fd = -1;
  size_t bytes = 0;
  int device = 0; // CU_DEVICE_INVALID: not visible to this process
  uint32_t handle_types = 0;
  int uses = 1;         // number of references by its handle
  bool created = false; // by this process: it counts as used memory of the device
  // Multicast: its group, and the addresses where this process has mapped the members' memory.
  MulticastGroup *group = nullptr;
  uint64_t parts[kMaxDevices] = {};
  ~Physical();
};

std::shared_ptr<Physical> physical_of(CUmemGenericAllocationHandle handle);
CUmemGenericAllocationHandle insert_physical(std::shared_ptr<Physical> physical);

// Memory of an allocation node. Its addresses are the same in every replay; its graphs own them.
struct GraphMemory {
  uint64_t base = 0;
  size_t bytes = 0;
  Mapping mapping;
  ~GraphMemory();
  // Sets whether kernels may use it: from its allocation node to its free node.
  void set_resident(bool resident) const;
};

// Memory of which several allocations are parts: "allocations made by cudaMalloc may be sub-allocated from a
// larger block of memory for performance reasons. In such case, CUDA IPC APIs will share the entire
// underlying memory block" (Programming Guide, Interprocess Communication). With STAND_IN_SUBALLOCATE, small
// allocations are. The block is freed with the last of them.
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
  int device = 0;              // device with the memory
  CUcontext context = nullptr; // context that created or opened it
  int fd = -1;
  uint64_t id = 0;
  CUipcMemHandle handle = {}; // Ipc: the opened handle
  int opens = 0;              // Ipc: number of opens that were not closed
  std::shared_ptr<Physical> physical;
  CUmemAccess_flags access[kMaxDevices] = {}; // Virtual
  std::shared_ptr<Block> block;               // Device: block that it is a part of
  std::weak_ptr<GraphMemory> graph;           // Graph
  bool resident = true;                       // Graph: between the two nodes of a replay
  bool freed = false;                         // by cuMemFreeAsync, which its stream has not reached yet

  // Range that IPC shares and cuMemGetAddressRange returns: the whole block.
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
  // Holds the lock as long as it lives.
  struct Locked {
    std::unique_lock<std::mutex> guard;
    Allocations &allocations;

    // The allocation that contains an address, or null.
    Allocation *find(uint64_t address);
    void insert(Allocation allocation);
  };
  static Locked lock();
};

// Creates a memfd of this size, rounded up to whole pages; -1 on failure. Its name contains the physical
// device.
int create_device_file(size_t bytes, int device);
// The physical device of a file from create_device_file; -1 for any other file.
int device_of_file(int fd);

// Maps `bytes` of fd, or private memory if fd is -1, between guard pages and directly before the upper one,
// so that an overrun of more than 255 bytes faults. *base is aligned to 256.
bool map_guarded(int fd, size_t bytes, Mapping *mapping, uint64_t *base);
// Unmaps the range; its addresses are not reused for a while, so that a late access faults.
void unmap_guarded(const Mapping &mapping);
// Fills new memory with a pattern, because CUDA does not promise zeros.
void poison(uint64_t base, size_t bytes);

// Whether another process has the allocation open by its handle.
bool is_open_elsewhere(const Allocation &allocation);

// Unmaps an allocation that was removed from the registry.
void release(Allocation &allocation);
// Releases everything that a context owned, when it is destroyed.
void release_memory_of(CUcontext context);

// Whether a device address range is in known memory.
bool is_known(uint64_t address, size_t bytes);
// Whether it is in known memory, or in memory whose free its stream has not reached yet.
bool is_mapped(uint64_t address, size_t bytes);
// Whether kernels of the context can access the whole range.
bool is_accessible(const CUctx_st &context, uint64_t address, size_t bytes);
// The allocation that contains an address, if kernels of the context can access it.
bool accessible_range(const CUctx_st &context, uint64_t address, uint64_t *base, uint64_t *bytes);
// Whether it is pageable host memory, for which copies are synchronous.
bool is_pageable(uint64_t address);

CUmemoryPool default_pool(CUdevice device);

// Number of objects that callers have created and not released.
uint64_t live_allocations(Kind kind);
uint64_t live_physical_memory();
// The physical memory to which this process has handles.
std::vector<std::shared_ptr<Physical>> all_physical_memory();
// Bytes of physical memory of a device that this process has created and that exist, mapped or not.
std::atomic<size_t> &physical_bytes(int device);
// Bytes of a device that this process uses.
size_t used_bytes(int device);
// Number of allocations that were freed while another process had them open, or while they were bound.
uint64_t early_frees();
// Counts such a free; ends the process if STAND_IN_ABORT_ON_EARLY_FREE is set.
void report_early_free(size_t bytes, const char *why);
uint64_t live_reservations();

} // namespace stand_in
