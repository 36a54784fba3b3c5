// The stand-in's functions for tests: injected failures and counts of live objects. Also the per-thread
// default stream.
#include <stdlib.h>
#include <string.h>

#include <thread>

#include "self_test.h"

namespace {

uint64_t live(const char *function) {
  uint64_t count = 0;
  for (unsigned i = 0; const char *name = stand_in_live(i, &count); ++i) {
    if (strcmp(name, function) == 0)
      return count;
  }
  EXPECT(!"a kind that is counted");
  return 0;
}

} // namespace

void test_failing_calls() {
  setenv("STAND_IN_FAIL", "cuMemAlloc_v2:2:2,cuStreamCreate:1:999", 1);
  use_device(0);
  CUdeviceptr pointer;
  CUstream stream;
  EXPECT(stand_in_failures_left() == 2);
  OK(cuMemAlloc_v2(&pointer, 8));
  EXPECT(cuMemAlloc_v2(&pointer, 8) == CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemAlloc_v2(&pointer, 8));
  EXPECT(cuStreamCreate(&stream, 0) == CUDA_ERROR_UNKNOWN);
  OK(cuStreamCreate(&stream, 0));
  EXPECT(live("cuMemAlloc") == 2 && live("cuStreamCreate") == 1 && live("cuDevicePrimaryCtxRetain") == 1);
  EXPECT(stand_in_calls("cuMemAlloc") == 3 && stand_in_calls("cuMemAlloc_v2") == 3);

  // Calls of this thread only.
  CUcontext context;
  OK(cuCtxGetCurrent(&context));
  stand_in_fail("cuMemFree", 1, CUDA_ERROR_NOT_PERMITTED, 1);
  std::thread([=] {
    OK(cuCtxSetCurrent(context));
    OK(cuMemFree_v2(pointer));
  }).join();
  EXPECT(cuMemFree_v2(0) == CUDA_ERROR_NOT_PERMITTED);
  EXPECT(stand_in_failures_left() == 0 && live("cuMemAlloc") == 1);

  // Calls that the stand-in makes itself are not counted; failures that have not happened can be cancelled.
  CUevent event;
  OK(cuEventCreate(&event, 0));
  stand_in_fail("cuEventRecordWithFlags", 1, CUDA_ERROR_UNKNOWN, 0);
  OK(cuEventRecord(event, stream));
  EXPECT(stand_in_calls("cuEventRecordWithFlags") == 0 && stand_in_failures_left() == 1);
  stand_in_fail(nullptr, 0, 0, 0);
  OK(cuEventRecordWithFlags(event, stream, 0));
  // Calls of a paused thread are not counted either.
  const uint64_t before = stand_in_calls("cuEventQuery"), own = stand_in_calls_of_thread("cuEventQuery");
  stand_in_fail("cuEventQuery", 1, CUDA_ERROR_UNKNOWN, 0);
  stand_in_pause(1);
  EXPECT(cuEventQuery(event) != CUDA_ERROR_UNKNOWN);
  stand_in_pause(0);
  EXPECT(stand_in_calls("cuEventQuery") == before && cuEventQuery(event) == CUDA_ERROR_UNKNOWN);
  EXPECT(stand_in_calls_of_thread("cuEventQuery") == own + 1);
  std::thread([] { EXPECT(stand_in_calls_of_thread("cuEventQuery") == 0); }).join();
  bool listed = false;
  for (unsigned i = 0; const char *name = stand_in_function(i); ++i)
    listed = listed || strcmp(name, "cuEventRecord") == 0;
  EXPECT(listed);
  OK(cuEventDestroy_v2(event));
  OK(cuStreamDestroy_v2(stream));
  EXPECT(live("cuEventCreate") == 0 && live("cuStreamCreate") == 0);
}

// An error that a context does not survive is the result of every later call, until the context is destroyed.
void test_errors_that_stay() {
  use_device(0);
  CUdeviceptr pointer;
  CUevent event;
  CUstream stream;
  OK(cuEventCreate(&event, 0));
  OK(cuStreamCreate(&stream, 0));
  stand_in_fail("cuMemAlloc", 1, CUDA_ERROR_ILLEGAL_ADDRESS, 0);
  EXPECT(cuMemAlloc_v2(&pointer, 8) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuMemAlloc_v2(&pointer, 8) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuStreamQuery(stream) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuEventDestroy_v2(event) == CUDA_ERROR_ILLEGAL_ADDRESS);
  use_device(1);
  OK(cuMemAlloc_v2(&pointer, 8));
  OK(cuDevicePrimaryCtxReset_v2(0));
  EXPECT(live("cuEventCreate") == 0 && live("cuStreamCreate") == 0);
  use_device(0);
  OK(cuMemAlloc_v2(&pointer, 8));
}

// Driver API, Stream synchronization behavior: "The per-thread default stream is an implicit stream local to
// both the thread and the CUcontext, and which does not synchronize with other streams".
void test_stream_per_thread() {
  CUcontext context = use_device(0);
  static int gate[2];
  EXPECT(pipe(gate) == 0);
  const CUhostFn wait = [](void *) {
    char byte;
    EXPECT(read(gate[0], &byte, 1) == 1);
  };
  unsigned long long own, other;
  OK(cuStreamGetId(CU_STREAM_PER_THREAD, &own));
  OK(cuLaunchHostFunc(CU_STREAM_PER_THREAD, wait, nullptr));
  std::thread([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuStreamGetId(CU_STREAM_PER_THREAD, &other));
    // Not delayed by the other thread's stream, which the gate still blocks.
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  }).join();
  EXPECT(own != other);
  EXPECT(cuStreamQuery(CU_STREAM_PER_THREAD) == CUDA_ERROR_NOT_READY);
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuEventRecord(event, CU_STREAM_PER_THREAD));
  std::thread([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuStreamWaitEvent(CU_STREAM_PER_THREAD, event, 0));
    EXPECT(cuStreamQuery(CU_STREAM_PER_THREAD) == CUDA_ERROR_NOT_READY);
    EXPECT(write(gate[1], "", 1) == 1);
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  }).join();
  OK(cuEventQuery(event));
  // Synchronising the context also waits for the default streams of threads that have ended.
  std::thread([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuLaunchHostFunc(CU_STREAM_PER_THREAD, wait, nullptr));
  }).join();
  EXPECT(write(gate[1], "", 1) == 1);
  OK(cuCtxSynchronize());
}
