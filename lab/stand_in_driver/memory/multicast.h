// Multicast objects, for the code that maps memory and launches kernels.
#pragma once

#include "memory.h"

namespace stand_in {

// The object of a descriptor; null if it is no descriptor of a multicast object.
std::shared_ptr<Physical> import_multicast(int fd);

// Waits until a multicast object can be mapped; returns at once for other objects.
CUresult check_mappable(const Physical &physical);
bool is_member(const Physical &physical, CUdevice device);

// Resolves a multicast address: writes the address of the bytes on each device of the group, in the order in
// which they joined, and returns the number of devices. Returns 0 if it is not a multicast address, or not
// all devices have bound memory there.
uint32_t multicast_parts(const CUctx_st &context, uint64_t address, uint64_t bytes,
                         uint64_t parts[kMaxDevices]);

// Whether this process has bound the memory to an object, and how much memory it has bound.
bool is_bound(const Physical &memory);
uint64_t live_bindings();

void close_group(Physical &physical);

} // namespace stand_in
