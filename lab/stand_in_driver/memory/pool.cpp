// Memory pools: one for each device. Only the release threshold is stored.
#include "memory.h"

struct CUmemPoolHandle_st {
  std::atomic<uint64_t> release_threshold{0};
};

namespace stand_in {
namespace {

CUmemPoolHandle_st pools[kMaxDevices];

bool is_pool(CUmemoryPool pool) { return pool >= pools && pool < pools + settings().devices.size(); }

} // namespace

CUmemoryPool default_pool(CUdevice device) { return &pools[device]; }

} // namespace stand_in

using namespace stand_in;

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!pool)
    return CUDA_ERROR_INVALID_VALUE;
  *pool = default_pool(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
  STAND_IN_CALL();
  return cuDeviceGetDefaultMemPool(pool, device);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  return pool == default_pool(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  STAND_IN_CALL();
  if (!is_pool(pool) || !value)
    return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<uint64_t *>(value) = pool->release_threshold;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  STAND_IN_CALL();
  if (!is_pool(pool) || !value)
    return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    return CUDA_ERROR_NOT_SUPPORTED;
  pool->release_threshold = *static_cast<uint64_t *>(value);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
  STAND_IN_CALL();
  return is_pool(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (pool != default_pool(context->device))
    return CUDA_ERROR_INVALID_VALUE;
  return cuMemAllocAsync(pointer, bytes, stream);
}
