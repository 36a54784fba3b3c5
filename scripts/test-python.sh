#!/usr/bin/env bash
# Builds the wheel, installs it into a clean environment with NumPy and torch for CPUs, and runs the tests of
# python/tests. torch comes from the environment of scripts/torch-environment.sh.
#
# --no-torch skips torch and reports the tests that need it as skipped. --stand-in builds the wheel with placeholder
# kernels instead, and runs python/tests/cuda on the stand-in driver.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none}
# The library's target folder, to reuse what was built there.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
torch=yes
tests=.
work=$CARGO_TARGET_DIR/python
case ${1:-} in
  --no-torch) torch= ;;
  --stand-in)
    tests=cuda
    work=$CARGO_TARGET_DIR/python-cuda
    export FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc
    lab/stand_in_driver/build.sh "$CARGO_TARGET_DIR/stand-in"
    ;;
esac
mkdir -p "$work"
rm -rf "$work/venv" "$work/wheels"

cargo fmt --manifest-path python/Cargo.toml --check
cargo clippy --release --manifest-path python/Cargo.toml -- -D warnings
if [ "$tests" = . ]; then
  # Free-threaded Python has no stable ABI. The check needs no interpreter.
  printf '%s\n' implementation=CPython version=3.14 build_flags=Py_GIL_DISABLED suppress_build_script_link_lines=true \
    >"$work/free-threaded"
  PYO3_CONFIG_FILE=$work/free-threaded CARGO_TARGET_DIR=$CARGO_TARGET_DIR/free-threaded \
    cargo clippy --no-default-features --manifest-path python/Cargo.toml -- -D warnings
fi
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

if [ "$tests" = . ]; then
  ignored=(--ignore=cuda --ignore=gpu --ignore=servers)
else
  export LD_LIBRARY_PATH=$CARGO_TARGET_DIR/stand-in
  ignored=()
fi

# As a user runs it: from another folder, where Python cannot import the sources by accident.
cd python/tests
"$python" -m fast_allreduce.examples.allreduce --ranks 3
status=0
"$python" -m pytest -p no:cacheprovider --quiet "${ignored[@]}" "$tests" | tee "$work/log" || status=$?
# count WORD: prints the number before WORD in pytest's summary line.
count() { sed -nE "s/(^|.*[ ,])([0-9]+) $1.*/\\2/p" "$work/log" | tail -n 1; }
passed=$(count passed) failed=$(count failed) errors=$(count error) skipped=$(count skipped)
failed=$((${failed:-0} + ${errors:-0}))
# With torch installed, no test may be skipped.
if [ -n "$torch" ] && [ "${skipped:-0}" -gt 0 ]; then
  echo "$skipped tests were skipped"
  failed=$((failed + skipped))
fi
echo "${passed:-0} passed, $failed failed"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ] && [ "${passed:-0}" -gt 0 ]
