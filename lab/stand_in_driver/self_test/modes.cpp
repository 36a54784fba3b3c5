// Behaviour that the driver may have, each with its setting: implicit synchronisation, lazy loading,
// sub-allocation. Also concurrent branches of graphs.
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "self_test.h"

namespace {

int gate[2];

void wait_at_gate(void *) {
  char byte;
  EXPECT(read(gate[0], &byte, 1) == 1);
}

void open_gate() { EXPECT(write(gate[1], "", 1) == 1); }

// Returns whether a call returns while a stream of the context still has work.
bool returns_at_once(CUcontext context, CUstream busy, const std::function<void()> &call) {
  OK(cuLaunchHostFunc(busy, wait_at_gate, nullptr));
  std::atomic<bool> returned{false};
  std::thread caller([&] {
    OK(cuCtxSetCurrent(context));
    call();
    returned = true;
  });
  for (int i = 0; i < 100 && !returned; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const bool result = returned;
  open_gate();
  caller.join();
  OK(cuStreamSynchronize(busy));
  return result;
}

void expect_waits(bool synchronise, bool eager) {
  if (synchronise)
    setenv("STAND_IN_SYNCHRONISE", "1", 1);
  if (eager)
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  CUcontext context = use_device(0);
  CUstream busy;
  CUmodule module;
  CUfunction function;
  CUdeviceptr pointer;
  void *host;
  int registers;
  uint32_t loaded;
  EXPECT(pipe(gate) == 0);
  OK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
  OK(cuModuleLoadData(&module, "any image"));
  const std::function<void()> calls[] = {
      [&] { OK(cuMemAlloc_v2(&pointer, 64)); },
      [&] { OK(cuMemHostAlloc(&host, 64, 0)); },
      [&] { OK(cuModuleLoadData(&module, "any image")); },
  };
  for (const auto &call : calls)
    EXPECT(returns_at_once(context, busy, call) == !synchronise);
  // Freeing always waits; allocating from a pool never does.
  EXPECT(!returns_at_once(context, busy, [&] { OK(cuMemFree_v2(pointer)); }));
  EXPECT(returns_at_once(context, busy, [&] { OK(cuMemAllocAsync(&pointer, 64, busy)); }));
  // A kernel is loaded once, when it is first needed.
  OK(cuModuleGetFunction(&function, module, "barrier"));
  OK(cuFuncIsLoaded(&loaded, function));
  EXPECT(loaded == eager);
  const auto ask = [&] { OK(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function)); };
  EXPECT(returns_at_once(context, busy, ask) == (!synchronise || eager));
  OK(cuFuncIsLoaded(&loaded, function));
  EXPECT(loaded == 1);
  EXPECT(returns_at_once(context, busy, ask));
}

} // namespace

void test_implicit_synchronisation() {
  EXPECT(in_child([] { expect_waits(false, false); }) == 0);
  EXPECT(in_child([] { expect_waits(true, false); }) == 0);
  EXPECT(in_child([] { expect_waits(true, true); }) == 0);
}

// Freeing waits for the work of another device's context once either has peer access to the other. Unmapping
// virtual memory waits for nothing.
void test_freeing_beside_a_peer() {
  CUcontext peer = use_device(1), own = use_device(0);
  CUdeviceptr memory[2], mapped;
  CUmemGenericAllocationHandle handle;
  CUstream busy;
  const CUmemAllocationProp device = properties(0);
  EXPECT(pipe(gate) == 0);
  OK(cuMemAlloc_v2(&memory[0], 64));
  OK(cuMemAlloc_v2(&memory[1], 64));
  OK(cuMemCreate(&handle, kPage, &device, 0));
  OK(cuMemAddressReserve(&mapped, kPage, 0, 0, 0));
  OK(cuMemMap(mapped, kPage, 0, handle, 0));
  OK(cuCtxSetCurrent(peer));
  OK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
  EXPECT(returns_at_once(own, busy, [&] { OK(cuMemFree_v2(memory[0])); }));
  OK(cuCtxEnablePeerAccess(own, 0));
  EXPECT(!returns_at_once(own, busy, [&] { OK(cuMemFree_v2(memory[1])); }));
  EXPECT(returns_at_once(own, busy, [&] { OK(cuMemUnmap(mapped, kPage)); }));
}

// Two branches between a fork and a join that wait for each other.
void test_branches() {
  use_device(0);
  CUstream a, b;
  CUevent event;
  CUgraph graph;
  CUgraphExec replay;
  static std::atomic<int> here;
  static std::atomic<bool> joined;
  const CUhostFn meet = [](void *) {
    ++here;
    while (here % 2)
      std::this_thread::yield();
  };
  const CUhostFn join = [](void *) { joined = here == 2; };
  OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  OK(cuEventRecord(event, a));
  OK(cuStreamWaitEvent(b, event, 0));
  OK(cuLaunchHostFunc(a, meet, nullptr));
  OK(cuLaunchHostFunc(b, meet, nullptr));
  OK(cuEventRecord(event, b));
  OK(cuStreamWaitEvent(a, event, 0));
  OK(cuLaunchHostFunc(a, join, nullptr));
  OK(cuStreamEndCapture(a, &graph));
  OK(cuGraphInstantiateWithFlags(&replay, graph, 0));
  for (int i = 0; i < 3; ++i) {
    here = 0;
    joined = false;
    OK(cuGraphLaunch(replay, a));
    OK(cuStreamSynchronize(a));
    EXPECT(joined);
  }
}

// Small allocations are parts of one block, and IPC shares the block.
void test_suballocation() {
  setenv("STAND_IN_SUBALLOCATE", "1", 1);
  use_device(0);
  CUdeviceptr first, second, large, base, other;
  size_t bytes;
  uint64_t number[2];
  CUipcMemHandle handles[3];
  OK(cuMemAlloc_v2(&first, 1000));
  OK(cuMemAlloc_v2(&second, 1000));
  OK(cuMemAlloc_v2(&large, kPage));
  EXPECT(first != second && first % 256 == 0 && second % 256 == 0);
  OK(cuMemGetAddressRange_v2(&base, &bytes, first + 999));
  OK(cuMemGetAddressRange_v2(&other, nullptr, second));
  EXPECT(base == other && bytes == kPage && second - base < kPage);
  OK(cuMemGetAddressRange_v2(&other, &bytes, large));
  EXPECT(other == large && bytes == kPage);
  OK(cuPointerGetAttribute(&number[0], CU_POINTER_ATTRIBUTE_BUFFER_ID, first));
  OK(cuPointerGetAttribute(&number[1], CU_POINTER_ATTRIBUTE_BUFFER_ID, second));
  EXPECT(number[0] != number[1]);
  OK(cuIpcGetMemHandle(&handles[0], first));
  OK(cuIpcGetMemHandle(&handles[1], second));
  OK(cuIpcGetMemHandle(&handles[2], large));
  EXPECT(memcmp(&handles[0], &handles[1], sizeof(*handles)) == 0);
  EXPECT(memcmp(&handles[0], &handles[2], sizeof(*handles)) != 0);
  // The other process changes the first part through the block's handle; the block is freed with its last
  // part.
  uint32_t answer;
  OK(cuMemFree_v2(second));
  EXPECT(cuMemFree_v2(second) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemsetD32_v2(first, 41, 250));
  OK(cuCtxSynchronize());
  open_in_peer(handles[0]);
  OK(cuMemcpyDtoH_v2(&answer, base + 996, 4));
  EXPECT(answer == 42);
  OK(cuMemFree_v2(first));
  EXPECT(in_child([=] { *reinterpret_cast<volatile char *>(first) = 1; }) != 0);
}

// Work on memory that is unmapped before it runs is an illegal address, as on a GPU: cuMemUnmap does not wait
// for work.
void test_work_on_unmapped_memory() {
  use_device(0);
  CUmemGenericAllocationHandle memory;
  CUdeviceptr at;
  CUstream busy;
  const CUmemAllocationProp device = properties(0);
  const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT(pipe(gate) == 0);
  OK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
  OK(cuMemCreate(&memory, kPage, &device, 0));
  OK(cuMemAddressReserve(&at, kPage, 0, 0, 0));
  OK(cuMemMap(at, kPage, 0, memory, 0));
  OK(cuMemSetAccess(at, kPage, &access, 1));
  OK(cuLaunchHostFunc(busy, wait_at_gate, nullptr));
  OK(cuMemsetD8Async(at, 0, kPage, busy));
  OK(cuMemUnmap(at, kPage));
  open_gate();
  EXPECT(cuStreamSynchronize(busy) == CUDA_ERROR_ILLEGAL_ADDRESS);
}
