// What a capture forbids.
#include "self_test.h"

void test_capture_errors() {
  use_device(0);
  CUstream a, b;
  CUevent event;
  CUgraph graph;
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 256));
  OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  const auto begin = [&] { OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)); };
  const auto expect_end = [&](CUresult result) { EXPECT(cuStreamEndCapture(a, &graph) == result); };

  EXPECT(cuStreamBeginCapture_v2(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED) ==
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  expect_end(CUDA_ERROR_ILLEGAL_STATE);
  begin();
  EXPECT(cuStreamSynchronize(a) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT(cuMemsetD8Async(pointer, 0, 256, a) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  expect_end(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin();
  EXPECT(cuMemFree_v2(pointer) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  expect_end(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  OK(cuEventRecord(event, b));
  begin();
  EXPECT(cuStreamWaitEvent(a, event, 0) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  expect_end(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin();
  OK(cuEventRecord(event, a));
  EXPECT(cuEventSynchronize(event) == CUDA_ERROR_CAPTURED_EVENT);
  OK(cuStreamWaitEvent(b, event, 0));
  OK(cuMemsetD8Async(pointer, 0, 256, b));
  expect_end(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  begin();
  OK(cuEventRecord(event, a));
  OK(cuStreamWaitEvent(b, event, 0));
  OK(cuMemsetD8Async(pointer, 7, 256, b));
  OK(cuEventRecord(event, b));
  OK(cuStreamWaitEvent(a, event, 0));
  expect_end(CUDA_SUCCESS);
  size_t nodes;
  OK(cuGraphGetNodes(graph, nullptr, &nodes));
  EXPECT(nodes == 1);
  EXPECT(cuStreamWaitEvent(b, event, 0) == CUDA_ERROR_CAPTURED_EVENT);
}
