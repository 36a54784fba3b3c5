// All algorithms.
//
// Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.
#pragma once

#include "all_gather.cuh"
#include "all_gather_rows.cuh"
#include "barrier.cuh"
#include "broadcast.cuh"
#include "one_shot_nvls.cuh"
#include "reducing.cuh"
#include "sharded_norm.cuh"
#include "transfer.cuh"
#include "two_shot_nvls.cuh"
#include "two_shot_quantized.cuh"
