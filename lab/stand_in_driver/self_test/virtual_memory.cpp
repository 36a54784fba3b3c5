// Virtual memory whose addresses outlive what is mapped there.
#include "self_test.h"

#include <atomic>
#include <thread>

namespace {

size_t used() {
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  return total - free;
}

void allow(CUdeviceptr at) {
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  OK(cuMemSetAccess(at, kPage, &access, 1));
}

} // namespace

// Memory exists until its handle is released and its last mapping has ended. Its addresses stay reserved, and
// other memory can be mapped there.
void test_addresses_that_stay() {
  use_device(0);
  const size_t before = used();
  const CUmemAllocationProp device = properties(0);
  CUmemGenericAllocationHandle first, second;
  CUdeviceptr place, other;
  uint32_t value = 0;
  OK(cuMemCreate(&first, kPage, &device, 0));
  EXPECT(used() == before + kPage);
  OK(cuMemAddressReserve(&place, kPage, 0, 0, 0));
  OK(cuMemAddressReserve(&other, kPage, 0, 0, 0));
  for (CUdeviceptr at : {place, other}) {
    OK(cuMemMap(at, kPage, 0, first, 0));
    allow(at);
  }
  // Two mappings of one memory, which counts once.
  EXPECT(used() == before + kPage);
  OK(cuMemsetD32_v2(other, 41, 1));
  OK(cuMemcpyDtoH_v2(&value, place, 4));
  EXPECT(value == 41);
  EXPECT(cuMemMap(place, kPage, 0, first, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemAddressFree(place, kPage) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemUnmap(place, kPage));
  EXPECT(cuMemUnmap(place, kPage) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemcpyDtoH_v2(&value, place, 4) != CUDA_SUCCESS);
  // The other mapping keeps it, without the handle too.
  OK(cuMemRelease(first));
  EXPECT(cuMemRelease(first) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemcpyDtoH_v2(&value, other, 4));
  EXPECT(value == 41 && used() == before + kPage);
  OK(cuMemUnmap(other, kPage));
  EXPECT(used() == before);
  // Other memory where it was: without access at first, and with other contents.
  OK(cuMemCreate(&second, kPage, &device, 0));
  OK(cuMemMap(place, kPage, 0, second, 0));
  allow(place);
  OK(cuMemcpyDtoH_v2(&value, place, 4));
  EXPECT(value == 0xA5A5A5A5);
  OK(cuMemUnmap(place, kPage));
  OK(cuMemRelease(second));
  OK(cuMemAddressFree(place, kPage));
  OK(cuMemAddressFree(other, kPage));
  EXPECT(cuMemMap(place, kPage, 0, second, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(used() == before);
}

// A checkpoint moves memory to another place, and keeps addresses and contents. Calls wait meanwhile.
void test_checkpoints() {
  use_device(0);
  const CUmemAllocationProp device = properties(0);
  CUmemGenericAllocationHandle handle;
  CUdeviceptr plain, place;
  OK(cuMemAlloc_v2(&plain, 1000));
  OK(cuMemCreate(&handle, kPage, &device, 0));
  OK(cuMemAddressReserve(&place, kPage, 0, 0, 0));
  OK(cuMemMap(place, kPage, 0, handle, 0));
  allow(place);
  OK(cuMemsetD32_v2(plain, 41, 250));
  OK(cuMemsetD32_v2(place, 42, kPage / 4));
  const int self = getpid();
  CUprocessState state;
  const auto is = [&](CUprocessState expected) {
    OK(cuCheckpointProcessGetState(self, &state));
    EXPECT(state == expected);
  };
  is(CU_PROCESS_STATE_RUNNING);
  EXPECT(cuCheckpointProcessCheckpoint(self, nullptr) == CUDA_ERROR_ILLEGAL_STATE);
  EXPECT(cuCheckpointProcessLock(self + 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  // The memsets may still be under way.
  OK(cuCtxSynchronize());
  OK(cuCheckpointProcessLock(self, nullptr));
  is(CU_PROCESS_STATE_LOCKED);
  std::atomic<uint32_t> seen{0};
  std::thread reader([&] {
    uint32_t value;
    OK(cuCtxSetCurrent(use_device(0)));
    OK(cuMemcpyDtoH_v2(&value, plain, 4));
    seen = value;
  });
  OK(cuCheckpointProcessCheckpoint(self, nullptr));
  is(CU_PROCESS_STATE_CHECKPOINTED);
  EXPECT(*reinterpret_cast<uint32_t *>(plain) != 41 && *reinterpret_cast<uint32_t *>(place) != 42);
  EXPECT(cuCheckpointProcessUnlock(self, nullptr) == CUDA_ERROR_ILLEGAL_STATE);
  OK(cuCheckpointProcessRestore(self, nullptr));
  EXPECT(seen == 0);
  OK(cuCheckpointProcessUnlock(self, nullptr));
  reader.join();
  EXPECT(seen == 41);
  uint32_t value = 0;
  OK(cuMemcpyDtoH_v2(&value, place + kPage - 4, 4));
  EXPECT(value == 42);
  // Memory that was imported.
  int fd;
  CUmemGenericAllocationHandle imported;
  OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  void *shared = reinterpret_cast<void *>(uintptr_t(fd));
  OK(cuMemImportFromShareableHandle(&imported, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  OK(cuCheckpointProcessLock(self, nullptr));
  EXPECT(cuCheckpointProcessCheckpoint(self, nullptr) == CUDA_ERROR_NOT_SUPPORTED);
  OK(cuCheckpointProcessUnlock(self, nullptr));
}
