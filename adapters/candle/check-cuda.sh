#!/usr/bin/env bash
# Compiles the adapter and its tests with the feature `cuda`, without a GPU and without the minutes that candle's
# kernels take: tests/nvcc replaces nvcc, so nothing of it can run.
set -euo pipefail
cd "$(dirname "$0")"

# A fixed path, because build scripts run again if it changes.
toolkit=${CARGO_TARGET_DIR:-$PWD/target}/stand-in-toolkit
mkdir -p "$toolkit/bin" "$toolkit/include" "$toolkit/lib64"
cp tests/nvcc "$toolkit/bin/nvcc"
export PATH=$toolkit/bin:$PATH CUDA_HOME=$toolkit CUDA_PATH=$toolkit NVCC=$toolkit/bin/nvcc CUDA_COMPUTE_CAP=80
export FAST_ALLREDUCE_NVCC=none
cargo clippy --locked --features cuda --all-targets -- -D warnings
