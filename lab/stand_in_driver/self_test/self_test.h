// The self-test of the stand-in driver: declarations that its files share.
#pragma once

#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "../functions.h"

#define EXPECT(condition)                                                                                    \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                \
      _exit(1);                                                                                              \
    }                                                                                                        \
  } while (0)
#define OK(call) EXPECT((call) == CUDA_SUCCESS)

constexpr size_t kPage = size_t(2) << 20;

// Retains a device's primary context and makes it current.
CUcontext use_device(int device);
// Runs `part` in a child process and returns its wait status.
int in_child(const std::function<void()> &part);
// Properties of virtual memory that is shared by descriptor.
CUmemAllocationProp properties(int device);

void test_capture_errors();
void test_capture_modes();
void test_legacy_stream_in_captures();
void test_freeing_in_order();
void test_kernels();
void test_world_kernel();
void test_failing_calls();
void test_errors_that_stay();
void test_late_calls();
void test_user_objects();
void test_stream_per_thread();
void test_implicit_synchronisation();
void test_freeing_beside_a_peer();
void test_branches();
void test_suballocation();
void test_work_on_unmapped_memory();
void test_residency();
void test_sharing();
void test_addresses_that_stay();
void test_checkpoints();
// Opens a handle in another process, which replaces 41 by 42 at byte 996.
void open_in_peer(const CUipcMemHandle &handle);
// The other process of test_sharing.
int peer(const std::string &task, const std::string &argument);
