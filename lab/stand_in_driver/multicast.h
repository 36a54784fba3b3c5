// Multicast objects, as the parts that map memory and launch kernels see them.
#pragma once

#include "memory.h"

namespace stand_in {

// The object that a descriptor is of; null for any other descriptor.
std::shared_ptr<Physical> import_multicast(int fd);

// Waits until an object can be mapped, if it is one of multicast.
CUresult check_mappable(const Physical &physical);
bool is_member(const Physical &physical, CUdevice device);

// What an address of multicast means: so many bytes on each device of the team, in the order in which they
// joined. Their number; 0 where it is no such address, or not all devices have memory there.
uint32_t multicast_parts(const CUctx_st &context, uint64_t address, uint64_t bytes,
                         uint64_t parts[kMaxDevices]);

void close_team(Physical &physical);

} // namespace stand_in
