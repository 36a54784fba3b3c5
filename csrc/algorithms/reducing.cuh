// The algorithms that reduce.
//
// Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.
#pragma once

#include "halving_doubling.cuh"
#include "one_shot_pull.cuh"
#include "one_shot_push.cuh"
#include "reduce.cuh"
#include "reduce_scatter.cuh"
#include "ring.cuh"
#include "two_shot_pull.cuh"
#include "two_shot_push.cuh"
