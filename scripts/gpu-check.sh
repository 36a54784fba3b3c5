#!/usr/bin/env bash
# Proves and measures fast-allreduce on the GPU of this machine, with binaries that were built elsewhere.
#
#   scripts/gpu-check.sh BINARY OUT_DIR [TEST_BINARY...]
#
# BINARY is `fast-allreduce`; each TEST_BINARY is a test of the CUDA device, as `cargo test --no-run` makes it. What all of them
# say is in OUT_DIR. Needs bash, coreutils and the driver; compute-sanitizer is used where it is found. No step ends the
# script; the last line counts them.
set -u

if [ $# -lt 2 ]; then
  echo "usage: $0 BINARY OUT_DIR [TEST_BINARY...]" >&2
  exit 2
fi
binary=$1
out=$2
shift 2
mkdir -p "$out" || exit 2
case $binary in */*) ;; *) binary=./$binary ;; esac

# The wait between the signal to end and the one that ends.
GRACE=10
passed=0
failed=0

# step <name> <seconds> <command...>: its output goes to OUT_DIR/<name>.log.
step() {
  local name=$1 seconds=$2 status start=$SECONDS
  shift 2
  timeout --kill-after="$GRACE" "$seconds" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ "$status" -eq 0 ]; then
    printf '%-24s ok      %4d s\n' "$name" $((SECONDS - start))
    passed=$((passed + 1))
  else
    case $status in
      124 | 137) printf '%-24s FAILED  %4d s: not done in time\n' "$name" $((SECONDS - start)) ;;
      *) printf '%-24s FAILED  %4d s: exit status %d\n' "$name" $((SECONDS - start)) "$status" ;;
    esac
    tail -n 5 "$out/$name.log" | while IFS= read -r line; do printf '    %s\n' "$line"; done
    failed=$((failed + 1))
  fi
}

# The first compute-sanitizer of PATH and of the toolkit's usual places.
find_sanitizer() {
  local place
  command -v compute-sanitizer && return
  for place in "${CUDA_HOME:-/usr/local/cuda}/bin" "${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer"; do
    if [ -x "$place/compute-sanitizer" ]; then
      echo "$place/compute-sanitizer"
      return
    fi
  done
  return 1
}

step version 30 "$binary" --version --verbose
step gpu-check 540 "$binary" gpu-check --json "$out/gpu-check.json" --markdown "$out/gpu-check.md"

if sanitizer=$(find_sanitizer); then
  for tool in memcheck synccheck; do
    step "sanitizer-$tool" 240 "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all \
      "$binary" gpu-check --alone --step world --small
  done
else
  echo "sanitizer                skipped: compute-sanitizer was not found"
fi

number=0
for test in "$@"; do
  number=$((number + 1))
  case $test in */*) ;; *) test=./$test ;; esac
  step "test-$number-${test##*/}" 300 env FAST_ALLREDUCE_REQUIRE=cuda "$test" --test-threads=1
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
