// Memory shared between processes: CUDA IPC, and virtual memory by file descriptor.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <vector>

#include "self_test.h"

namespace {

// Runs this program again, because a driver that was initialised before a fork cannot be used.
void start_again(const std::vector<std::string> &arguments) {
  const int status = in_child([&] {
    std::vector<char *> words = {const_cast<char *>("self_test")};
    for (const std::string &argument : arguments)
      words.push_back(const_cast<char *>(argument.c_str()));
    words.push_back(nullptr);
    execv("/proc/self/exe", words.data());
  });
  EXPECT(status == 0);
}

std::string hex(const void *data, size_t bytes) {
  std::string text;
  char digits[3];
  for (size_t i = 0; i < bytes; ++i) {
    snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char *>(data)[i]);
    text += digits;
  }
  return text;
}

CUdeviceptr map(CUmemGenericAllocationHandle handle) {
  CUdeviceptr at;
  const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  OK(cuMemAddressReserve(&at, kPage, 0, 0, 0));
  OK(cuMemMap(at, kPage, 0, handle, 0));
  OK(cuMemSetAccess(at, kPage, &access, 1));
  return at;
}

void answer(CUdeviceptr pointer, size_t last) {
  uint32_t value;
  OK(cuMemcpyDtoH_v2(&value, pointer + last, 4));
  EXPECT(value == 41);
  OK(cuMemsetD32_v2(pointer + last, 42, 1));
  OK(cuCtxSynchronize());
}

} // namespace

void open_in_peer(const CUipcMemHandle &handle) { start_again({"open", hex(&handle, sizeof(handle))}); }

void test_sharing() {
  use_device(0);
  // CUDA IPC: the other process answers in the memory itself; damaged and stale handles fail.
  CUdeviceptr pointer;
  CUipcMemHandle handle;
  uint32_t answer;
  OK(cuMemAlloc_v2(&pointer, 1000));
  OK(cuMemsetD32_v2(pointer, 41, 250));
  OK(cuCtxSynchronize());
  OK(cuIpcGetMemHandle(&handle, pointer));
  start_again({"open", hex(&handle, sizeof(handle))});
  OK(cuMemcpyDtoH_v2(&answer, pointer + 996, 4));
  EXPECT(answer == 42);
  start_again({"miss", hex(&handle, sizeof(handle))});
  OK(cuMemcpyDtoH_v2(&answer, pointer, 4));
  EXPECT(answer == 41);
  OK(cuMemFree_v2(pointer));
  start_again({"refuse", hex(&handle, sizeof(handle))});
  handle.reserved[20] ^= 1;
  start_again({"refuse", hex(&handle, sizeof(handle))});

  // Virtual memory: shared by a descriptor, which the other process inherits.
  CUmemGenericAllocationHandle memory, again;
  const CUmemAllocationProp device = properties(0);
  OK(cuMemCreate(&memory, kPage, &device, 0));
  pointer = map(memory);
  EXPECT(cuIpcGetMemHandle(&handle, pointer) == CUDA_ERROR_INVALID_VALUE);
  int fd;
  OK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void *>(pointer + 8)));
  EXPECT(again == memory);
  OK(cuMemRelease(again));
  OK(cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  OK(cuMemRelease(memory));
  OK(cuMemsetD32_v2(pointer, 41, 1));
  OK(cuCtxSynchronize());
  EXPECT(fcntl(fd, F_SETFD, 0) == 0);
  start_again({"import", std::to_string(fd)});
  OK(cuMemcpyDtoH_v2(&answer, pointer, 4));
  EXPECT(answer == 42);
  EXPECT(cuMemAddressFree(pointer, kPage) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemUnmap(pointer, kPage));
  OK(cuMemAddressFree(pointer, kPage));
  EXPECT(cuMemImportFromShareableHandle(&memory, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
         CUDA_ERROR_INVALID_VALUE);
}

int peer(const std::string &task, const std::string &argument) {
  CUdeviceptr pointer, again;
  if (task == "import") {
    use_device(0);
    CUmemGenericAllocationHandle memory;
    void *fd = reinterpret_cast<void *>(intptr_t(std::stoi(argument)));
    OK(cuMemImportFromShareableHandle(&memory, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    answer(map(memory), 0);
    return 0;
  }
  if (task == "miss")
    setenv("STAND_IN_IPC_BLACK_HOLE", "1", 1);
  use_device(1);
  CUipcMemHandle handle;
  for (size_t i = 0; i < sizeof(handle); ++i) {
    handle.reserved[i] = char(std::stoi(argument.substr(2 * i, 2), nullptr, 16));
  }
  const CUresult opened = cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (task == "refuse") {
    EXPECT(opened == CUDA_ERROR_INVALID_HANDLE || opened == CUDA_ERROR_INVALID_VALUE);
    return 0;
  }
  OK(opened);
  if (task == "miss") {
    OK(cuMemsetD32_v2(pointer, 42, 250));
    OK(cuCtxSynchronize());
    return 0;
  }
  OK(cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT(again == pointer);
  OK(cuIpcCloseMemHandle(again));
  answer(pointer, 996);
  OK(cuIpcCloseMemHandle(pointer));
  EXPECT(cuIpcCloseMemHandle(pointer) == CUDA_ERROR_INVALID_VALUE);
  return 0;
}
