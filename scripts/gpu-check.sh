#!/usr/bin/env bash
# Tests and measures fast-allreduce on this machine's GPU, with binaries built elsewhere.
#
#   scripts/gpu-check.sh BINARY OUT_DIR [TEST_BINARY...]
#
# BINARY is the program `fast-allreduce`; each TEST_BINARY is a test program of the CUDA device, from `cargo test
# --no-run`. Writes the report to OUT_DIR/gpu-check.json and OUT_DIR/gpu-check.md, next to the output of the other
# programs. Needs bash, coreutils and the driver; uses compute-sanitizer where it is installed. Ends within BUDGET
# seconds (default 540), even if a step hangs.
set -u

if [ $# -lt 2 ]; then
  echo "usage: $0 BINARY OUT_DIR [TEST_BINARY...]" >&2
  exit 2
fi
binary=$1
out=$2
shift 2
budget=${BUDGET:-540}
case $budget in '' | *[!0-9]*)
  echo "$0: BUDGET=$budget is not a number of seconds" >&2
  exit 2
  ;;
esac
mkdir -p "$out" || exit 2
case $binary in */*) ;; *) binary=./$binary ;; esac

# Most bytes of binaries, as they may be copied to the GPU machine over a slow connection.
MOST_BYTES=$((60 << 20))
# Seconds between SIGTERM and SIGKILL, and seconds reserved for the report.
GRACE=10
failed=0

# step <name> <seconds> <command...>: runs the command with its output in OUT_DIR/<name>.log.
step() {
  local name=$1 seconds=$2 status start=$SECONDS
  shift 2
  if [ "$seconds" -lt 1 ]; then
    printf '%-10s FAILED  not run: the time is over\n' "$name"
    failed=$((failed + 1))
    return
  fi
  timeout --kill-after="$GRACE" "$seconds" "$@" >"$out/$name.log" 2>&1
  status=$?
  case $status in
    0) printf '%-10s ok      %4d s\n' "$name" $((SECONDS - start)) ;;
    124 | 137) printf '%-10s FAILED  %4d s: not done in time\n' "$name" $((SECONDS - start)) ;;
    *) printf '%-10s FAILED  %4d s: exit status %d\n' "$name" $((SECONDS - start)) "$status" ;;
  esac
  [ "$status" -eq 0 ] || failed=$((failed + 1))
}

# Prints the size of each binary and the sum.
carried() {
  local file bytes total=0
  for file in "$@"; do
    bytes=$(stat --dereference --format=%s "$file") || return
    printf '%10d  %s\n' "$bytes" "$file"
    total=$((total + bytes))
  done
  printf '%10d  of at most %d\n' "$total" "$MOST_BYTES"
  [ "$total" -le "$MOST_BYTES" ]
}

echo "carried:"
if ! carried "$binary" "$0" "$@"; then
  echo "carried    FAILED"
  failed=$((failed + 1))
fi

if ! timeout 10 "$binary" --version --verbose; then
  echo "version    FAILED"
  failed=$((failed + 1))
fi

tests=()
for test in "$@"; do
  tests+=(--test "$test")
done
# The program limits its steps to its share of the time; if it hangs, the report so far is kept.
left=$((budget - SECONDS - 2 * GRACE))
rm -f "$out/gpu-check.json" "$out/gpu-check.md"
step gpu-check $((left + GRACE)) "$binary" gpu-check --seconds $((left > 0 ? left : 0)) --logs "$out" \
  --json "$out/gpu-check.json" --markdown "$out/gpu-check.md" ${tests[@]+"${tests[@]}"}
cat "$out/gpu-check.log"

for report in gpu-check.json gpu-check.md; do
  if [ ! -s "$out/$report" ]; then
    echo "$report FAILED  was not written"
    failed=$((failed + 1))
  fi
done

echo "$failed failed, after $SECONDS s of at most $budget"
[ "$failed" -eq 0 ]
