#!/usr/bin/env bash
# Proves and measures fast-allreduce on the GPU of this machine, with binaries that were built elsewhere.
#
#   scripts/gpu-check.sh BINARY OUT_DIR [TEST_BINARY...]
#
# BINARY is `fast-allreduce`; each TEST_BINARY is a test of the CUDA device, as `cargo test --no-run` makes it. The
# report is OUT_DIR/gpu-check.json and OUT_DIR/gpu-check.md, and the output of each program is OUT_DIR/NAME.log. Needs
# bash, coreutils and the driver. If compute-sanitizer is found, memcheck and synccheck run over a small part of the
# checks. The script ends within BUDGET seconds (540 unless set), whatever hangs.
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

# Streams that share a hardware queue would wait for each other; the default is 8 queues, and five ranks on a GPU have
# ten streams.
export CUDA_DEVICE_MAX_CONNECTIONS=32

# Maximum size of the files together: they may be copied to the machine over a slow connection.
MOST_BYTES=$((60 << 20))
# Seconds between SIGTERM and SIGKILL, and for writing the report.
GRACE=10
failed=0

# step <name> <seconds> <command...>: its output goes to OUT_DIR/<name>.log.
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

# Prints the sizes of the files and their sum. Fails if they are too large together.
sizes() {
  local file bytes total=0
  for file in "$@"; do
    bytes=$(stat --dereference --format=%s "$file") || return
    printf '%10d  %s\n' "$bytes" "$file"
    total=$((total + bytes))
  done
  printf '%10d  of at most %d\n' "$total" "$MOST_BYTES"
  [ "$total" -le "$MOST_BYTES" ]
}

echo "sizes in bytes:"
if ! sizes "$binary" "$0" "$@"; then
  echo "sizes      FAILED"
  failed=$((failed + 1))
fi

if ! timeout 10 "$binary" --version --verbose; then
  echo "version    FAILED"
  failed=$((failed + 1))
fi

# Seconds of each sanitizer, and of all tests together, if there is enough time.
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
sanitizer_time=$((budget / 12)) tests_time=$((budget / 6))
later=0
[ -z "$sanitizer" ] || later=$((2 * sanitizer_time))
[ $# -eq 0 ] || later=$((later + tests_time))

# The program trims its steps to its part of the time; if it hangs, its report so far is written.
left=$((budget - SECONDS - later - 2 * GRACE))
rm -f "$out/gpu-check.json" "$out/gpu-check.md"
step gpu-check $((left + GRACE)) "$binary" gpu-check --seconds $((left > 0 ? left : 0)) \
  --json "$out/gpu-check.json" --markdown "$out/gpu-check.md"
cat "$out/gpu-check.log"

if [ -n "$sanitizer" ]; then
  for tool in memcheck synccheck; do
    step $tool "$sanitizer_time" "$sanitizer" --tool $tool --error-exitcode 9 --target-processes all \
      "$binary" gpu-check --alone --step world --small --limit $((sanitizer_time * 1000))
  done
fi
for test in "$@"; do
  case $test in */*) ;; *) test=./$test ;; esac
  FAST_ALLREDUCE_REQUIRE=cuda step "tests-$(basename "$test")" $((tests_time / $#)) "$test" --test-threads=1
done

for report in gpu-check.json gpu-check.md; do
  if [ ! -s "$out/$report" ]; then
    echo "$report FAILED  was not written"
    failed=$((failed + 1))
  fi
done

echo "$failed failed, after $SECONDS s of at most $budget"
[ "$failed" -eq 0 ]
