// Multicast objects: a team of devices, and the memory of each that is bound. All of it is in a file, which
// is what a handle is a descriptor of, so that every process sees who has joined.
#include "multicast.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <thread>

namespace stand_in {

// Memory of a device that is bound: a file of the process that has bound it.
struct Member {
  std::atomic<uint32_t> bound;
  int32_t device; // physical number
  int32_t process, fd;
  uint64_t inode;
};

struct Team {
  uint32_t wanted; // devices
  uint64_t bytes;  // of each
  // Of members that have joined. Its lowest bit is a lock.
  std::atomic<uint32_t> joined;
  Member member[kMaxDevices];

  uint32_t count() const { return joined.load() >> 1; }
  bool is_complete() const { return count() == wanted; }
};

namespace {

constexpr char kName[] = "stand-in-multicast";

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

bool is_team_file(int fd) {
  char path[64], target[128];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof(target) - 1);
  if (length <= 0)
    return false;
  target[length] = 0;
  return strncmp(target + strlen("/memfd:"), kName, strlen(kName)) == 0;
}

std::shared_ptr<Physical> open_team(int fd) {
  void *mapped = mmap(nullptr, sizeof(Team), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED)
    return nullptr;
  auto physical = std::make_shared<Physical>();
  physical->team = static_cast<Team *>(mapped);
  physical->fd = fd;
  physical->device = CU_DEVICE_INVALID;
  return physical;
}

// As in the driver, where "any calls to cuMulticastBindMem ... will block until all devices have been added",
// and cuMemMap does (Driver API, cuMulticastAddDevice); but not for ever.
CUresult wait_for_team(const Team &team) {
  constexpr int kLimit = 20'000; // ms
  for (int waited = 0; !team.is_complete(); ++waited) {
    if (waited == kLimit) {
      fprintf(stderr, "stand-in driver: %u of %u devices have joined a multicast team\n", team.count(),
              team.wanted);
      return CUDA_ERROR_NOT_READY;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return CUDA_SUCCESS;
}

// Where this process has mapped the memory of a member, which it does when it is first needed.
uint64_t part_of(Physical &physical, uint32_t number) {
  uint64_t &part = physical.parts[number];
  if (part)
    return part;
  const Member &member = physical.team->member[number];
  if (!member.bound.load())
    return 0;
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", member.process, member.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  // Another file may have its number by now.
  if (fd >= 0 && inode_of(fd) == member.inode) {
    void *mapped = mmap(nullptr, physical.team->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    part = mapped == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(mapped);
  }
  if (fd >= 0)
    close(fd);
  return part;
}

} // namespace

std::shared_ptr<Physical> import_multicast(int fd) {
  if (!is_team_file(fd))
    return nullptr;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  auto physical = own < 0 ? nullptr : open_team(own);
  if (!physical) {
    close(own);
    return nullptr;
  }
  physical->bytes = physical->team->bytes;
  physical->handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return physical;
}

CUresult check_mappable(const Physical &physical) {
  return physical.team ? wait_for_team(*physical.team) : CUDA_SUCCESS;
}

bool is_member(const Physical &physical, CUdevice device) {
  const Team &team = *physical.team;
  for (uint32_t i = 0; i < team.count(); ++i) {
    if (team.member[i].device == settings().devices[device])
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
  if (!allocation || !allocation->physical || !allocation->physical->team)
    return 0;
  Physical &physical = *allocation->physical;
  const uint64_t offset = address - allocation->base;
  for (uint32_t i = 0; i < physical.team->wanted; ++i) {
    const uint64_t part = part_of(physical, i);
    if (part == 0)
      return 0;
    parts[i] = part + offset;
  }
  return physical.team->wanted;
}

void close_team(Physical &physical) {
  for (uint64_t part : physical.parts) {
    if (part)
      munmap(reinterpret_cast<void *>(part), physical.team->bytes);
  }
  munmap(physical.team, sizeof(Team));
}

} // namespace stand_in

using namespace stand_in;

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties,
                                   CUmulticastGranularity_flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  if (!granularity)
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_properties(properties));
  // One device is refused, as the driver does.
  if (!handle || properties->numDevices < 2 || properties->numDevices > unsigned(kMaxDevices) ||
      properties->size == 0 || properties->size % kGranularity != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  if (fd < 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  auto physical = ftruncate(fd, sizeof(Team)) == 0 ? open_team(fd) : nullptr;
  if (!physical) {
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Team *team = new (physical->team) Team{};
  team->wanted = properties->numDevices;
  team->bytes = physical->bytes = properties->size;
  physical->handle_types = uint32_t(properties->handleTypes);
  *handle = insert_physical(std::move(physical));
  return CUDA_SUCCESS;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  STAND_IN_CHECK(check_device(device));
  auto physical = physical_of(handle);
  if (!physical || !physical->team)
    return CUDA_ERROR_INVALID_VALUE;
  Team &team = *physical->team;
  uint32_t joined;
  while ((joined = team.joined.fetch_or(1)) & 1)
    std::this_thread::yield();
  const bool full = joined >> 1 == team.wanted, twice = is_member(*physical, device);
  if (!full && !twice)
    team.member[joined >> 1].device = settings().devices[device];
  team.joined.store(full || twice ? joined : joined + 2);
  return full || twice ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

// The whole of an object at once, and all memory of a handle.
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                            CUmemGenericAllocationHandle memory_handle, size_t memory_offset, size_t bytes,
                            unsigned long long flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_supported());
  auto physical = physical_of(handle), memory = physical_of(memory_handle);
  if (!physical || !physical->team || !memory || memory->team || flags || bytes % kGranularity != 0 ||
      bytes > memory->bytes || bytes > physical->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (offset != 0 || memory_offset != 0 || bytes != physical->bytes || memory->device < 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  STAND_IN_CHECK(wait_for_team(*physical->team));
  for (Member &member : physical->team->member) {
    if (&member - physical->team->member >= int(physical->team->wanted))
      break;
    if (member.device != settings().devices[memory->device])
      continue;
    if (member.bound.load())
      return CUDA_ERROR_INVALID_VALUE;
    member.process = getpid();
    member.fd = memory->fd;
    member.inode = inode_of(memory->fd);
    member.bound.store(1);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}
