// Late calls: from exit handlers, and at the end of a thread, after the driver's thread-local variables have
// been destroyed.
#include <stdlib.h>

#include <thread>

#include "self_test.h"

namespace {

CUcontext context;
CUfunction barrier;
CUmodule module;

// Calls every part of the driver that has thread-local variables.
void use_all() {
  CUcontext current;
  CUdeviceptr pointer;
  CUevent event;
  OK(cuCtxSetCurrent(context));
  OK(cuCtxGetCurrent(&current));
  EXPECT(current == context);
  OK(cuMemAlloc_v2(&pointer, 100));
  OK(cuMemsetD8Async(pointer, 1, 100, CU_STREAM_PER_THREAD));
  OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  OK(cuEventCreate(&event, 0));
  OK(cuEventRecord(event, CU_STREAM_PER_THREAD));
  OK(cuEventSynchronize(event));
  OK(cuEventDestroy_v2(event));
  OK(cuModuleGetFunction(&barrier, module, "one_shot_pull_f32"));
  OK(cuMemFree_v2(pointer));
  EXPECT(stand_in_calls_of_thread("cuCtxSetCurrent") > 0);
  stand_in_fail("cuCtxGetCurrent", 1, CUDA_ERROR_UNKNOWN, 1);
  EXPECT(cuCtxGetCurrent(&current) == CUDA_ERROR_UNKNOWN);
}

struct Late {
  bool armed = false;
  ~Late() {
    if (armed)
      use_all();
  }
};

} // namespace

void test_late_calls() {
  // Registered before the driver's first call: handlers run in reverse order.
  EXPECT(atexit(use_all) == 0);
  context = use_device(0);
  OK(cuModuleLoadData(&module, "any image"));
  use_all();
  std::thread([] {
    thread_local Late late;
    late.armed = true;
    use_all();
  }).join();
  exit(0);
}
