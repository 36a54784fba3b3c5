// The memory of a launch.
#pragma once

#include "module.h"

namespace stand_in {

// Size of a launch's operands.
uint64_t operand_bytes(uint32_t algorithm);

// Whether kernels may access all addresses of a launch's operands, and of the launch. On a GPU, memory that
// is unknown, too short, or a peer's without access is an illegal address.
bool operands_are_accessible(const CUctx_st &context, const FaLaunch &launch);
bool addresses_are_accessible(const CUctx_st &context, const FaLaunch &launch);

} // namespace stand_in
