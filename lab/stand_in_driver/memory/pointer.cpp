// Queries of pointers.
#include "memory.h"

#include <string.h>

namespace stand_in {
namespace {

template <class T>
CUresult put(void *data, T value) {
  memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}

// Answers as the driver does for an unknown address.
CUresult unknown_attribute(void *data, CUpointer_attribute attribute) {
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return put<int>(data, CU_DEVICE_INVALID);
  case CU_POINTER_ATTRIBUTE_CONTEXT:
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
  case CU_POINTER_ATTRIBUTE_BUFFER_ID:
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
  case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: return put<uint64_t>(data, 0);
  default: return put<uint32_t>(data, 0);
  }
}

CUresult attribute_of(const Allocation &allocation, uint64_t address, CUpointer_attribute attribute,
                      void *data) {
  const bool stream_ordered = allocation.kind == Kind::Pool || allocation.kind == Kind::Graph,
             mapped = allocation.kind == Kind::Virtual;
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT:
    return put<CUcontext>(data, stream_ordered || mapped ? nullptr : allocation.context);
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    return put<uint32_t>(data, allocation.on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return put<uint64_t>(data, address);
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    return allocation.on_device() ? CUDA_ERROR_INVALID_VALUE : put<uint64_t>(data, address);
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: return put<uint64_t>(data, allocation.id);
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return put<int>(data, allocation.device);
  case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    return put<int>(data, allocation.kind == Kind::Device && !settings().no_ipc);
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return put<uint64_t>(data, allocation.range_base());
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return put<size_t>(data, allocation.range_bytes());
  case CU_POINTER_ATTRIBUTE_MAPPED: return put<int>(data, 1);
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    return put<uint64_t>(data, mapped ? allocation.physical->handle_types : 0);
  case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return put<uint32_t>(data, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    return put<CUmemoryPool>(data, stream_ordered ? default_pool(allocation.device) : nullptr);
  case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
  case CU_POINTER_ATTRIBUTE_IS_MANAGED:
  case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: return put<int>(data, 0);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

} // namespace
} // namespace stand_in

using namespace stand_in;

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(pointer);
  if (!data || !allocation || allocation->freed)
    return CUDA_ERROR_INVALID_VALUE;
  return attribute_of(*allocation, pointer, attribute, data);
}

// Unlike cuPointerGetAttribute, this succeeds for unknown pointers and unsuitable attributes.
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!attributes || !data)
    return CUDA_ERROR_INVALID_VALUE;
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(pointer);
  for (unsigned i = 0; i < count; ++i) {
    if (!allocation || attribute_of(*allocation, pointer, attributes[i], data[i])) {
      unknown_attribute(data[i], attributes[i]);
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  const bool valid = value && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && is_known(pointer, 1);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto registry = Registry::lock();
  const Allocation *allocation = registry.find(pointer);
  if (!allocation)
    return CUDA_ERROR_NOT_FOUND;
  if (base)
    *base = allocation->range_base();
  if (bytes)
    *bytes = allocation->range_bytes();
  return CUDA_SUCCESS;
}
