#!/usr/bin/env bash
# Executes what nvcc makes of csrc/ for GPUs, on the CPU, instruction by instruction: lab/ptx_machine has the machine, and its README
# what it shows and what not. No GPU is needed; nvcc is fetched.
#   scripts/test-ptx.sh                 all: the machine's own tests, the kernels of the hot set in many orders with races looked for,
#                                       the tests of the CUDA device on the machine, some of them again with races looked for and with
#                                       stores that come late, coverage, the clock's references, and planted bugs
#   scripts/test-ptx.sh --machine       without the tests of the CUDA device, and what rests on them
#   scripts/test-ptx.sh --device        those alone. Coverage is of both: PTX_COVERAGE names an empty folder where one leaves its notes
#                                       for the other to sum up
#   scripts/test-ptx.sh ARGUMENTS...    those tests of the CUDA device alone that the arguments select
# CUDA_FEATURE is the feature to build with (default cuda-13000). PTX_NVCC names an nvcc to use.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
driver=$target/stand-in-ptx
export PTX_NVCC=${PTX_NVCC:-$(scripts/cuda-toolchain.sh)/bin/nvcc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

passed=0
failed=0
# count NAME COMMAND...: adds up what it says of tests, or counts as one; a command that fails is one failure at least.
count() {
  local name=$1 status=0 start=$SECONDS
  shift
  "$@" 2>&1 | tee "$work/log" || status=$?
  local good bad
  good=$(sed -nE 's/^(test result: [a-zA-Z]+\. )?([0-9]+) passed[;,] ([0-9]+) failed.*/\2/p' "$work/log" | paste -sd+)
  bad=$(sed -nE 's/^(test result: [a-zA-Z]+\. )?([0-9]+) passed[;,] ([0-9]+) failed.*/\3/p' "$work/log" | paste -sd+)
  good=$((${good:-0})) bad=$((${bad:-0}))
  [ $((good + bad)) -gt 0 ] || good=$((status == 0))
  [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
  passed=$((passed + good)) failed=$((failed + bad))
  [ "$bad" -eq 0 ] || tail -n 20 "$work/log" | sed "s/^/$name: /" >>"$work/failed"
  echo "=== $name: $good passed, $bad failed, $((SECONDS - start)) s"
}

nvcc_flags() { grep -vE '^(#|$)' build/nvcc.flags; }
kernels() {
  local flags
  mapfile -t flags < <(nvcc_flags)
  "$PTX_NVCC" -ptx -lineinfo -arch=compute_90 "${flags[@]}" -I csrc -o "$1" csrc/cuda/kernels.cu
}

# program CARGO_ARGUMENTS...: the test program that they build. Cargo names it only where it is not quiet; what it says is shown if
# it does not.
program() {
  local built name
  if ! built=$(CARGO_TERM_QUIET=false CARGO_TERM_COLOR=never cargo test "$@" --no-run 2>&1); then
    echo "$built" >&2
    return 1
  fi
  name=$(sed -nE 's/^ *Executable .*\((.*)\)$/\1/p' <<<"$built")
  [ -x "$name" ] || { echo "$built" >&2 && echo "there is no test program" >&2 && return 1; }
  echo "$name"
}
# The CUDA device's own tests, as scripts/test-cuda-stand-in.sh builds them: with a placeholder, for which the machine takes nvcc's
# kernels.
cuda_program() {
  FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc \
    program -p fast-allreduce --features "${CUDA_FEATURE:-cuda-13000}" --test cuda
}
# cuda SETTING ARGUMENTS...: with a setting of the machine, or `-`. More rounds of a test are no other instructions.
cuda() {
  local setting=PTX_MACHINE_$1=1
  shift
  env -u FAST_ALLREDUCE_TEST_FULL STAND_IN_PTX=1 PTX_MACHINE_MODULE="$ptx" "$setting" FAST_ALLREDUCE_REQUIRE=cuda,two-gpus,stand-in "$tests" "$@"
}

machine=1
device=1
case "${1:-}" in
  --machine) device= && shift ;;
  --device) machine= && shift ;;
esac
cargo build --release --package fast-allreduce-ptx-machine
STAND_IN_MACHINE=$target/release/libfast_allreduce_ptx_machine.a lab/stand_in_driver/build.sh "$driver"
export LD_LIBRARY_PATH=$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
tests=none
[ -z "$device" ] || tests=$(cuda_program)
ptx=$work/kernels.ptx
kernels "$ptx"
if [ $# -gt 0 ]; then
  cuda - "$@"
  exit
fi

coverage=${PTX_COVERAGE:-$work/coverage}
mkdir -p "$coverage"
machine() {
  FAST_ALLREDUCE_PTX=$ptx FAST_ALLREDUCE_REQUIRE=ptx cargo test --release --package fast-allreduce-ptx-machine
}
plants() {
  local program=none
  [ -z "$machine" ] || program=$(program --release --package fast-allreduce-ptx-machine --test kernels) || return
  PTX_MACHINE_COVERAGE='' PTX_MACHINE_MODULE=$ptx lab/ptx_machine/plants.sh "$PTX_NVCC" "$program" "$tests"
}
# All ranks in one launch; and again with races looked for, but for grids that change, since grids stay small. Messages around
# boundaries are between threads.
one_launch() {
  cuda - conformance::one_launch --skip boundary --skip every_small_count_of_collectives &&
    cuda RACE conformance::one_launch --skip boundary --skip grids_that_change
}
# All else; and some of it again with stores that come late. The sweep of failing driver calls, and how many blocks there is room
# for, are about the host's side. Between
# processes kernels do what they do between threads: some of the suite, of which each process compiles what it needs.
but_for_one_launch() {
  cuda - --skip conformance::one_launch --skip conformance::processes --skip injection_sweep --skip residency:: &&
    cuda - conformance::processes::every_type conformance::processes::all_collectives_at_random &&
    cuda LATE threads:: collectives:: graphs:: errors:: --skip conformance
}
# ended STATUS LOG: how a command in the background has ended, and what it has said.
ended() {
  cat "$2"
  return "$1"
}

export PTX_MACHINE_COVERAGE=$coverage
# What the clock predicts for published protocols, beside what was published: lab/gpu-model.md.
references() {
  "$PTX_NVCC" -ptx -lineinfo -arch=compute_90 -std=c++17 -O3 -o "$work/references.ptx" lab/ptx_machine/tests/references/references.cu
  "$target/release/ptx-clock" "$work/references.ptx" --algorithms sentinel_one_shot --ranks 2 --sizes 8K \
    --references "$work/references.ptx" --most-off 35
}
if [ -n "$machine" ]; then
  count "machine" machine
  count "clock" references
fi
if [ -n "$device" ]; then
  # Such a launch keeps one core busy.
  one_launch >"$work/one_launch" 2>&1 &
  in_background=$!
  count "CUDA device, but for that" but_for_one_launch
  status=0
  wait "$in_background" || status=$?
  count "CUDA device, all ranks in one launch" ended "$status" "$work/one_launch"
  "$target/release/ptx-coverage" "$ptx" "$coverage" lab/ptx_machine/coverage.list csrc >"$work/covered" 2>&1 &
  in_background=$!
fi
count "planted bugs" plants
if [ -n "$device" ]; then
  status=0
  wait "$in_background" || status=$?
  count "coverage" ended "$status" "$work/covered"
fi
[ "$failed" -eq 0 ] || cat "$work/failed"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
