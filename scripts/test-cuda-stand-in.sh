#!/bin/sh
# Runs the tests of the CUDA device on a machine without a GPU, with lab/stand_in_driver as the driver. They test the
# Rust side and the host's kernels, nothing of a GPU.
#   scripts/test-cuda-stand-in.sh [ARGUMENTS OF THE TESTS]
# CUDA_FEATURE is the feature to build with (default cuda-13000).
set -eu
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
driver=$target/stand-in
lab/stand_in_driver/build.sh "$driver"

# Placeholder kernels, unless the caller named a compiler.
export FAST_ALLREDUCE_NVCC="${FAST_ALLREDUCE_NVCC:-$PWD/lab/stand_in_driver/nvcc}"
export FAST_ALLREDUCE_REQUIRE=cuda,two-gpus,stand-in,selected
export LD_LIBRARY_PATH="$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec cargo test -p fast-allreduce --features "${CUDA_FEATURE:-cuda-13000}" --test cuda -- "$@"
