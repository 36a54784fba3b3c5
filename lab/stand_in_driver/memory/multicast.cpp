// Multicast objects: a group of devices, and the memory that each has bound. The state is in a file, of which
// a handle is a descriptor, so that every process sees which devices have joined.
#include "multicast.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <set>
#include <thread>

namespace stand_in {

// Bound memory of a device: a file of the process that bound it.
struct Member {
  std::atomic<uint32_t> bound;
  int32_t device; // physical number
  int32_t process, fd;
  uint64_t inode;
};

struct MulticastGroup {
  uint32_t wanted; // number of devices
  uint64_t bytes;  // bytes that each device binds
  // Twice the number of members that have joined; the lowest bit is a lock.
  std::atomic<uint32_t> joined;
  Member member[kMaxDevices];

  uint32_t count() const { return joined.load() >> 1; }
  bool is_complete() const { return count() == wanted; }
};

namespace {

constexpr char kName[] = "stand-in-multicast";

// Least granularity of groups: finer than that of memory, so that a group may be too small for a window.
constexpr size_t kGroupGranularity = kGranularity / 2;

CUresult check_supported() {
  STAND_IN_CHECK(check_initialized());
  return settings().multicast && !settings().no_vmm ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult check_properties(const CUmulticastObjectProp *properties) {
  if (!properties || properties->flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties->handleTypes & ~uint64_t(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
    return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

uint64_t inode_of(int fd) {
  struct stat file;
  return fstat(fd, &file) == 0 ? file.st_ino : 0;
}

bool is_group_file(int fd) {
  char path[64], target[128];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof(target) - 1);
  if (length <= 0)
    return false;
  target[length] = 0;
  return strncmp(target + strlen("/memfd:"), kName, strlen(kName)) == 0;
}

// Files of this process's memory that is bound to a group.
struct Bound {
  std::mutex mutex;
  std::set<uint64_t> inodes;
};

Bound &bound() {
  static auto *bound = new Bound;
  return *bound;
}

std::shared_ptr<Physical> open_group(int fd) {
  void *mapped = mmap(nullptr, sizeof(MulticastGroup), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED)
    return nullptr;
  auto physical = std::make_shared<Physical>();
  physical->group = static_cast<MulticastGroup *>(mapped);
  physical->fd = fd;
  physical->device = CU_DEVICE_INVALID;
  return physical;
}

// Waits as the driver does, where "any calls to cuMulticastBindMem ... will block until all devices have been
// added", as does cuMemMap (Driver API, cuMulticastAddDevice); but with a time limit.
CUresult wait_for_group(const MulticastGroup &group) {
  constexpr int kLimit = 20'000; // ms
  for (int waited = 0; !group.is_complete(); ++waited) {
    if (waited == kLimit) {
      fprintf(stderr, "stand-in driver: %u of %u devices have joined a multicast group\n", group.count(),
              group.wanted);
      return CUDA_ERROR_NOT_READY;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return CUDA_SUCCESS;
}

// Address where this process has mapped a member's memory. It is mapped when it is first needed.
uint64_t part_of(Physical &physical, uint32_t number) {
  uint64_t &part = physical.parts[number];
  const Member &member = physical.group->member[number];
  if (!member.bound.load())
    return 0;
  if (part)
    return part;
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", member.process, member.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  // Another file may have its number by now.
  if (fd >= 0 && inode_of(fd) == member.inode) {
    void *mapped = mmap(nullptr, physical.group->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    part = mapped == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(mapped);
  }
  if (fd >= 0)
    close(fd);
  return part;
}

} // namespace

std::shared_ptr<Physical> import_multicast(int fd) {
  if (!is_group_file(fd))
    return nullptr;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  auto physical = own < 0 ? nullptr : open_group(own);
  if (!physical) {
    close(own);
    return nullptr;
  }
  physical->bytes = physical->group->bytes;
  physical->handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return physical;
}

CUresult check_mappable(const Physical &physical) {
  return physical.group ? wait_for_group(*physical.group) : CUDA_SUCCESS;
}

bool is_member(const Physical &physical, CUdevice device) {
  const MulticastGroup &group = *physical.group;
  for (uint32_t i = 0; i < group.count(); ++i) {
    if (group.member[i].device == settings().devices[device])
      return true;
  }
  return false;
}

uint32_t multicast_parts(const CUctx_st &context, uint64_t address, uint64_t bytes,
                         uint64_t parts[kMaxDevices]) {
  if (!is_accessible(context, address, bytes))
    return 0;
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(address);
  if (!allocation || !allocation->physical || !allocation->physical->group)
    return 0;
  Physical &physical = *allocation->physical;
  const uint64_t offset = address - allocation->base;
  for (uint32_t i = 0; i < physical.group->wanted; ++i) {
    const uint64_t part = part_of(physical, i);
    if (part == 0)
      return 0;
    parts[i] = part + offset;
  }
  return physical.group->wanted;
}

bool is_bound(const Physical &memory) {
  std::lock_guard<std::mutex> guard(bound().mutex);
  return bound().inodes.count(inode_of(memory.fd)) != 0;
}

uint64_t live_bindings() {
  std::lock_guard<std::mutex> guard(bound().mutex);
  return bound().inodes.size();
}

void close_group(Physical &physical) {
  for (uint64_t part : physical.parts) {
    if (part)
      munmap(reinterpret_cast<void *>(part), physical.group->bytes);
  }
  munmap(physical.group, sizeof(MulticastGroup));
}

} // namespace stand_in

using namespace stand_in;

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties,
                                   CUmulticastGranularity_flags option) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  if (!granularity)
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = option == CU_MULTICAST_GRANULARITY_MINIMUM ? kGroupGranularity : kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  // One device is refused, as the driver does.
  if (!handle || properties->numDevices < 2 || properties->numDevices > unsigned(kMaxDevices) ||
      properties->size == 0 || properties->size % kGroupGranularity != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  if (fd < 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  auto physical = ftruncate(fd, sizeof(MulticastGroup)) == 0 ? open_group(fd) : nullptr;
  if (!physical) {
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  MulticastGroup *group = new (physical->group) MulticastGroup{};
  group->wanted = properties->numDevices;
  group->bytes = physical->bytes = properties->size;
  physical->handle_types = uint32_t(properties->handleTypes);
  *handle = insert_physical(std::move(physical));
  return CUDA_SUCCESS;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_device(device));
  auto physical = physical_of(handle);
  if (!physical || !physical->group)
    return CUDA_ERROR_INVALID_VALUE;
  MulticastGroup &group = *physical->group;
  uint32_t joined;
  while ((joined = group.joined.fetch_or(1)) & 1)
    std::this_thread::yield();
  const bool full = joined >> 1 == group.wanted, twice = is_member(*physical, device);
  if (!full && !twice)
    group.member[joined >> 1].device = settings().devices[device];
  group.joined.store(full || twice ? joined : joined + 2);
  return full || twice ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

// Binds only whole objects to whole allocations.
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                            CUmemGenericAllocationHandle memory_handle, size_t memory_offset, size_t bytes,
                            unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle), memory = physical_of(memory_handle);
  if (!physical || !physical->group || !memory || memory->group || flags || bytes % kGroupGranularity != 0 ||
      bytes > memory->bytes || bytes > physical->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (offset != 0 || memory_offset != 0 || bytes != physical->bytes || memory->device < 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  STAND_IN_CHECK(wait_for_group(*physical->group));
  for (Member &member : physical->group->member) {
    if (&member - physical->group->member >= int(physical->group->wanted))
      break;
    if (member.device != settings().devices[memory->device])
      continue;
    if (member.bound.load())
      return CUDA_ERROR_INVALID_VALUE;
    member.process = getpid();
    member.fd = memory->fd;
    member.inode = inode_of(memory->fd);
    member.bound.store(1);
    std::lock_guard<std::mutex> guard(bound().mutex);
    bound().inodes.insert(member.inode);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

// Unbinds only whole objects.
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                           size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_device(device));
  auto physical = physical_of(handle);
  if (!physical || !physical->group)
    return CUDA_ERROR_INVALID_VALUE;
  if (offset != 0 || bytes != physical->bytes)
    return CUDA_ERROR_NOT_SUPPORTED;
  for (uint32_t i = 0; i < physical->group->count(); ++i) {
    Member &member = physical->group->member[i];
    if (member.device != settings().devices[device] || !member.bound.exchange(0))
      continue;
    std::lock_guard<std::mutex> guard(bound().mutex);
    bound().inodes.erase(member.inode);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
