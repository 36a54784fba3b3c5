// Guarded mappings and the files behind device memory.
#include "multicast.h"

#include <deque>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace stand_in {
namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Depends only on the size, so that an importer finds the data where the exporter has put it.
size_t offset_in_file(size_t bytes) { return whole_pages(bytes) - (bytes + 255) / 256 * 256; }

} // namespace

int create_device_file(size_t bytes, int device) {
  char name[32];
  snprintf(name, sizeof(name), "stand-in-device-%d", device);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, off_t(whole_pages(bytes))) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

int device_of_file(int fd) {
  char path[64], target[128];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof(target) - 1);
  if (length <= 0)
    return -1;
  target[length] = 0;
  int device;
  return sscanf(target, "/memfd:stand-in-device-%d", &device) == 1 ? device : -1;
}

bool map_guarded(int fd, size_t bytes, Mapping *mapping, uint64_t *base) {
  const size_t inside = whole_pages(bytes);
  void *start =
      mmap(nullptr, inside + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED)
    return false;
  char *data = static_cast<char *>(start) + kGuard;
  const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (mmap(data, inside, PROT_READ | PROT_WRITE, kind | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(start, inside + 2 * kGuard);
    return false;
  }
  *mapping = {reinterpret_cast<uint64_t>(start), inside + 2 * kGuard};
  *base = reinterpret_cast<uint64_t>(data) + offset_in_file(bytes);
  return true;
}

void unmap_guarded(const Mapping &mapping) {
  constexpr size_t kQuarantine = 256;
  static std::mutex mutex;
  static auto *quarantine = new std::deque<Mapping>;
  std::lock_guard<std::mutex> guard(mutex);
  mmap(reinterpret_cast<void *>(mapping.start), mapping.bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  quarantine->push_back(mapping);
  if (quarantine->size() > kQuarantine) {
    munmap(reinterpret_cast<void *>(quarantine->front().start), quarantine->front().bytes);
    quarantine->pop_front();
  }
}

void poison(uint64_t base, size_t bytes) {
  // Limited, so that large allocations stay sparse.
  constexpr size_t kMost = size_t(16) << 20;
  memset(reinterpret_cast<void *>(base), 0xA5, bytes < kMost ? bytes : kMost);
}

std::atomic<size_t> &physical_bytes(int device) {
  static std::atomic<size_t> bytes[kMaxDevices] = {};
  return bytes[device];
}

Physical::~Physical() {
  if (created)
    physical_bytes(device) -= bytes;
  if (group)
    close_group(*this);
  if (fd >= 0)
    close(fd);
}

} // namespace stand_in
