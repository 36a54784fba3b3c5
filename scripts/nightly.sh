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

check env FAST_ALLREDUCE_TEST_FULL=1 cargo test
check scripts/test-additions.sh
check env LAUNCHES=3000 scripts/sanitize.sh
# Every driver call fails once, not a sample of 90 seconds.
check env FAST_ALLREDUCE_NVCC= FAST_ALLREDUCE_TEST_SWEEP=all scripts/test-cuda-stand-in.sh injection_sweep --nocapture
check cargo run --release -- soak --minutes 30
check scripts/test-sglang.sh
[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" && exit 1; }
