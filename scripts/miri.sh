#!/usr/bin/env bash
# Runs the unit tests of modules without system calls or kernels under Miri, which finds undefined behaviour in unsafe
# Rust. It needs a nightly toolchain of rustup with the component `miri`. CI has none, and nobody has run this yet.
#
#   scripts/miri.sh [filter...]     default: call:: plan:: registry:: catalogue:: topology::
set -euo pipefail
cd "$(dirname "$0")/.."

cargo +nightly miri --version >/dev/null 2>&1 || {
  echo "miri: no nightly toolchain with Miri: rustup toolchain install nightly --component miri" >&2
  exit 1
}
[ $# -gt 0 ] || set -- call:: plan:: registry:: catalogue:: topology::
export MIRIFLAGS="-Zmiri-disable-isolation ${MIRIFLAGS-}" PROPTEST_CASES=${PROPTEST_CASES:-4} FAST_ALLREDUCE_NVCC=none
scripts/test-selected.sh cargo +nightly miri test --lib -- "$@"
