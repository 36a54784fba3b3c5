#!/usr/bin/env bash
# Executes what nvcc makes of csrc/ for GPUs, on the CPU: tests/ptx_machine, under the tests of the CUDA device.
#   scripts/test-ptx.sh [ARGUMENTS OF THE TESTS]
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
driver=$target/stand-in-ptx
export PTX_NVCC=${PTX_NVCC:-$(scripts/cuda-toolchain.sh)/bin/nvcc}
cargo build --release --package fast-allreduce-ptx-machine
STAND_IN_MACHINE=$target/release/libfast_allreduce_ptx_machine.a tests/stand_in_driver/build.sh "$driver"

export STAND_IN_PTX=1 LD_LIBRARY_PATH=$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FAST_ALLREDUCE_NVCC=$PWD/tests/stand_in_driver/nvcc-ptx FAST_ALLREDUCE_ARCHS=sm_90
export FAST_ALLREDUCE_REQUIRE=cuda,two-gpus,stand-in,ptx
cargo test -p fast-allreduce --features "${CUDA_FEATURE:-cuda-13000}" --test cuda -- "$@"
