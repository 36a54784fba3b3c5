#!/usr/bin/env bash
# Builds the wheel, installs it into a clean environment with NumPy and torch for CPUs, and runs the tests of
# python/tests; those of python/tests/cuda run on the stand-in driver. The wheel has the stand-in's placeholder kernels:
# without a driver it behaves like one with real ones. torch comes from the environment of scripts/torch-environment.sh.
#
# --no-torch skips torch and reports the tests that need it as skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc
# The library's target folder, to reuse what was built there.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
torch=yes
[ "${1:-}" != --no-torch ] || torch=
work=$CARGO_TARGET_DIR/python
lab/stand_in_driver/build.sh "$CARGO_TARGET_DIR/stand-in"
mkdir -p "$work"
rm -rf "$work/venv" "$work/wheels"

cargo fmt --manifest-path python/Cargo.toml --check
cargo clippy --release --manifest-path python/Cargo.toml -- -D warnings
# Free-threaded Python has no stable ABI. The check needs no interpreter.
printf '%s\n' implementation=CPython version=3.14 build_flags=Py_GIL_DISABLED suppress_build_script_link_lines=true \
  >"$work/free-threaded"
PYO3_CONFIG_FILE=$work/free-threaded CARGO_TARGET_DIR=$CARGO_TARGET_DIR/free-threaded \
  cargo clippy --no-default-features --manifest-path python/Cargo.toml -- -D warnings
python3 -m venv "$work/venv"
python=$work/venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet 'maturin>=1.7,<2' numpy ml_dtypes pytest expecttest
(cd python && "$work/venv/bin/maturin" build --release --interpreter "$python" --out "$work/wheels")
# Into an environment with nothing else: the wheel alone must name its requirements.
"$python" -m pip install --quiet "$work"/wheels/*.whl
if [ -n "$torch" ]; then
  environment=$(scripts/torch-environment.sh)
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$environment/bin/python" -c "$packages" >"$("$python" -c "$packages")/torch.pth"
  scripts/check-versions.py torch.distributed "$python" torch
fi

# The test bed of several machines, for those who may make namespaces.
cargo build --quiet --package fast-allreduce-network --example network
export FAST_ALLREDUCE_NETWORK=$CARGO_TARGET_DIR/debug/examples/network

# As a user runs it: from another folder, where Python cannot import the sources by accident.
cd python/tests
"$python" -m fast_allreduce.examples.allreduce --ranks 3
passed=0 failed=0
# tests NAME ARGUMENTS...: runs pytest and adds its numbers. With torch installed, no test may be skipped.
tests() {
  local log=$work/$1.log status=0 good bad errors skipped
  shift
  "$python" -m pytest -p no:cacheprovider --quiet "$@" | tee "$log" || status=$?
  # The number before a word in pytest's summary line.
  count() { sed -nE "s/(^|.*[ ,])([0-9]+) $1.*/\\2/p" "$log" | tail -n 1; }
  good=$(count passed) bad=$(count failed) errors=$(count error) skipped=$(count skipped)
  bad=$((${bad:-0} + ${errors:-0}))
  if [ -n "$torch" ] && [ "${skipped:-0}" -gt 0 ]; then
    echo "$skipped tests were skipped"
    bad=$((bad + skipped))
  fi
  [ "$status" -eq 0 ] && [ "${good:-0}" -gt 0 ] || bad=$((bad > 0 ? bad : 1))
  passed=$((passed + ${good:-0})) failed=$((failed + bad))
}
tests package --ignore=cuda --ignore=gpu --ignore=servers .
LD_LIBRARY_PATH=$CARGO_TARGET_DIR/stand-in tests gpu-buffers cuda
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
