// Copies and fills. They are asynchronous to the host wherever they are in the driver.
#include "memory.h"

#include <string.h>

#include "../streams/stream.h"

namespace stand_in {
namespace {

enum class Place { Pageable, Pinned, Device, Invalid };

Place place_of(uint64_t address, size_t bytes) {
  if (is_pageable(address))
    return Place::Pageable;
  if (!is_known(address, bytes))
    return Place::Invalid;
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(address);
  return allocation && !allocation->on_device() ? Place::Pinned : Place::Device;
}

// Whether the device memory of an operation still exists when it runs. If not, a GPU reports an illegal
// address.
bool is_there(CUcontext context, std::initializer_list<uint64_t> addresses, size_t bytes) {
  for (uint64_t address : addresses) {
    if (!is_mapped(address, bytes)) {
      context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
      return false;
    }
  }
  return true;
}

void copy_bytes(CUcontext context, uint64_t to, Place destination, uint64_t from, Place source,
                size_t bytes) {
  if (destination == Place::Device && !is_there(context, {to}, bytes))
    return;
  if (source == Place::Device && !is_there(context, {from}, bytes))
    return;
  memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
}

CUresult copy(CUstream handle, bool synchronous, uint64_t to, uint64_t from, size_t bytes) {
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (synchronous)
    STAND_IN_CHECK(check_not_capturing());
  if (bytes == 0)
    return CUDA_SUCCESS;
  const Place source = place_of(from, bytes), destination = place_of(to, bytes);
  const bool valid = source != Place::Invalid && destination != Place::Invalid && to && from;
  if (!valid)
    return CUDA_ERROR_INVALID_VALUE;
  CUcontext owner = stream->context;
  Work run = [=] {
    copy_unless_lost(owner, [=] { copy_bytes(owner, to, destination, from, source, bytes); });
  };
  if (is_capturing(*stream))
    return submit(handle, run);

  if (source == Place::Pageable) {
    // The driver copies it to a buffer before the call returns.
    const char *start = reinterpret_cast<const char *>(from);
    run = [=, staged = std::vector<char>(start, start + bytes)] {
      copy_unless_lost(owner, [&] {
        if (destination != Place::Device || is_there(owner, {to}, bytes))
          memcpy(reinterpret_cast<void *>(to), staged.data(), bytes);
      });
    };
  }
  const bool pinned = source == Place::Pinned || destination == Place::Pinned;
  if (destination != Place::Pageable && !(synchronous && pinned))
    return submit(handle, std::move(run));
  STAND_IN_CHECK(submit_and_wait(stream, std::move(run)));
  return CUresult(stream->context->error.load());
}

// Device addresses of a copy must be known to the driver.
CUresult check_device_address(uint64_t address, size_t bytes) {
  return bytes == 0 || is_known(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <class T>
CUresult fill(CUstream handle, bool synchronous, uint64_t to, T value, size_t count) {
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (synchronous)
    STAND_IN_CHECK(check_not_capturing());
  STAND_IN_CHECK(check_device_address(to, count * sizeof(T)));
  if (to % sizeof(T))
    return CUDA_ERROR_INVALID_VALUE;
  if (count == 0)
    return CUDA_SUCCESS;
  CUcontext owner = stream->context;
  const auto set = [=] {
    if (!is_there(owner, {to}, count * sizeof(T)))
      return;
    T *start = reinterpret_cast<T *>(to);
    for (size_t i = 0; i < count; ++i)
      start[i] = value;
  };
  return submit(handle, [=] { copy_unless_lost(owner, set); });
}

uint64_t address(const void *host) { return reinterpret_cast<uint64_t>(host); }

} // namespace
} // namespace stand_in

using namespace stand_in;

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(to, bytes));
  return copy(nullptr, true, to, address(from), bytes);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(from, bytes));
  return copy(nullptr, true, address(to), from, bytes);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(to, bytes));
  STAND_IN_CHECK(check_device_address(from, bytes));
  return copy(nullptr, true, to, from, bytes);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(to, bytes));
  return copy(stream, false, to, address(from), bytes);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(from, bytes));
  return copy(stream, false, address(to), from, bytes);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device_address(to, bytes));
  STAND_IN_CHECK(check_device_address(from, bytes));
  return copy(stream, false, to, from, bytes);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  STAND_IN_CALL();
  return copy(nullptr, true, to, from, bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  STAND_IN_CALL();
  return copy(stream, false, to, from, bytes);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
  STAND_IN_CALL();
  return cuMemcpyDtoD_v2(to, from, bytes);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                           CUstream stream) {
  STAND_IN_CALL();
  return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  STAND_IN_CALL();
  return fill<uint8_t>(nullptr, true, to, value, count);
}

CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  STAND_IN_CALL();
  return fill<uint16_t>(nullptr, true, to, value, count);
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  STAND_IN_CALL();
  return fill<uint32_t>(nullptr, true, to, value, count);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  STAND_IN_CALL();
  return fill<uint8_t>(stream, false, to, value, count);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  STAND_IN_CALL();
  return fill<uint16_t>(stream, false, to, value, count);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  STAND_IN_CALL();
  return fill<uint32_t>(stream, false, to, value, count);
}
