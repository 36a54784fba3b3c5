// Operations that captures forbid.
#include <thread>

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
  expect_end(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin();
  OK(cuEventRecord(event, a));
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

// Which queries are allowed during a capture, by the mode of the capture, the mode of the thread, and the
// capture's thread.
void test_capture_modes() {
  CUcontext context = use_device(0);
  CUstream captured, other;
  CUevent event;
  CUgraph graph;
  CUdeviceptr pointer;
  OK(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, 0));
  OK(cuMemAlloc_v2(&pointer, 64));
  CUmodule module;
  OK(cuModuleLoadData(&module, "any image"));
  // Prohibited: each is an error and invalidates the capture, although it is unrelated to the captured
  // stream.
  const std::function<CUresult()> prohibited[] = {
      [&] { return cuStreamQuery(other); },
      [&] { return cuStreamSynchronize(other); },
      [&] { return cuEventQuery(event); },
      [&] { return cuEventSynchronize(event); },
      [&] { return cuMemAlloc_v2(&pointer, 64); },
      [&] { return cuMemFree_v2(pointer); },
      [&] { return cuModuleLoadData(&module, "any image"); },
      [&] { return cuModuleUnload(module); },
      [&] { return cuMemsetD8_v2(pointer, 0, 64); },
  };
  const auto exchange = [](CUstreamCaptureMode mode) {
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    return mode;
  };
  for (const auto &call : prohibited) {
    for (CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
      OK(cuStreamBeginCapture_v2(captured, mode));
      EXPECT(call() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
      EXPECT(cuStreamEndCapture(captured, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
  }
  // Allowed in a relaxed thread or a relaxed capture.
  OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT(exchange(CU_STREAM_CAPTURE_MODE_RELAXED) == CU_STREAM_CAPTURE_MODE_GLOBAL);
  OK(cuStreamQuery(other));
  OK(cuEventQuery(event));
  // The captured stream itself cannot be queried in any mode.
  EXPECT(exchange(CU_STREAM_CAPTURE_MODE_GLOBAL) == CU_STREAM_CAPTURE_MODE_RELAXED);
  OK(cuStreamEndCapture(captured, &graph));
  OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
  OK(cuStreamQuery(other));
  OK(cuStreamEndCapture(captured, &graph));
  exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
  OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT(cuStreamQuery(captured) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT(cuStreamEndCapture(captured, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  exchange(CU_STREAM_CAPTURE_MODE_GLOBAL);
  // Another thread's capture prohibits this thread's calls if both modes are global.
  OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  std::thread([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuStreamQuery(other));
  }).join();
  OK(cuStreamEndCapture(captured, &graph));
  for (CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL}) {
    const bool global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
    std::thread([&] {
      OK(cuCtxSetCurrent(context));
      exchange(mode);
      EXPECT(cuStreamQuery(other) == (global ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS));
    }).join();
    EXPECT(cuStreamEndCapture(captured, &graph) ==
           (global ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS));
  }
}

// The legacy stream while a blocking stream is captured, on which it would depend.
void test_legacy_stream_in_captures() {
  use_device(0);
  CUstream blocking, independent;
  CUevent event;
  CUgraph graph;
  CUdeviceptr pointer;
  CUstreamCaptureStatus status;
  OK(cuMemAlloc_v2(&pointer, 64));
  OK(cuEventCreate(&event, 0));
  OK(cuStreamCreate(&blocking, 0));
  OK(cuStreamCreate(&independent, CU_STREAM_NON_BLOCKING));
  // A query of its status is an error, but does not invalidate the capture.
  OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT(cuStreamIsCapturing(nullptr, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT(cuStreamIsCapturing(CU_STREAM_LEGACY, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  OK(cuStreamIsCapturing(CU_STREAM_PER_THREAD, &status));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_NONE);
  OK(cuStreamEndCapture(blocking, &graph));
  // A use is an error, and invalidates the capture.
  const std::function<CUresult()> uses[] = {
      [&] { return cuMemsetD8Async(pointer, 0, 64, nullptr); },
      [&] { return cuStreamQuery(CU_STREAM_LEGACY); },
      [&] { return cuStreamSynchronize(nullptr); },
      [&] { return cuEventRecord(event, nullptr); },
      [&] { return cuStreamWaitEvent(CU_STREAM_LEGACY, event, 0); },
  };
  for (const auto &use : uses) {
    OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(use() == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    EXPECT(cuStreamEndCapture(blocking, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  // The per-thread stream is a blocking stream; a non-blocking stream is not affected.
  OK(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT(cuStreamIsCapturing(nullptr, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  OK(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
  OK(cuStreamBeginCapture_v2(independent, CU_STREAM_CAPTURE_MODE_RELAXED));
  OK(cuStreamIsCapturing(nullptr, &status));
  OK(cuMemsetD8Async(pointer, 0, 64, nullptr));
  OK(cuStreamQuery(nullptr) == CUDA_ERROR_NOT_READY ? cuStreamSynchronize(nullptr) : CUDA_SUCCESS);
  OK(cuStreamEndCapture(independent, &graph));
}

// Stream-ordered frees: earlier work may use the memory; in a capture they are nodes.
void test_freeing_in_order() {
  use_device(0);
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  static int gate[2];
  EXPECT(pipe(gate) == 0);
  CUdeviceptr pointer;
  unsigned char byte = 0;
  OK(cuMemAllocAsync(&pointer, 64, stream));
  OK(cuLaunchHostFunc(
      stream,
      [](void *) {
        char byte;
        EXPECT(read(gate[0], &byte, 1) == 1);
      },
      nullptr));
  OK(cuMemsetD8Async(pointer, 7, 64, stream));
  OK(cuMemFreeAsync(pointer, stream));
  // Freed for the caller, although the fill has not run yet.
  EXPECT(cuMemFreeAsync(pointer, stream) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemFree_v2(pointer) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemsetD8Async(pointer, 7, 64, stream) == CUDA_ERROR_INVALID_VALUE);
  byte = *reinterpret_cast<volatile unsigned char *>(pointer);
  EXPECT(byte == 0xA5);
  EXPECT(write(gate[1], "", 1) == 1);
  OK(cuStreamSynchronize(stream));
  EXPECT(in_child([=] { *reinterpret_cast<volatile char *>(pointer) = 1; }) != 0);

  // A capture accepts only the free of a graph's allocation.
  CUgraph graph;
  CUgraphExec replay;
  CUdeviceptr outside, inside;
  size_t nodes;
  OK(cuMemAllocAsync(&outside, 64, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT(cuMemFreeAsync(outside, stream) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  OK(cuMemAllocAsync(&inside, 64, stream));
  OK(cuMemsetD8Async(inside, 9, 64, stream));
  OK(cuMemcpyDtoDAsync_v2(outside, inside, 64, stream));
  OK(cuMemFreeAsync(inside, stream));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphGetNodes(graph, nullptr, &nodes));
  EXPECT(nodes == 4);
  OK(cuGraphInstantiateWithFlags(&replay, graph, 0));
  for (int i = 0; i < 2; ++i) {
    OK(cuMemsetD8Async(outside, 0, 64, stream));
    OK(cuGraphLaunch(replay, stream));
    OK(cuMemcpyDtoHAsync_v2(&byte, outside + 63, 1, stream));
    EXPECT(byte == 9);
  }
  OK(cuGraphExecDestroy(replay));
  OK(cuGraphDestroy(graph));
  EXPECT(cuMemsetD8Async(inside, 9, 64, stream) == CUDA_ERROR_INVALID_VALUE);
}

// A user object of a graph is destroyed with the last of the graph, its executables and their launches; if
// the capture fails, with the capture.
void test_user_objects() {
  use_device(0);
  CUstream stream;
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 64));
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  int gone = 0;
  const CUhostFn count = [](void *gone) { ++*static_cast<int *>(gone); };
  const auto capture = [&] {
    CUstreamCaptureStatus status;
    CUgraph graph;
    CUuserObject object;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(cuMemsetD8Async(pointer, 0, 64, stream));
    OK(cuStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr));
    OK(cuUserObjectCreate(&object, &gone, count, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
    OK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
    EXPECT(cuUserObjectRelease(object, 1) == CUDA_ERROR_INVALID_VALUE);
  };
  CUgraph graph;
  CUgraphExec executable;
  capture();
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
  OK(cuGraphDestroy(graph));
  OK(cuGraphLaunch(executable, stream));
  OK(cuStreamSynchronize(stream));
  EXPECT(gone == 0);
  OK(cuGraphExecDestroy(executable));
  EXPECT(gone == 1);
  capture();
  EXPECT(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT(gone == 2);
  CUuserObject object;
  EXPECT(cuUserObjectCreate(&object, &gone, count, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  OK(cuUserObjectCreate(&object, &gone, count, 2, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  EXPECT(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CUDA_ERROR_INVALID_VALUE);
  OK(cuUserObjectRelease(object, 1));
  EXPECT(gone == 2);
  OK(cuUserObjectRelease(object, 1));
  EXPECT(gone == 3);
}
