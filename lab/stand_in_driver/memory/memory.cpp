// Device and host memory: allocation, freeing, and the registry of allocations.
#include "memory.h"

#include <unistd.h>

#include "../streams/stream.h"

namespace stand_in {

Registry::Locked Registry::lock() {
  static auto *mutex = new std::mutex;
  static auto *allocations = new Allocations;
  return {std::unique_lock<std::mutex>(*mutex), *allocations};
}

Allocation *Registry::Locked::find(uint64_t address) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin())
    return nullptr;
  Allocation &candidate = std::prev(after)->second;
  return candidate.contains(address) ? &candidate : nullptr;
}

void Registry::Locked::insert(Allocation allocation) {
  static uint64_t next_id = 1;
  allocation.id = next_id++;
  allocations[allocation.base] = std::move(allocation);
}

Block::~Block() {
  unmap_guarded(mapping);
  close(fd);
}

void release(Allocation &allocation) {
  if (allocation.block) {
    poison(allocation.base, allocation.bytes);
    allocation.block = nullptr;
  }
  if (allocation.mapping.bytes)
    unmap_guarded(allocation.mapping);
  if (allocation.fd >= 0)
    close(allocation.fd);
}

GraphMemory::~GraphMemory() {
  {
    auto registry = Registry::lock();
    auto found = registry.allocations.find(base);
    if (found != registry.allocations.end() && found->second.kind == Kind::Graph)
      registry.allocations.erase(found);
  }
  unmap_guarded(mapping);
}

void GraphMemory::set_resident(bool resident) const {
  auto registry = Registry::lock();
  auto found = registry.allocations.find(base);
  if (found == registry.allocations.end())
    return;
  found->second.resident = resident;
  if (resident)
    poison(base, bytes);
}

void release_memory_of(CUcontext context) {
  auto registry = Registry::lock();
  for (auto entry = registry.allocations.begin(); entry != registry.allocations.end();) {
    if (entry->second.context == context) {
      release(entry->second);
      entry = registry.allocations.erase(entry);
    } else {
      ++entry;
    }
  }
}

namespace {

bool accessible_by(const Allocation &allocation, const CUctx_st &context) {
  const bool near = allocation.device == context.device;
  switch (allocation.kind) {
  case Kind::Host:
  case Kind::Registered: return true;
  case Kind::Pool: return near; // peers would need cuMemPoolSetAccess
  case Kind::Graph: return near && allocation.resident;
  case Kind::Device: return near || context.peers[allocation.device];
  case Kind::Ipc: return allocation.context == &context;
  case Kind::Virtual: return allocation.access[context.device] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return false;
}

// Whether the range is covered by neighbouring allocations that all satisfy a condition.
template <class Condition>
bool covered(uint64_t address, size_t bytes, Condition condition) {
  auto registry = Registry::lock();
  const uint64_t end = address + bytes;
  if (end < address)
    return false;
  while (address < end) {
    const Allocation *allocation = registry.find(address);
    if (!allocation || !condition(*allocation))
      return false;
    address = allocation->base + allocation->bytes;
  }
  return true;
}

// Allocates a part of the context's current block, or of a new one if that is full.
CUresult allocate_in_block(CUcontext context, size_t bytes, uint64_t *base) {
  constexpr size_t kBlock = size_t(2) << 20, kAlignment = 256;
  static std::mutex mutex;
  static auto *current = new std::map<CUcontext, std::weak_ptr<Block>>;
  std::lock_guard<std::mutex> guard(mutex);
  std::shared_ptr<Block> block = (*current)[context].lock();
  if (!block || block->used + bytes > block->bytes) {
    block = std::make_shared<Block>();
    block->bytes = kBlock;
    block->fd = create_device_file(kBlock, settings().devices[context->device]);
    if (block->fd < 0 || !map_guarded(block->fd, kBlock, &block->mapping, &block->base))
      return CUDA_ERROR_OUT_OF_MEMORY;
    poison(block->base, kBlock);
    (*current)[context] = block;
  }
  Allocation allocation;
  allocation.base = block->base + block->used;
  allocation.bytes = bytes;
  allocation.device = context->device;
  allocation.context = context;
  block->used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  allocation.block = std::move(block);
  *base = allocation.base;
  Registry::lock().insert(std::move(allocation));
  return CUDA_SUCCESS;
}

CUresult allocate(CUcontext context, Kind kind, size_t bytes, uint64_t *base) {
  if (bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (kind != Kind::Pool)
    synchronise_implicitly(context);
  Allocation allocation;
  allocation.kind = kind;
  allocation.bytes = bytes;
  allocation.device = context->device;
  allocation.context = context;
  if (kind != Kind::Host) {
    const size_t used = used_bytes(context->device);
    if (bytes > kDeviceBytes || used > kDeviceBytes - bytes)
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  constexpr size_t kSmall = size_t(1) << 20;
  if (kind == Kind::Device && settings().suballocate && bytes <= kSmall)
    return allocate_in_block(context, bytes, base);
  if (kind == Kind::Device) {
    allocation.fd = create_device_file(bytes, settings().devices[context->device]);
    if (allocation.fd < 0)
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (!map_guarded(allocation.fd, bytes, &allocation.mapping, &allocation.base)) {
    if (allocation.fd >= 0)
      close(allocation.fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *base = allocation.base;
  poison(allocation.base, bytes);
  Registry::lock().insert(std::move(allocation));
  return CUDA_SUCCESS;
}

// "During stream capture, this function results in the creation of an allocation node. In this case, the
// allocation is owned by the graph instead of the memory pool" (Driver API, cuMemAllocAsync).
CUresult allocate_in_graph(CUstream handle, CUcontext context, size_t bytes, uint64_t *base) {
  if (bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  auto memory = std::make_shared<GraphMemory>();
  memory->bytes = bytes;
  if (!map_guarded(-1, bytes, &memory->mapping, &memory->base))
    return CUDA_ERROR_OUT_OF_MEMORY;
  Allocation allocation;
  allocation.kind = Kind::Graph;
  allocation.base = memory->base;
  allocation.bytes = bytes;
  allocation.device = context->device;
  allocation.context = context;
  allocation.graph = memory;
  allocation.resident = false;
  Registry::lock().insert(std::move(allocation));
  *base = memory->base;
  return submit(handle, [memory] { memory->set_resident(true); });
}

// CUDA leaves undefined what happens to memory that is freed while another process has it open.
void check_not_open(const Allocation &allocation) {
  // It is unknown which part of a block another process uses, so only the last part is checked.
  if ((!allocation.block || allocation.block.use_count() == 1) && is_open_elsewhere(allocation))
    report_early_free(allocation.bytes, "another process has them open");
}

// Removes the allocation that starts at base from the registry.
CUresult take(uint64_t base, std::initializer_list<Kind> kinds, Allocation *allocation) {
  auto registry = Registry::lock();
  auto found = registry.allocations.find(base);
  if (found == registry.allocations.end() || found->second.freed)
    return CUDA_ERROR_INVALID_VALUE;
  for (Kind kind : kinds) {
    if (found->second.kind != kind)
      continue;
    check_not_open(found->second);
    *allocation = std::move(found->second);
    registry.allocations.erase(found);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Frees after all work of the context and of contexts with peer access to it or from it has ended. A driver
// may wait for peers: "cudaFree on a particular device syncs with all work on that device and its peer
// devices" (PyTorch issue 50925; NCCL issue 48 for cudaFreeHost), though some were seen not to (PyTorch issue
// 196257). Code that frees beside a kernel of a peer that waits for it hangs here.
CUresult free_now(uint64_t base, std::initializer_list<Kind> kinds) {
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  if (base == 0)
    return CUDA_SUCCESS;
  Allocation allocation;
  STAND_IN_CHECK(take(base, kinds, &allocation));
  wait_for_neighbours(allocation.context);
  release(allocation);
  return CUDA_SUCCESS;
}

} // namespace

bool is_known(uint64_t address, size_t bytes) {
  return covered(address, bytes, [](const Allocation &allocation) { return !allocation.freed; });
}

bool is_mapped(uint64_t address, size_t bytes) {
  return covered(address, bytes, [](const Allocation &) { return true; });
}

bool is_accessible(const CUctx_st &context, uint64_t address, size_t bytes) {
  return covered(address, bytes,
                 [&](const Allocation &allocation) { return accessible_by(allocation, context); });
}

bool accessible_range(const CUctx_st &context, uint64_t address, uint64_t *base, uint64_t *bytes) {
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(address);
  const bool multicast = allocation && allocation->physical && allocation->physical->group;
  if (!allocation || multicast || !accessible_by(*allocation, context))
    return false;
  *base = allocation->base;
  *bytes = allocation->bytes;
  return true;
}

size_t used_bytes(int device) {
  auto registry = Registry::lock();
  size_t used = physical_bytes(device);
  for (auto &[base, allocation] : registry.allocations) {
    const bool own =
        allocation.on_device() && allocation.kind != Kind::Ipc && allocation.kind != Kind::Virtual;
    if (own && allocation.device == device)
      used += allocation.bytes;
  }
  return used;
}

static std::atomic<uint64_t> freed_early{0};

uint64_t early_frees() { return freed_early; }

void report_early_free(size_t bytes, const char *why) {
  ++freed_early;
  if (!settings().abort_on_early_free)
    return;
  fprintf(stderr, "stand-in driver: %zu bytes are freed while %s\n", bytes, why);
  abort();
}

uint64_t live_allocations(Kind kind) {
  auto registry = Registry::lock();
  uint64_t live = 0;
  for (auto &[base, allocation] : registry.allocations)
    live += allocation.kind != kind || allocation.freed ? 0
            : kind == Kind::Ipc                         ? uint64_t(allocation.opens)
                                                        : 1;
  return live;
}

bool is_pageable(uint64_t address) { return !Registry::lock().find(address); }

} // namespace stand_in

using namespace stand_in;

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  return pointer ? allocate(context, Kind::Device, bytes, pointer) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  STAND_IN_CALL();
  return free_now(pointer, {Kind::Device, Kind::Pool});
}

// The memory can be used at once; the driver promises that only in stream order.
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (pointer && is_capturing(*stream))
    return allocate_in_graph(handle, stream->context, bytes, pointer);
  return pointer ? allocate(stream->context, Kind::Pool, bytes, pointer) : CUDA_ERROR_INVALID_VALUE;
}

// "Frees memory with stream ordered semantics": "the allocation must not be accessed after stream execution
// reaches the free", but earlier work on the stream may access it. In a capture it is "a free node and must
// therefore be passed the address of a graph allocation" (Driver API, cuMemFreeAsync).
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (pointer == 0)
    return CUDA_SUCCESS;
  std::shared_ptr<GraphMemory> of_graph;
  {
    auto registry = Registry::lock();
    auto found = registry.allocations.find(pointer);
    if (found == registry.allocations.end() || found->second.freed)
      return CUDA_ERROR_INVALID_VALUE;
    switch (found->second.kind) {
    case Kind::Graph: of_graph = found->second.graph.lock(); break;
    case Kind::Device:
    case Kind::Pool: check_not_open(found->second); break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
  }
  // Freed by a node of the graph, or after a launch of the graph.
  if (of_graph)
    return submit(handle, [of_graph] { of_graph->set_resident(false); });
  if (is_capturing(*stream))
    return refuse_in_capture(*stream, CUDA_ERROR_INVALID_VALUE);
  const auto mark = [pointer](bool freed) {
    auto registry = Registry::lock();
    auto found = registry.allocations.find(pointer);
    if (found != registry.allocations.end())
      found->second.freed = freed;
  };
  mark(true);
  const CUresult submitted = submit(handle, [pointer] {
    Allocation allocation;
    {
      auto registry = Registry::lock();
      auto found = registry.allocations.find(pointer);
      if (found == registry.allocations.end())
        return;
      allocation = std::move(found->second);
      registry.allocations.erase(found);
    }
    release(allocation);
  });
  if (submitted != CUDA_SUCCESS)
    mark(false);
  return submitted;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!free || !total)
    return CUDA_ERROR_INVALID_VALUE;
  *total = kDeviceBytes;
  *free = kDeviceBytes - used_bytes(context->device);
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  if (!pointer)
    return CUDA_ERROR_INVALID_VALUE;
  uint64_t base;
  STAND_IN_CHECK(allocate(context, Kind::Host, bytes, &base));
  *pointer = reinterpret_cast<void *>(base);
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) {
  STAND_IN_CALL();
  return cuMemHostAlloc(pointer, bytes, 0);
}

CUresult cuMemFreeHost(void *pointer) {
  STAND_IN_CALL();
  return free_now(reinterpret_cast<uint64_t>(pointer), {Kind::Host});
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  Allocation allocation;
  allocation.kind = Kind::Registered;
  allocation.base = reinterpret_cast<uint64_t>(pointer);
  allocation.bytes = bytes;
  allocation.device = context->device;
  allocation.context = context;
  if (!pointer || bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  auto registry = Registry::lock();
  auto next = registry.allocations.lower_bound(allocation.base);
  const bool overlaps = registry.find(allocation.base) ||
                        (next != registry.allocations.end() && next->first < allocation.base + bytes);
  if (overlaps)
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  registry.insert(std::move(allocation));
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  Allocation allocation;
  const CUresult taken = take(reinterpret_cast<uint64_t>(pointer), {Kind::Registered}, &allocation);
  return taken ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(reinterpret_cast<uint64_t>(pointer));
  if (!device || flags || !allocation || allocation->on_device())
    return CUDA_ERROR_INVALID_VALUE;
  *device = reinterpret_cast<uint64_t>(pointer);
  return CUDA_SUCCESS;
}
