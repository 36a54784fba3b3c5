#!/usr/bin/env bash
# Proves and measures fast-allreduce on the GPU of this machine, with binaries that were built elsewhere.
#
#   scripts/gpu-check.sh BINARY OUT_DIR [TEST_BINARY...]
#
# BINARY is `fast-allreduce`; each TEST_BINARY is a test of the CUDA device, as `cargo test --no-run` makes it. The report is
# OUT_DIR/gpu-check.json and OUT_DIR/gpu-check.md; what other programs say is beside it. Needs bash, coreutils and the driver;
# compute-sanitizer is used where it is found. It ends within BUDGET seconds (540 unless set), whatever hangs.
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

# What is carried to a machine over a slow line.
MOST_BYTES=$((60 << 20))
# Between the signal to end and the one that ends, and for the report.
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

# The sum of what is carried, to standard output.
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
# The program trims its steps to its part; should it hang itself, its report up to then is there.
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
