// Virtual memory management: physical memory (a memfd), reserved addresses, and mappings of physical memory
// at reserved addresses.
#include "multicast.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace stand_in {
namespace {

Handles<Physical> &physicals() {
  static auto *physicals = new Handles<Physical>;
  return *physicals;
}

struct Reservations {
  std::mutex mutex;
  std::map<uint64_t, size_t> ranges;
};

Reservations &reservations() {
  static auto *reservations = new Reservations;
  return *reservations;
}

bool is_reserved(uint64_t address, size_t bytes) {
  std::lock_guard<std::mutex> guard(reservations().mutex);
  auto after = reservations().ranges.upper_bound(address);
  if (after == reservations().ranges.begin())
    return false;
  auto [start, length] = *std::prev(after);
  return address - start <= length && bytes <= length - (address - start);
}

CUresult check_supported() {
  STAND_IN_CHECK(check_initialized());
  return settings().no_vmm ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult check_properties(const CUmemAllocationProp *properties) {
  if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  const uint32_t known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR |
                         (settings().fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_NONE);
  if (properties->requestedHandleTypes & ~known)
    return CUDA_ERROR_NOT_SUPPORTED;
  return check_device(properties->location.id);
}

// A fabric handle: the exporter's file, which is opened through /proc, as the nodes are pretended.
struct FabricHandle {
  uint64_t magic;
  int32_t process, fd;
  uint64_t inode;
  char zero[40];
};
static_assert(sizeof(FabricHandle) == 64, "the size of CUmemFabricHandle");

constexpr uint64_t kFabricMagic = 0x4341465f444e4154;

int open_fabric(const FabricHandle &handle) {
  char path[64];
  struct stat file;
  if (handle.magic != kFabricMagic)
    return -1;
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.process, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd >= 0 && fstat(fd, &file) == 0 && file.st_ino == handle.inode && device_of_file(fd) >= 0)
    return fd;
  close(fd);
  return -1;
}

// Makes a handle of a file of a physical device, and takes the descriptor.
CUresult import_file(CUmemGenericAllocationHandle *handle, int fd, int device,
                     CUmemAllocationHandleType type) {
  struct stat file;
  if (fstat(fd, &file) != 0 || uint64_t(file.st_size) % kGranularity != 0) {
    close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto physical = std::make_shared<Physical>();
  physical->fd = fd;
  physical->bytes = size_t(file.st_size);
  physical->device = CU_DEVICE_INVALID;
  physical->handle_types = type;
  for (size_t i = 0; i < settings().devices.size(); ++i) {
    if (settings().devices[i] == device)
      physical->device = int(i);
  }
  *handle = insert_physical(std::move(physical));
  return CUDA_SUCCESS;
}

bool whole(uint64_t value) { return value % kGranularity == 0; }

bool place(uint64_t address, size_t bytes, int protection, int kind, int fd) {
  void *at = reinterpret_cast<void *>(address);
  return mmap(at, bytes, protection, kind | MAP_FIXED, fd, 0) != MAP_FAILED;
}

// The mappings in a range; empty if the range does not consist of whole mappings.
std::vector<Allocation *> mappings_in(Registry::Locked &registry, uint64_t address, size_t bytes) {
  std::vector<Allocation *> mappings;
  uint64_t at = address;
  while (at < address + bytes) {
    auto found = registry.allocations.find(at);
    if (found == registry.allocations.end() || found->second.kind != Kind::Virtual)
      return {};
    mappings.push_back(&found->second);
    at += found->second.bytes;
  }
  return at == address + bytes ? mappings : std::vector<Allocation *>();
}

} // namespace

std::shared_ptr<Physical> physical_of(CUmemGenericAllocationHandle handle) {
  return physicals().find(reinterpret_cast<Physical *>(handle));
}

CUmemGenericAllocationHandle insert_physical(std::shared_ptr<Physical> physical) {
  return reinterpret_cast<uint64_t>(physicals().insert(std::move(physical)));
}

uint64_t live_physical_memory() { return physicals().size(); }

std::vector<std::shared_ptr<Physical>> all_physical_memory() { return physicals().all(); }

uint64_t live_reservations() {
  std::lock_guard<std::mutex> guard(reservations().mutex);
  return reservations().ranges.size();
}

} // namespace stand_in

using namespace stand_in;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  if (!granularity)
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  if (!handle || flags || bytes == 0 || !whole(bytes))
    return CUDA_ERROR_INVALID_VALUE;
  const size_t used = used_bytes(properties->location.id);
  if (bytes > kDeviceBytes || used > kDeviceBytes - bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  auto physical = std::make_shared<Physical>();
  physical->bytes = bytes;
  physical->device = properties->location.id;
  physical->created = true;
  physical_bytes(physical->device) += bytes;
  physical->handle_types = properties->requestedHandleTypes;
  physical->fd = create_device_file(bytes, settings().devices[physical->device]);
  if (physical->fd < 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  void *once = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, physical->fd, 0);
  if (once == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  poison(reinterpret_cast<uint64_t>(once), bytes);
  munmap(once, bytes);
  *handle = reinterpret_cast<uint64_t>(physicals().insert(std::move(physical)));
  return CUDA_SUCCESS;
}

// The memory exists as long as it is mapped, here or in another process.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle);
  if (!physical)
    return CUDA_ERROR_INVALID_VALUE;
  auto registry = Registry::lock();
  if (--physical->uses == 0)
    physicals().take(physical.get());
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(reinterpret_cast<uint64_t>(address));
  if (!handle || !allocation || !allocation->physical)
    return CUDA_ERROR_INVALID_VALUE;
  // The handle may have been released since then; the mapping keeps the memory.
  if (allocation->physical->uses++ == 0)
    physicals().insert(allocation->physical);
  *handle = reinterpret_cast<uint64_t>(allocation->physical.get());
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle);
  if (!properties || !physical)
    return CUDA_ERROR_INVALID_VALUE;
  *properties = {};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->requestedHandleTypes = physical->handle_types;
  properties->location = {CU_MEM_LOCATION_TYPE_DEVICE, physical->device};
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle);
  if (!shareable || flags || !physical || !(physical->handle_types & type))
    return CUDA_ERROR_INVALID_VALUE;
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    struct stat file;
    if (fstat(physical->fd, &file) != 0)
      return CUDA_ERROR_OPERATING_SYSTEM;
    const FabricHandle fabric = {kFabricMagic, getpid(), physical->fd, file.st_ino, {}};
    memcpy(shareable, &fabric, sizeof(fabric));
    return CUDA_SUCCESS;
  }
  const int fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0)
    return CUDA_ERROR_OPERATING_SYSTEM;
  memcpy(shareable, &fd, sizeof(fd));
  return CUDA_SUCCESS;
}

// The caller continues to own the descriptor.
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  if (!handle)
    return CUDA_ERROR_INVALID_VALUE;
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    FabricHandle fabric;
    if (!settings().fabric || !shareable)
      return CUDA_ERROR_NOT_SUPPORTED;
    memcpy(&fabric, shareable, sizeof(fabric));
    const int fd = open_fabric(fabric);
    return fd < 0 ? CUDA_ERROR_INVALID_VALUE : import_file(handle, fd, device_of_file(fd), type);
  }
  const int shared = int(reinterpret_cast<intptr_t>(shareable));
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return CUDA_ERROR_INVALID_VALUE;
  if (auto multicast = import_multicast(shared)) {
    *handle = insert_physical(std::move(multicast));
    return CUDA_SUCCESS;
  }
  // A descriptor that another machine could not have passed.
  const int device = device_of_file(shared);
  if (device < 0 || device / kDevicesOfNode != settings().node)
    return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(shared, F_DUPFD_CLOEXEC, 0);
  return fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : import_file(handle, fd, device, type);
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  if (alignment == 0)
    alignment = kGranularity;
  const bool valid = pointer && bytes && !flags && whole(bytes) && (alignment & (alignment - 1)) == 0;
  if (!valid)
    return CUDA_ERROR_INVALID_VALUE;
  if (alignment < kGranularity)
    alignment = kGranularity;
  void *start =
      mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t low = reinterpret_cast<uint64_t>(start);
  const uint64_t base = (low + alignment - 1) / alignment * alignment;
  if (base > low)
    munmap(start, base - low);
  if (base < low + alignment)
    munmap(reinterpret_cast<void *>(base + bytes), low + alignment - base);
  std::lock_guard<std::mutex> guard(reservations().mutex);
  reservations().ranges[base] = bytes;
  *pointer = base;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  {
    auto registry = Registry::lock();
    auto next = registry.allocations.lower_bound(pointer);
    const bool mapped = next != registry.allocations.end() && next->first < pointer + bytes;
    if (mapped)
      return CUDA_ERROR_INVALID_VALUE;
  }
  std::lock_guard<std::mutex> guard(reservations().mutex);
  auto found = reservations().ranges.find(pointer);
  if (found == reservations().ranges.end() || found->second != bytes)
    return CUDA_ERROR_INVALID_VALUE;
  reservations().ranges.erase(found);
  unmap_guarded({pointer, bytes});
  return CUDA_SUCCESS;
}

// As in the driver, the mapping is inaccessible before cuMemSetAccess.
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle);
  if (!physical || offset || flags || bytes == 0 || !whole(pointer) || !whole(bytes) ||
      bytes > physical->bytes || !is_reserved(pointer, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  STAND_IN_CHECK(check_mappable(*physical));
  auto registry = Registry::lock();
  auto next = registry.allocations.lower_bound(pointer);
  const bool taken =
      registry.find(pointer) || (next != registry.allocations.end() && next->first < pointer + bytes);
  if (taken)
    return CUDA_ERROR_INVALID_VALUE;
  if (!place(pointer, bytes, PROT_NONE, MAP_SHARED, physical->fd))
    return CUDA_ERROR_MAP_FAILED;
  Allocation allocation;
  allocation.kind = Kind::Virtual;
  allocation.base = pointer;
  allocation.bytes = bytes;
  allocation.device = physical->device;
  allocation.physical = physical;
  registry.insert(std::move(allocation));
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto registry = Registry::lock();
  const auto mappings = mappings_in(registry, pointer, bytes);
  if (mappings.empty())
    return CUDA_ERROR_INVALID_VALUE;
  for (Allocation *mapping : mappings) {
    // The switch would still send to it.
    if (is_bound(*mapping->physical))
      report_early_free(mapping->bytes, "they are bound to a multicast object");
    registry.allocations.erase(mapping->base);
  }
  const bool unmapped = place(pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  return unmapped ? CUDA_SUCCESS : CUDA_ERROR_UNMAP_FAILED;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  if (!access || count == 0)
    return CUDA_ERROR_INVALID_VALUE;
  auto registry = Registry::lock();
  const auto mappings = mappings_in(registry, pointer, bytes);
  if (mappings.empty())
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
      return CUDA_ERROR_INVALID_VALUE;
    const int device = access[i].location.id;
    STAND_IN_CHECK(check_device(device));
    for (Allocation *mapping : mappings) {
      const bool multicast = mapping->physical->group != nullptr;
      if (multicast && !is_member(*mapping->physical, device))
        return CUDA_ERROR_ILLEGAL_STATE;
      const bool reaches =
          multicast || device == mapping->device || peers_reach_each_other(device, mapping->device);
      if (!reaches)
        return CUDA_ERROR_INVALID_DEVICE;
      mapping->access[device] = access[i].flags;
    }
  }
  for (Allocation *mapping : mappings) {
    bool any = false;
    for (CUmemAccess_flags flags : mapping->access)
      any = any || flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    // Only multicast instructions may access such an address.
    any = any && !mapping->physical->group;
    void *at = reinterpret_cast<void *>(mapping->base);
    if (mprotect(at, mapping->bytes, any ? PROT_READ | PROT_WRITE : PROT_NONE))
      return CUDA_ERROR_MAP_FAILED;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  if (!flags || !location)
    return CUDA_ERROR_INVALID_VALUE;
  STAND_IN_CHECK(check_device(location->id));
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(pointer);
  if (!allocation || allocation->kind != Kind::Virtual)
    return CUDA_ERROR_INVALID_VALUE;
  *flags = allocation->access[location->id];
  return CUDA_SUCCESS;
}
