// Kernels: the collectives, replayed graphs, and launches that must fail.
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../../../csrc/abi.h"
#include "self_test.h"

namespace {

constexpr size_t kCount = 1008; // whole packs in each of two slices
constexpr size_t kRegion = 1 << 20;

// One of two ranks, each on its own device.
struct Rank {
  CUcontext context;
  CUstream stream;
  CUmodule module;
  CUdeviceptr region, input, output, status;
  FaLaunch launch = {};
};

float element(int rank, size_t i) { return float(rank + 1) * float(i % 97); }

void prepare(Rank *rank, int number) {
  rank->context = use_device(number);
  OK(cuStreamCreate(&rank->stream, CU_STREAM_NON_BLOCKING));
  OK(cuModuleLoadData(&rank->module, "any image"));
  OK(cuMemAlloc_v2(&rank->region, kRegion));
  OK(cuMemsetD8Async(rank->region, 0, kRegion, rank->stream));
  OK(cuMemAllocAsync(&rank->input, kCount * 4, rank->stream));
  OK(cuMemAllocAsync(&rank->output, kCount * 4, rank->stream));
  void *status;
  OK(cuMemHostAlloc(&status, sizeof(FaStatus), 0));
  memset(status, 0, sizeof(FaStatus));
  OK(cuMemHostGetDevicePointer_v2(&rank->status, status, 0));
  std::vector<float> values;
  for (size_t i = 0; i < kCount; ++i)
    values.push_back(element(number, i));
  OK(cuMemcpyHtoDAsync_v2(rank->input, values.data(), kCount * 4, rank->stream));
  OK(cuStreamSynchronize(rank->stream));
}

void fill_launch(Rank (&ranks)[2], int number) {
  FaLaunch &launch = ranks[number].launch;
  for (int r = 0; r < 2; ++r)
    launch.regions[r] = ranks[r].region;
  launch.input = ranks[number].input;
  launch.output = ranks[number].output;
  launch.count = kCount;
  launch.status = ranks[number].status;
  launch.mailbox_offset = sizeof(FaRegionHead);
  launch.mailbox_bytes = 64 << 10;
  launch.staging_offset = launch.mailbox_offset + 3 * launch.mailbox_bytes;
  launch.staging_bytes = 64 << 10;
  launch.timeout_ns = 10000000000u;
  launch.rank = uint32_t(number);
  launch.own = launch.regions[number];
  launch.world = 2;
  launch.dtype = FA_F32;
  launch.op = FA_SUM;
}

CUresult start(Rank &rank, const char *name, unsigned grid = 4, unsigned threads = 512) {
  CUfunction function;
  OK(cuCtxSetCurrent(rank.context));
  OK(cuModuleGetFunction(&function, rank.module, name));
  void *parameters[] = {&rank.launch};
  return cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, rank.stream, parameters, nullptr);
}

void expect_sums(Rank &rank) {
  std::vector<float> sums(kCount, -1.0f);
  OK(cuCtxSetCurrent(rank.context));
  OK(cuMemcpyDtoHAsync_v2(sums.data(), rank.output, kCount * 4, rank.stream));
  for (size_t i = 0; i < kCount; ++i)
    EXPECT(sums[i] == element(0, i) + element(1, i));
  OK(cuMemsetD8Async(rank.output, 0xEE, kCount * 4, rank.stream));
}

} // namespace

void test_kernels() {
  Rank ranks[2];
  for (int r = 0; r < 2; ++r)
    prepare(&ranks[r], r);
  for (int r = 0; r < 2; ++r) {
    OK(cuCtxSetCurrent(ranks[r].context));
    OK(cuCtxEnablePeerAccess(ranks[1 - r].context, 0));
    EXPECT(cuCtxEnablePeerAccess(ranks[1 - r].context, 0) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    fill_launch(ranks, r);
  }
  const char *names[] = {"one_shot_pull_f32", "two_shot_pull_f32_sum_w2", "one_shot_push_f32_sum_w2",
                         "two_shot_push_f32"};
  for (uint32_t algorithm = 0; algorithm < 4; ++algorithm) {
    for (Rank &rank : ranks) {
      rank.launch.algorithm = algorithm;
      OK(start(rank, names[algorithm]));
    }
    for (Rank &rank : ranks)
      expect_sums(rank);
  }
  // One capture, two replays.
  CUgraphExec replays[2];
  for (int r = 0; r < 2; ++r) {
    CUgraph graph;
    OK(cuStreamBeginCapture_v2(ranks[r].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(start(ranks[r], names[3]));
    OK(cuStreamEndCapture(ranks[r].stream, &graph));
    OK(cuGraphInstantiateWithFlags(&replays[r], graph, 0));
    OK(cuGraphDestroy(graph));
  }
  for (int replay = 0; replay < 2; ++replay) {
    for (int r = 0; r < 2; ++r) {
      OK(cuCtxSetCurrent(ranks[r].context));
      OK(cuGraphLaunch(replays[r], ranks[r].stream));
    }
    for (Rank &rank : ranks)
      expect_sums(rank);
  }
  // Invalid cooperative launches.
  CUfunction world;
  CUdeviceptr launches;
  OK(cuCtxSetCurrent(ranks[0].context));
  const FaLaunch both[2] = {ranks[0].launch, ranks[1].launch};
  OK(cuMemAlloc_v2(&launches, sizeof(both)));
  OK(cuMemcpyHtoDAsync_v2(launches, both, sizeof(both), ranks[0].stream));
  OK(cuModuleGetFunction(&world, ranks[0].module, "two_shot_push_f32"));
  FaLaunch all = both[0];
  all.launches = launches;
  void *parameters[] = {&all};
  EXPECT(cuLaunchKernel(world, 4, 2, 1, 512, 1, 1, 0, ranks[0].stream, parameters, nullptr) ==
         CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuLaunchCooperativeKernel(world, 64, 3, 1, 512, 1, 1, 0, ranks[0].stream, parameters) ==
         CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  // Launches that do not fit their kernel.
  CUfunction function;
  EXPECT(cuModuleGetFunction(&function, ranks[0].module, "one_shot_pull_f64_sum_w2") == CUDA_ERROR_NOT_FOUND);
  EXPECT(cuModuleLoadData(&ranks[0].module, "") == CUDA_ERROR_INVALID_IMAGE);
  EXPECT(start(ranks[0], "two_shot_push_bf16") == CUDA_ERROR_INVALID_VALUE);
  EXPECT(start(ranks[0], "two_shot_push_f32_sum_w3") == CUDA_ERROR_INVALID_VALUE);
  EXPECT(start(ranks[0], names[3], 4, 544) == CUDA_ERROR_INVALID_VALUE);
  // The hot set does not support parts of packs, misaligned addresses, checked launches and unequal slices.
  for (int odd = 0; odd < 4; ++odd) {
    const FaLaunch launch = ranks[0].launch;
    ranks[0].launch.algorithm = FA_TWO_SHOT_PULL;
    ranks[0].launch.count -= odd == 0;
    ranks[0].launch.output += odd == 1 ? 4 : 0;
    ranks[0].launch.checked = odd == 2;
    ranks[0].launch.count -= odd == 3 ? 4 : 0;
    EXPECT(start(ranks[0], names[1]) == CUDA_ERROR_INVALID_VALUE);
    ranks[0].launch = launch;
  }
  EXPECT(start(ranks[0], names[3], 4, 16) == CUDA_ERROR_INVALID_VALUE);
  // An absent peer.
  ranks[0].launch.timeout_ns = 50000000;
  OK(start(ranks[0], names[3]));
  OK(cuStreamSynchronize(ranks[0].stream));
  EXPECT(reinterpret_cast<FaStatus *>(ranks[0].status)->failure == FA_TIMED_OUT);
  EXPECT(reinterpret_cast<FaStatus *>(ranks[0].status)->missing == 2);
  // An address that no allocation covers is detected when the launch runs, and the context is lost.
  ranks[0].launch.count = kCount + 100;
  OK(start(ranks[0], names[3]));
  EXPECT(cuStreamSynchronize(ranks[0].stream) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuMemAlloc_v2(&launches, 8) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void test_world_kernel() {
  Rank ranks[2];
  for (int r = 0; r < 2; ++r) {
    prepare(&ranks[r], 0);
    std::vector<float> values;
    for (size_t i = 0; i < kCount; ++i)
      values.push_back(element(r, i));
    OK(cuMemcpyHtoDAsync_v2(ranks[r].input, values.data(), kCount * 4, ranks[r].stream));
    OK(cuStreamSynchronize(ranks[r].stream));
  }
  FaLaunch both[2];
  for (int r = 0; r < 2; ++r) {
    fill_launch(ranks, r);
    ranks[r].launch.algorithm = FA_TWO_SHOT_PULL;
    both[r] = ranks[r].launch;
  }
  CUfunction world;
  CUdeviceptr launches;
  OK(cuMemAlloc_v2(&launches, sizeof(both)));
  OK(cuMemcpyHtoDAsync_v2(launches, both, sizeof(both), ranks[0].stream));
  OK(cuModuleGetFunction(&world, ranks[0].module, "two_shot_pull_f32"));
  FaLaunch all = both[0];
  all.launches = launches;
  void *parameters[] = {&all};
  OK(cuLaunchCooperativeKernel(world, 8, 2, 1, 512, 1, 1, 0, ranks[0].stream, parameters));
  OK(cuStreamSynchronize(ranks[0].stream));
  for (Rank &rank : ranks)
    expect_sums(rank);
}

// A block without room waits until another block ends. Ranks that wait for each other succeed if both have
// room, and time out if not.
void test_residency() {
  for (int multiprocessors : {1, 2}) {
    const auto part = [=] {
      setenv("STAND_IN_MULTIPROCESSORS", std::to_string(multiprocessors).c_str(), 1);
      int value;
      Rank ranks[2];
      for (Rank &rank : ranks)
        prepare(&rank, 0);
      OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
      EXPECT(value == multiprocessors);
      for (int r = 0; r < 2; ++r) {
        fill_launch(ranks, r);
        ranks[r].launch.algorithm = FA_TWO_SHOT_PULL;
        ranks[r].launch.timeout_ns = multiprocessors == 1 ? 100000000 : 20000000000;
        OK(start(ranks[r], "two_shot_pull_f32", 1));
      }
      for (Rank &rank : ranks) {
        OK(cuStreamSynchronize(rank.stream));
        const auto *status = reinterpret_cast<FaStatus *>(rank.status);
        EXPECT(status->failure == (multiprocessors == 1 ? FA_TIMED_OUT : FA_OK));
      }
    };
    EXPECT(in_child(part) == 0);
  }
}
