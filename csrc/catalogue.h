// Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.
//
// FA_<LIST>(X, ...) expands to X(entry, ...) for each entry, so that lists can be nested. The fields of an
// entry (the code is the enumerator, the number its value):
//
//   FA_TYPES        code, number, name, element, bytes, class (floats or integers), kernel type
//   FA_SIGNED       codes of signed integers
//   FA_KERNEL_TYPES types that GPU kernels are compiled for: name, element
//   FA_OPS          code, number, name, classes of types (all, integers or floats)
//   FA_COMBINING    ways to combine values: code, classes of types, case labels of the operations that use it
//   FA_REDUCING     kernels that reduce: code, number, name
//   FA_HOT          kernels that reduce and have a hot set: code, number, name
//   FA_MOVING       kernels that move bytes: code, number, name
//   FA_OTHER        kernels with separate entry points: code, number, name
//   FA_NORMING      kernels of fused allreduces, for hot types: code, number, name, algorithm
//   FA_NORMING_NAMES each of their names once: some share one
//   FA_NVLS         in-switch reductions of hot types, on sm_90 and newer: code, number, name
//   FA_SHARDED      norms of rows that are divided among ranks, for hot types: code, number, name
//   FA_NORMS        norms of rows: code, number, functor
//   FA_SCALINGS     formats of quantised rows: code, number, bits of a number
//   FA_HOT_TYPES    types of the hot set: name, element
//   FA_HOT_WORLDS   world sizes of the hot set
#ifndef FAST_ALLREDUCE_CATALOGUE_H
#define FAST_ALLREDUCE_CATALOGUE_H

// clang-format off
#define FA_TYPES(X, ...) \
  X(FA_F16, 0, f16, F16, 2, floats, f16, __VA_ARGS__) \
  X(FA_BF16, 1, bf16, Bf16, 2, floats, bf16, __VA_ARGS__) \
  X(FA_F32, 2, f32, float, 4, floats, f32, __VA_ARGS__) \
  X(FA_F64, 3, f64, double, 8, floats, f64, __VA_ARGS__) \
  X(FA_I8, 4, i8, i8, 1, integers, integers, __VA_ARGS__) \
  X(FA_U8, 5, u8, u8, 1, integers, integers, __VA_ARGS__) \
  X(FA_I32, 6, i32, i32, 4, integers, integers, __VA_ARGS__) \
  X(FA_U32, 7, u32, u32, 4, integers, integers, __VA_ARGS__) \
  X(FA_I64, 8, i64, i64, 8, integers, integers, __VA_ARGS__) \
  X(FA_U64, 9, u64, u64, 8, integers, integers, __VA_ARGS__) \
  X(FA_F8E4M3, 10, f8e4m3, F8E4M3, 1, floats, f8, __VA_ARGS__) \
  X(FA_F8E5M2, 11, f8e5m2, F8E5M2, 1, floats, f8, __VA_ARGS__)

#define FA_SIGNED(X, ...) \
  X(FA_I8, __VA_ARGS__) \
  X(FA_I32, __VA_ARGS__) \
  X(FA_I64, __VA_ARGS__)

#define FA_KERNEL_TYPES(X, ...) \
  X(f16, F16, __VA_ARGS__) \
  X(bf16, Bf16, __VA_ARGS__) \
  X(f32, float, __VA_ARGS__) \
  X(f64, double, __VA_ARGS__) \
  X(integers, AnyInteger, __VA_ARGS__) \
  X(f8, AnyF8, __VA_ARGS__)

#define FA_OPS(X, ...) \
  X(FA_SUM, 0, sum, all, __VA_ARGS__) \
  X(FA_PROD, 1, prod, all, __VA_ARGS__) \
  X(FA_MIN, 2, min, all, __VA_ARGS__) \
  X(FA_MAX, 3, max, all, __VA_ARGS__) \
  X(FA_AVG, 4, avg, all, __VA_ARGS__) \
  X(FA_BAND, 5, band, integers, __VA_ARGS__) \
  X(FA_BOR, 6, bor, integers, __VA_ARGS__) \
  X(FA_BXOR, 7, bxor, integers, __VA_ARGS__) \
  X(FA_PREMUL_SUM, 8, premul_sum, floats, __VA_ARGS__)

#define FA_COMBINING(X, ...) \
  X(FA_SUM, all, case FA_SUM: case FA_AVG: case FA_PREMUL_SUM:, __VA_ARGS__) \
  X(FA_PROD, all, case FA_PROD:, __VA_ARGS__) \
  X(FA_MIN, all, case FA_MIN:, __VA_ARGS__) \
  X(FA_MAX, all, case FA_MAX:, __VA_ARGS__) \
  X(FA_BAND, integers, case FA_BAND:, __VA_ARGS__) \
  X(FA_BOR, integers, case FA_BOR:, __VA_ARGS__) \
  X(FA_BXOR, integers, case FA_BXOR:, __VA_ARGS__)

#define FA_REDUCING(X, ...) \
  X(FA_ONE_SHOT_PULL, 0, one_shot_pull, __VA_ARGS__) \
  X(FA_TWO_SHOT_PULL, 1, two_shot_pull, __VA_ARGS__) \
  X(FA_ONE_SHOT_PUSH, 2, one_shot_push, __VA_ARGS__) \
  X(FA_TWO_SHOT_PUSH, 3, two_shot_push, __VA_ARGS__) \
  X(FA_RING, 4, ring, __VA_ARGS__) \
  X(FA_HALVING_DOUBLING, 5, halving_doubling, __VA_ARGS__) \
  X(FA_REDUCE_SCATTER, 6, reduce_scatter, __VA_ARGS__) \
  X(FA_REDUCE, 7, reduce, __VA_ARGS__)

#define FA_HOT(X, ...) \
  X(FA_ONE_SHOT_PULL, 0, one_shot_pull, __VA_ARGS__) \
  X(FA_TWO_SHOT_PULL, 1, two_shot_pull, __VA_ARGS__) \
  X(FA_ONE_SHOT_PUSH, 2, one_shot_push, __VA_ARGS__) \
  X(FA_TWO_SHOT_PUSH, 3, two_shot_push, __VA_ARGS__)

#define FA_MOVING(X, ...) \
  X(FA_ALL_GATHER, 8, all_gather, __VA_ARGS__) \
  X(FA_BROADCAST, 9, broadcast, __VA_ARGS__) \
  X(FA_SCATTERED_BROADCAST, 10, scattered_broadcast, __VA_ARGS__)

#define FA_OTHER(X, ...) \
  X(FA_BARRIER, 11, barrier, __VA_ARGS__) \
  X(FA_TRANSFER, 12, transfer, __VA_ARGS__) \
  X(FA_TWO_SHOT_QUANTIZED, 13, two_shot_quantized, __VA_ARGS__) \
  X(FA_ALL_GATHER_ROWS, 14, all_gather_rows, __VA_ARGS__)

#define FA_NORMING(X, ...) \
  X(FA_ONE_SHOT_PULL_NORM, 15, one_shot_pull_norm, one_shot_pull, __VA_ARGS__) \
  X(FA_TWO_SHOT_PULL_NORM, 16, two_shot_pull_norm, two_shot_pull, __VA_ARGS__) \
  X(FA_ONE_SHOT_PUSH_NORM, 17, push_norm, one_shot_push, __VA_ARGS__) \
  X(FA_TWO_SHOT_PUSH_NORM, 18, push_norm, two_shot_push, __VA_ARGS__) \
  X(FA_REDUCE_SCATTER_NORM, 19, reduce_scatter_norm, reduce_scatter, __VA_ARGS__)

#define FA_NORMING_NAMES(X, ...) \
  X(one_shot_pull_norm, __VA_ARGS__) \
  X(two_shot_pull_norm, __VA_ARGS__) \
  X(push_norm, __VA_ARGS__) \
  X(reduce_scatter_norm, __VA_ARGS__)

#define FA_NVLS(X, ...) \
  X(FA_ONE_SHOT_NVLS, 20, one_shot_nvls, __VA_ARGS__) \
  X(FA_TWO_SHOT_NVLS, 21, two_shot_nvls, __VA_ARGS__)

#define FA_SHARDED(X, ...) \
  X(FA_SHARDED_RMS_NORM, 22, sharded_rms_norm, __VA_ARGS__)

#define FA_NORMS(X, ...) \
  X(FA_NORM_RMS, 1, RmsNorm, __VA_ARGS__) \
  X(FA_NORM_LAYER, 2, LayerNorm, __VA_ARGS__)

#define FA_SCALINGS(X, ...) \
  X(FA_SCALE_GIVEN, 1, 8, __VA_ARGS__) \
  X(FA_SCALE_PER_ROW, 2, 8, __VA_ARGS__) \
  X(FA_SCALE_PER_GROUP, 3, 8, __VA_ARGS__) \
  X(FA_SCALE_NVFP4, 4, 4, __VA_ARGS__) \
  X(FA_SCALE_NVFP4_TILED, 5, 4, __VA_ARGS__) \
  X(FA_SCALE_PER_GROUP_COLUMNS, 6, 8, __VA_ARGS__) \
  X(FA_SCALE_PER_GROUP_UE8M0, 7, 8, __VA_ARGS__) \
  X(FA_SCALE_MXFP8, 8, 8, __VA_ARGS__) \
  X(FA_SCALE_MXFP8_TILED, 9, 8, __VA_ARGS__) \
  X(FA_SCALE_MXFP4, 10, 4, __VA_ARGS__) \
  X(FA_SCALE_MXFP4_TILED, 11, 4, __VA_ARGS__) \
  X(FA_SCALE_NVFP4_8X4, 12, 4, __VA_ARGS__) \
  X(FA_SCALE_MXFP8_8X4, 13, 8, __VA_ARGS__) \
  X(FA_SCALE_PER_32_UE8M0, 14, 8, __VA_ARGS__)

#define FA_HOT_TYPES(X, ...) \
  X(f16, F16, __VA_ARGS__) \
  X(bf16, Bf16, __VA_ARGS__) \
  X(f32, float, __VA_ARGS__)

#define FA_HOT_WORLDS(X, ...) \
  X(2, __VA_ARGS__) \
  X(3, __VA_ARGS__) \
  X(4, __VA_ARGS__) \
  X(5, __VA_ARGS__) \
  X(6, __VA_ARGS__) \
  X(8, __VA_ARGS__)

// clang-format on

#endif
