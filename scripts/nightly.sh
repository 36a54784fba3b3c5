#!/usr/bin/env bash
# What takes too long for every commit: more rounds of checks that .ci/run makes with fewer. Run it after .ci/run, which
# installs what it needs. Hours on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=none
failed=()
check() {
  echo "=== $*"
  "$@" || failed+=("$*")
}

# Every pair of features that does not need an MPI. The versions of CUDA exclude each other.
features() {
  local hack
  hack=$(scripts/tools.sh cargo-hack) || return
  hack() { "$hack" hack check --package fast-allreduce --lib --feature-powerset --depth 2 "$@"; }
  hack --include-features nvtx,float8,tcp &&
    hack --features cuda-12000 --include-features nccl,nvtx,float8,tcp,probes,prebuilt
}

check env FAST_ALLREDUCE_TEST_FULL=1 cargo test
check env FAST_ALLREDUCE_TEST_FULL=1 cargo test --package fast-allreduce-models --package fast-allreduce-network
check features
check scripts/public-api.py --self-test
check scripts/test-additions.sh
check env LAUNCHES=3000 scripts/sanitize.sh
# .ci/run checks the code of sm_90.
check scripts/check-cuda-codegen.py "$(scripts/cuda-toolchain.sh)" csrc sm_80 sm_100
# Every driver call fails once, not a sample.
check env FAST_ALLREDUCE_NVCC= FAST_ALLREDUCE_TEST_SWEEP=all scripts/test-cuda-stand-in.sh injection_sweep --nocapture
check env FAST_ALLREDUCE_NVCC= FAST_ALLREDUCE_TEST_FULL=1 scripts/test-cuda-stand-in.sh --skip injection_sweep
check scripts/test-mpi.sh mpich
check scripts/scaling.sh
check env FAST_ALLREDUCE_TEST_FULL=1 scripts/test-ptx.sh
check scripts/fuzz.sh 60
check scripts/sanitize.sh aarch64
check cargo run --release -- soak --minutes 30
check env FAST_ALLREDUCE_TEST_FULL=1 scripts/test-vllm.sh
check scripts/test-sglang.sh
# All packages, twice; nothing is published, so that the version does not matter.
command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends mmdebstrap; }
check scripts/release.sh 999.0.0
[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" && exit 1; }
