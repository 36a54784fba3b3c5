// Tests the stand-in itself: every part of it, and every error that the crate's tests rely on.
#include "self_test.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

CUcontext use_device(int device) {
  CUcontext context;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
  return context;
}

int in_child(const std::function<void()> &part) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    part();
    _exit(0);
  }
  int status;
  EXPECT(waitpid(child, &status, 0) == child);
  return status;
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}

namespace {

void test_devices() {
  EXPECT(cuDeviceGetCount(nullptr) == CUDA_ERROR_NOT_INITIALIZED);
  size_t free, total;
  OK(cuInit(0));
  EXPECT(cuMemGetInfo_v2(&free, &total) == CUDA_ERROR_INVALID_CONTEXT);
  use_device(0);
  int count, value;
  OK(cuDeviceGetCount(&count));
  EXPECT(count == 2);
  CUdevice device;
  EXPECT(cuDeviceGet(&device, 2) == CUDA_ERROR_INVALID_DEVICE);
  OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
  EXPECT(value == 9);
  OK(cuDeviceCanAccessPeer(&value, 0, 1));
  EXPECT(value == 1);
  const char *name;
  OK(cuGetErrorName(CUDA_ERROR_NOT_SUPPORTED, &name));
  EXPECT(strcmp(name, "CUDA_ERROR_NOT_SUPPORTED") == 0);
  void *function;
  OK(cuGetProcAddress_v2("cuMemAlloc", &function, 13000, 0, nullptr));
  EXPECT(function == reinterpret_cast<void *>(&cuMemAlloc_v2));
  EXPECT(cuGetProcAddress_v2("cuNothing", &function, 13000, 0, nullptr) == CUDA_ERROR_NOT_FOUND);
  // In a forked child nothing works.
  EXPECT(in_child([] { EXPECT(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED); }) == 0);
}

void test_memory() {
  CUcontext context = use_device(0);
  CUdeviceptr pointer, base, pool;
  OK(cuMemAlloc_v2(&pointer, 1000));
  size_t bytes;
  OK(cuMemGetAddressRange_v2(&base, &bytes, pointer + 500));
  EXPECT(base == pointer && bytes == 1000);
  CUipcMemHandle handle;
  OK(cuIpcGetMemHandle(&handle, pointer + 4));
  EXPECT(cuIpcOpenMemHandle_v2(&base, handle, 1) == CUDA_ERROR_INVALID_CONTEXT);
  OK(cuMemAllocAsync(&pool, 64, nullptr));
  EXPECT(cuIpcGetMemHandle(&handle, pool) == CUDA_ERROR_INVALID_VALUE);
  int ordinal, capable;
  OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pool));
  OK(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pool));
  EXPECT(ordinal == 0 && capable == 0);
  EXPECT(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 8) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemFreeAsync(pool, nullptr));
  EXPECT(cuMemFree_v2(pool) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemAlloc_v2(&base, size_t(9) << 30) == CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT(cuMemcpyHtoD_v2(pointer, &handle, 2000) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemFree_v2(pointer));
  EXPECT(cuMemFree_v2(pointer) == CUDA_ERROR_INVALID_VALUE);
  // Accesses after a free and beyond the end fault.
  EXPECT(in_child([=] { *reinterpret_cast<volatile char *>(pointer) = 1; }) != 0);
  OK(cuMemAlloc_v2(&pointer, 1024));
  EXPECT(in_child([=] { reinterpret_cast<volatile char *>(pointer)[1024] = 1; }) != 0);
  // The last release destroys the context with its memory.
  OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT(cuMemAlloc_v2(&pointer, 8) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT(use_device(0) == context);
  EXPECT(cuMemFree_v2(pointer) == CUDA_ERROR_INVALID_VALUE);
}

void test_streams() {
  use_device(0);
  CUstream a, b;
  CUevent event, unrecorded;
  OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, 0));
  OK(cuEventCreate(&unrecorded, CU_EVENT_DISABLE_TIMING));
  OK(cuEventQuery(unrecorded));
  static int gate[2];
  static int order;
  EXPECT(pipe(gate) == 0);
  OK(cuLaunchHostFunc(
      a,
      [](void *) {
        char byte;
        EXPECT(read(gate[0], &byte, 1) == 1);
        order = 1;
      },
      nullptr));
  OK(cuEventRecord(event, a));
  OK(cuStreamWaitEvent(b, event, 0));
  OK(cuLaunchHostFunc(
      b, [](void *) { order = order == 1 ? 2 : -1; }, nullptr));
  EXPECT(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  EXPECT(cuStreamQuery(b) == CUDA_ERROR_NOT_READY);
  EXPECT(write(gate[1], "", 1) == 1);
  OK(cuStreamSynchronize(b));
  EXPECT(order == 2);
  OK(cuEventSynchronize(event));
  OK(cuStreamDestroy_v2(b));
}

// A process that uses a destroyed stream ends.
void test_destroyed_stream() {
  const int status = in_child([] {
    use_device(0);
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamDestroy_v2(stream));
    cuStreamSynchronize(stream);
  });
  EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_settings() {
  setenv("STAND_IN_NO_IPC", "1", 1);
  setenv("STAND_IN_NO_VMM", "1", 1);
  setenv("STAND_IN_NO_PEER", "1", 1);
  setenv("STAND_IN_DEVICES", "3", 1);
  setenv("CUDA_VISIBLE_DEVICES", "2,1", 1);
  use_device(0);
  int value;
  OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0));
  EXPECT(value == 3);
  OK(cuDeviceCanAccessPeer(&value, 0, 1));
  EXPECT(value == 0);
  CUdeviceptr pointer;
  CUipcMemHandle handle;
  CUmemGenericAllocationHandle memory;
  OK(cuMemAlloc_v2(&pointer, 8));
  EXPECT(cuIpcGetMemHandle(&handle, pointer) == CUDA_ERROR_NOT_SUPPORTED);
  const CUmemAllocationProp device = properties(0);
  EXPECT(cuMemCreate(&memory, kPage, &device, 0) == CUDA_ERROR_NOT_SUPPORTED);
}

void test_no_device() {
  setenv("STAND_IN_NO_DEVICE", "1", 1);
  EXPECT(cuInit(0) == CUDA_ERROR_NO_DEVICE);
}

} // namespace

int main(int count, char **words) {
  if (count == 3)
    return peer(words[1], words[2]);
  const std::pair<const char *, void (*)()> tests[] = {
      {"devices", test_devices},
      {"memory", test_memory},
      {"streams", test_streams},
      {"a destroyed stream", test_destroyed_stream},
      {"capture errors", test_capture_errors},
      {"capture modes", test_capture_modes},
      {"the legacy stream in captures", test_legacy_stream_in_captures},
      {"freeing in order", test_freeing_in_order},
      {"kernels", test_kernels},
      {"world kernel", test_world_kernel},
      {"sharing", test_sharing},
      {"addresses that stay", test_addresses_that_stay},
      {"checkpoints", test_checkpoints},
      {"implicit synchronisation", test_implicit_synchronisation},
      {"freeing beside a peer", test_freeing_beside_a_peer},
      {"branches", test_branches},
      {"work on unmapped memory", test_work_on_unmapped_memory},
      {"sub-allocation", test_suballocation},
      {"residency", test_residency},
      {"failing calls", test_failing_calls},
      {"errors that stay", test_errors_that_stay},
      {"late calls", test_late_calls},
      {"user objects", test_user_objects},
      {"a stream per thread", test_stream_per_thread},
      {"settings", test_settings},
      {"no device", test_no_device},
  };
  int failed = 0;
  for (auto &[name, test] : tests) {
    const int status = in_child(test);
    printf("%s: %s\n", name, status == 0 ? "ok" : "FAILED");
    failed += status != 0;
  }
  return failed != 0;
}
