// Initialisation, settings, and attributes of devices.
#include "driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory/memory.h"

namespace stand_in {
namespace {

std::atomic<bool> initialized{false};
std::atomic<bool> forked{false};

bool flag(const char *name) {
  const char *value = getenv(name);
  return value && *value && strcmp(value, "0") != 0;
}

int number(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

// The devices that CUDA_VISIBLE_DEVICES lists, in its order. As in CUDA, the list ends at its first invalid
// entry.
std::vector<int> visible_devices() {
  const char *count_text = getenv("STAND_IN_DEVICES");
  const int asked = count_text ? atoi(count_text) : 2;
  const int count = asked < 0 ? 0 : asked > kMaxDevices ? kMaxDevices : asked;
  std::vector<int> devices;
  if (flag("STAND_IN_NO_DEVICE"))
    return devices;
  const int first = kDevicesOfNode * number("STAND_IN_NODE", 0);
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < count; ++i)
      devices.push_back(first + i);
    return devices;
  }
  while (*visible) {
    char *end;
    const long device = strtol(visible, &end, 10);
    if (end == visible || device < 0 || device >= count)
      break;
    devices.push_back(first + int(device));
    visible = *end == ',' ? end + 1 : end;
  }
  return devices;
}

} // namespace

const Settings &settings() {
  static const Settings *settings = [] {
    const char *log = getenv("STAND_IN_LAUNCH_LOG");
    const char *loading = getenv("CUDA_MODULE_LOADING");
    return new Settings{visible_devices(),
                        flag("STAND_IN_NO_IPC"),
                        flag("STAND_IN_NO_VMM"),
                        flag("STAND_IN_IPC_BLACK_HOLE"),
                        flag("STAND_IN_NO_PEER"),
                        flag("STAND_IN_NO_LAUNCH"),
                        flag("STAND_IN_PCIE"),
                        flag("STAND_IN_ABORT_ON_EARLY_FREE"),
                        flag("STAND_IN_BROKEN_PEERS"),
                        flag("STAND_IN_FABRIC"),
                        log ? log : "",
                        flag("STAND_IN_SYNCHRONISE"),
                        flag("STAND_IN_SUBALLOCATE"),
                        loading && strcmp(loading, "EAGER") == 0,
                        flag("STAND_IN_PTX"),
                        flag("STAND_IN_MULTICAST"),
                        flag("STAND_IN_THROTTLE"),
                        flag("STAND_IN_WATCHDOG"),
                        flag("STAND_IN_LOST_STORES"),
                        number("STAND_IN_MULTIPROCESSORS", 0),
                        number("STAND_IN_DRIVER_VERSION", 13000),
                        number("STAND_IN_VIRTUAL_ARCHITECTURE", 90),
                        number("STAND_IN_NODE", 0)};
  }();
  return *settings;
}

// A driver that was initialised before a fork cannot be used in the child.
CUresult check_initialized() { return initialized && !forked ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }

CUresult check_device(CUdevice device) {
  STAND_IN_CHECK(check_initialized());
  return device >= 0 && device < int(settings().devices.size()) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// Plans spread small messages over all multiprocessors, and each block that runs in series costs a
// synchronisation of all ranks. So by default there are fewer than an H100 has. The PTX machine, which runs
// blocks concurrently, has as many as an H100.
int multiprocessors() {
  constexpr int kSmall = 96, kLarge = 132;
  if (settings().multiprocessors > 0)
    return settings().multiprocessors;
  return settings().ptx ? kLarge : kSmall;
}

bool peers_reach_each_other(CUdevice a, CUdevice b) { return a != b && !settings().no_peer; }

} // namespace stand_in

using namespace stand_in;

CUresult cuInit(unsigned flags) {
  STAND_IN_CALL();
  if (flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (forked)
    return CUDA_ERROR_NOT_INITIALIZED;
  if (settings().devices.empty())
    return CUDA_ERROR_NO_DEVICE;
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    initialized = true;
  });
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  STAND_IN_CALL();
  if (!version)
    return CUDA_ERROR_INVALID_VALUE;
  *version = settings().version;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (!count)
    return CUDA_ERROR_INVALID_VALUE;
  *count = int(settings().devices.size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(ordinal));
  if (!device)
    return CUDA_ERROR_INVALID_VALUE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!name || length <= 0)
    return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, size_t(length), "Stand-in device %d", settings().devices[device]);
  return CUDA_SUCCESS;
}

// The same in all processes for one device, whatever its ordinal there.
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!uuid)
    return CUDA_ERROR_INVALID_VALUE;
  memcpy(uuid->bytes, "stand-in device", 16);
  uuid->bytes[15] = char(settings().devices[device]);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  STAND_IN_CALL();
  return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!bytes)
    return CUDA_ERROR_INVALID_VALUE;
  *bytes = kDeviceBytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!id || length < 13)
    return CUDA_ERROR_INVALID_VALUE;
  snprintf(id, size_t(length), "0000:%02x:00.0", settings().devices[device] % kDevicesOfNode + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  unsigned domain, bus, slot, function;
  if (!device || !id)
    return CUDA_ERROR_INVALID_VALUE;
  if (sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < settings().devices.size(); ++i) {
    if (domain == 0 && slot == 0 && function == 0 && int(bus) == settings().devices[i] % kDevicesOfNode + 1) {
      *device = CUdevice(i);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!value)
    return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7FFFFFFF; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1000000; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = multiprocessors(); break;
  case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = settings().devices[device] % kDevicesOfNode + 1; break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 50 << 20; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
  case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 2; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
  case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
  case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
  case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
  case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT: *value = settings().watchdog; break;
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = !settings().no_vmm; break;
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
    *value = settings().fabric && !settings().no_vmm;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    *value = settings().multicast && !settings().no_vmm && !settings().no_peer;
    break;
  // Attributes that are not listed are not supported.
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

// As over PCIe: the CPU and the device exchange and add words of at most 64 bits, and other atomics are
// missing.
CUresult cuDeviceGetHostAtomicCapabilities(unsigned *capabilities, const CUatomicOperation *operations,
                                           unsigned count, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!capabilities || !operations || count == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (settings().version < 13000)
    return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 0; i < count; ++i) {
    const bool has = operations[i] == CU_ATOMIC_OPERATION_INTEGER_ADD ||
                     operations[i] == CU_ATOMIC_OPERATION_EXCHANGE ||
                     operations[i] == CU_ATOMIC_OPERATION_CAS;
    capabilities[i] =
        has ? CU_ATOMIC_CAPABILITY_UNSIGNED | CU_ATOMIC_CAPABILITY_SCALAR_32 | CU_ATOMIC_CAPABILITY_SCALAR_64
            : 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  STAND_IN_CHECK(check_device(peer));
  if (!can)
    return CUDA_ERROR_INVALID_VALUE;
  *can = peers_reach_each_other(device, peer);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(from));
  STAND_IN_CHECK(check_device(to));
  if (!value || from == to)
    return from == to ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
  case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = 0; break;
  case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
    *value = peers_reach_each_other(from, to) && !settings().pcie;
    break;
  case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
  case CU_DEVICE_P2P_ATTRIBUTE_ARRAY_ACCESS_SUPPORTED: *value = peers_reach_each_other(from, to); break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
