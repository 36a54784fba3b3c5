// Device and host memory: allocate, free, and the registry of what is allocated.
#include "memory.h"

#include <unistd.h>

#include "stream.h"

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

void release(Allocation &allocation) {
  if (allocation.mapping.bytes)
    unmap_guarded(allocation.mapping);
  if (allocation.fd >= 0)
    close(allocation.fd);
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

size_t used_bytes(int device) {
  auto registry = Registry::lock();
  size_t used = 0;
  for (auto &[base, allocation] : registry.allocations) {
    const bool own = allocation.on_device() && allocation.kind != Kind::Ipc;
    if (own && allocation.device == device)
      used += allocation.bytes;
  }
  return used;
}

CUresult allocate(CUcontext context, Kind kind, size_t bytes, uint64_t *base) {
  if (bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
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

// CUDA leaves undefined what happens to memory that is freed while another process has it open.
void check_not_open(const Allocation &allocation) {
  if (!settings().abort_on_early_free || !is_open_elsewhere(allocation))
    return;
  fprintf(stderr, "stand-in driver: %zu bytes are freed while another process has them open\n",
          allocation.bytes);
  abort();
}

// Takes the allocation that starts at base out of the registry.
CUresult take(uint64_t base, std::initializer_list<Kind> kinds, Allocation *allocation) {
  auto registry = Registry::lock();
  auto found = registry.allocations.find(base);
  if (found == registry.allocations.end())
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

// Frees as the driver does: not before all work of the context has ended.
CUresult free_now(uint64_t base, std::initializer_list<Kind> kinds) {
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  if (base == 0)
    return CUDA_SUCCESS;
  Allocation allocation;
  STAND_IN_CHECK(take(base, kinds, &allocation));
  wait_for_context(allocation.context);
  release(allocation);
  return CUDA_SUCCESS;
}

} // namespace

bool is_known(uint64_t address, size_t bytes) {
  return covered(address, bytes, [](const Allocation &) { return true; });
}

bool is_accessible(const CUctx_st &context, uint64_t address, size_t bytes) {
  return covered(address, bytes,
                 [&](const Allocation &allocation) { return accessible_by(allocation, context); });
}

uint64_t live_allocations(Kind kind) {
  auto registry = Registry::lock();
  uint64_t live = 0;
  for (auto &[base, allocation] : registry.allocations)
    live += allocation.kind != kind ? 0 : kind == Kind::Ipc ? uint64_t(allocation.opens) : 1;
  return live;
}

bool is_pageable(uint64_t address) { return !is_known(address, 1); }

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

// The memory can be used at once; the driver promises it in the order of the stream only.
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (is_capturing(*stream))
    return refuse_in_capture(*stream, CUDA_ERROR_NOT_SUPPORTED);
  return pointer ? allocate(stream->context, Kind::Pool, bytes, pointer) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (is_capturing(*stream))
    return refuse_in_capture(*stream, CUDA_ERROR_NOT_SUPPORTED);
  if (pointer == 0)
    return CUDA_SUCCESS;
  auto allocation = std::make_shared<Allocation>();
  STAND_IN_CHECK(take(pointer, {Kind::Device, Kind::Pool}, allocation.get()));
  return submit(handle, [allocation] { release(*allocation); });
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
