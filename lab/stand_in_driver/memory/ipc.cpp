// CUDA IPC: a handle contains the exporting process's file of the allocation, which is opened through /proc.
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../streams/stream.h"

namespace stand_in {
namespace {

struct Handle {
  char magic[8];
  int32_t pid;
  int32_t fd;
  uint64_t bytes;
  uint64_t inode;
  int32_t device; // physical
  uint32_t checksum;
  char zero[24];
};
static_assert(sizeof(Handle) == sizeof(CUipcMemHandle), "a handle is 64 bytes");

constexpr char kMagic[8] = {'S', 'T', 'A', 'N', 'D', 'I', 'P', 'C'};

uint32_t checksum(Handle handle) {
  handle.checksum = 0;
  unsigned char bytes[sizeof(handle)];
  memcpy(bytes, &handle, sizeof(handle));
  uint32_t hash = 2166136261u; // FNV-1a
  for (unsigned char byte : bytes)
    hash = (hash ^ byte) * 16777619u;
  return hash;
}

int visible_number(int physical) {
  const std::vector<int> &devices = settings().devices;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] == physical)
      return int(i);
  }
  return -1;
}

// Opens the exporter's file; -1 if the process has ended or has freed the memory.
int open_file(const Handle &handle) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0)
    return -1;
  struct stat file;
  if (fstat(fd, &file) == 0 && file.st_ino == handle.inode && device_of_file(fd) == handle.device &&
      size_t(file.st_size) >= handle.bytes) {
    return fd;
  }
  close(fd);
  return -1;
}

CUresult map_peer(CUcontext context, const CUipcMemHandle &opaque, const Handle &handle, int device,
                  CUdeviceptr *pointer) {
  Allocation allocation;
  allocation.kind = Kind::Ipc;
  allocation.bytes = handle.bytes;
  allocation.device = device;
  allocation.context = context;
  allocation.handle = opaque;
  allocation.opens = 1;
  const int fd = open_file(handle);
  if (fd < 0)
    return CUDA_ERROR_INVALID_HANDLE;
  const bool mapped =
      map_guarded(settings().ipc_black_hole ? -1 : fd, handle.bytes, &allocation.mapping, &allocation.base);
  if (!mapped) {
    close(fd);
    return CUDA_ERROR_MAP_FAILED;
  }
  // Held until the handle is closed or the process ends, so that the exporter can see that its memory is in
  // use.
  struct flock lock = {};
  lock.l_type = F_RDLCK;
  if (fcntl(fd, F_OFD_SETLK, &lock) != 0)
    perror("stand-in driver: lock of opened memory");
  allocation.fd = fd;
  *pointer = allocation.base;
  Registry::lock().insert(std::move(allocation));
  return CUDA_SUCCESS;
}

} // namespace

bool is_open_elsewhere(const Allocation &allocation) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  return allocation.kind == Kind::Device && allocation.range_fd() >= 0 &&
         fcntl(allocation.range_fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

} // namespace stand_in

using namespace stand_in;

CUresult cuIpcGetMemHandle(CUipcMemHandle *opaque, CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (settings().no_ipc)
    return CUDA_ERROR_NOT_SUPPORTED;
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(pointer);
  if (!opaque || !allocation || allocation->kind != Kind::Device)
    return CUDA_ERROR_INVALID_VALUE;
  struct stat file;
  if (fstat(allocation->range_fd(), &file) != 0)
    return CUDA_ERROR_OPERATING_SYSTEM;
  Handle handle = {};
  memcpy(handle.magic, kMagic, sizeof(kMagic));
  handle.pid = getpid();
  handle.fd = allocation->range_fd();
  handle.bytes = allocation->range_bytes();
  handle.inode = file.st_ino;
  handle.device = settings().devices[allocation->device];
  handle.checksum = checksum(handle);
  memcpy(opaque, &handle, sizeof(handle));
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle opaque, unsigned flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  if (!pointer || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  Handle handle;
  memcpy(&handle, &opaque, sizeof(handle));
  if (memcmp(handle.magic, kMagic, sizeof(kMagic)) != 0 || handle.checksum != checksum(handle)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (handle.pid == getpid())
    return CUDA_ERROR_INVALID_CONTEXT;
  const int device = visible_number(handle.device);
  if (device < 0)
    return CUDA_ERROR_INVALID_DEVICE;
  if (device != context->device && !peers_reach_each_other(device, context->device)) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  {
    // Opening the same handle again returns the same mapping.
    auto registry = Registry::lock();
    for (auto &[base, allocation] : registry.allocations) {
      const bool same = allocation.kind == Kind::Ipc && allocation.context == context &&
                        memcmp(&allocation.handle, &opaque, sizeof(opaque)) == 0;
      if (!same)
        continue;
      ++allocation.opens;
      *pointer = base;
      return CUDA_SUCCESS;
    }
  }
  return map_peer(context, opaque, handle, device, pointer);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_not_capturing());
  Allocation closed;
  {
    auto registry = Registry::lock();
    auto found = registry.allocations.find(pointer);
    if (found == registry.allocations.end() || found->second.kind != Kind::Ipc)
      return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.opens > 0)
      return CUDA_SUCCESS;
    closed = std::move(found->second);
    registry.allocations.erase(found);
  }
  wait_for_context(closed.context);
  release(closed);
  return CUDA_SUCCESS;
}
