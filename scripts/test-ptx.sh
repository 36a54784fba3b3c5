#!/usr/bin/env bash
# Executes the PTX that nvcc generates from csrc/ on the CPU, instruction by instruction. lab/ptx_machine has the
# machine; its README says what that shows and what it does not. Needs no GPU; downloads nvcc.
#   scripts/test-ptx.sh                 everything: the machine's own tests, the kernels of the hot set in many
#                                       schedules with race detection, the tests of the CUDA device on the machine
#                                       (some again with race detection and with late stores), coverage, the clock's
#                                       references, probes of gpu-check, planted bugs
#                                       (these and the references only with FAST_ALLREDUCE_TEST_FULL=1)
#   scripts/test-ptx.sh --machine       everything except the tests of the CUDA device and what needs them
#   scripts/test-ptx.sh --device        only those tests
#   scripts/test-ptx.sh --end           coverage, and the probes of gpu-check, beside which nothing else may run. For
#                                       the three parts PTX_COVERAGE names an empty folder, in which the others leave
#                                       their records for this one, and beside which the first leaves the kernels' PTX
#   scripts/test-ptx.sh ARGUMENTS...    only the tests of the CUDA device that ARGUMENTS select
# CUDA_FEATURE is the feature to build with (default cuda-13000). PTX_NVCC selects another nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
driver=$target/stand-in-ptx
export PTX_NVCC=${PTX_NVCC:-$(scripts/cuda-toolchain.sh)/bin/nvcc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

passed=0
failed=0
# count NAME COMMAND...: adds the numbers of tests that the command prints, or counts one; a failing command is one
# failure.
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
  # Tests that expect a panic may print one, too, so that the end of the log is shown in any case.
  [ "$bad" -eq 0 ] || { sed -n "/panicked/{p;n;p}" "$work/log"; tail -n 20 "$work/log"; } |
    sed "s/^/$name: /" >>"$work/failed"
  echo "=== $name: $good passed, $bad failed, $((SECONDS - start)) s"
}

nvcc_flags() { grep -vE '^(#|$)' build/nvcc.flags; }
kernels() {
  local flags
  mapfile -t flags < <(nvcc_flags)
  "$PTX_NVCC" -ptx -lineinfo -arch=compute_90 "${flags[@]}" -I csrc -o "$1" csrc/cuda/kernels.cu
}

# program CARGO_ARGUMENTS...: prints the path of the test program that they build. Cargo prints it only without
# --quiet; its output is shown if there is no path.
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
# The tests of the CUDA device, built like scripts/test-cuda-stand-in.sh with placeholder kernels; the machine
# substitutes nvcc's kernels.
cuda_program() {
  FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc \
    program -p fast-allreduce --features "${CUDA_FEATURE:-cuda-13000}" --test cuda
}
# cuda SETTING ARGUMENTS...: with a setting of the machine, or `-` for none. Not in full: more rounds execute no new
# code.
cuda() {
  local setting=PTX_MACHINE_$1=1
  shift
  env -u FAST_ALLREDUCE_TEST_FULL STAND_IN_PTX=1 PTX_MACHINE_MODULE="$ptx" "$setting" \
    FAST_ALLREDUCE_REQUIRE=cuda,two-gpus,stand-in,selected "$tests" "$@"
}

full=
[ "${FAST_ALLREDUCE_TEST_FULL:-}" != 1 ] || full=1
machine=1
device=1
end=1
case "${1:-}" in
  --machine) device='' end='' && shift ;;
  --device) machine='' end='' && shift ;;
  --end) machine='' device='' && shift ;;
esac
cargo build --release --package fast-allreduce-ptx-machine
STAND_IN_MACHINE=$target/release/libfast_allreduce_ptx_machine.a lab/stand_in_driver/build.sh "$driver"
export LD_LIBRARY_PATH=$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
tests=none
[ -z "$device" ] || tests=$(cuda_program)
coverage=$(realpath -m "${PTX_COVERAGE:-$work/coverage}")
mkdir -p "$coverage"
ptx=$(dirname "$coverage")/kernels.ptx
if [ ! -e "$ptx" ]; then
  kernels "$work/compiled.ptx"
  mv "$work/compiled.ptx" "$ptx"
fi
if [ $# -gt 0 ]; then
  cuda - "$@"
  exit
fi

machine() {
  FAST_ALLREDUCE_PTX=$ptx FAST_ALLREDUCE_REQUIRE=ptx cargo test --release --package fast-allreduce-ptx-machine
}
plants() {
  local program=none
  [ -z "$machine" ] || program=$(program --release --package fast-allreduce-ptx-machine --test kernels) || return
  PTX_MACHINE_COVERAGE='' PTX_MACHINE_MODULE=$ptx lab/ptx_machine/plants.sh "$PTX_NVCC" "$program" "$tests"
}
# All ranks in one launch, with race detection, except for grids that change, as grids stay small there. Messages around
# boundaries are tested between threads.
one_launch() {
  cuda RACE conformance::one_launch --skip boundary --skip grids_that_change &&
    cuda - conformance::one_launch::grids_that_change
}
# Between threads, some of the suite again with late stores. Left out: failing driver calls, the residency of blocks and
# what processes cannot give back, which concern the host side, processes that suspend, as threads do, and the two
# longest parts of the suite, which execute the same instructions as in one launch.
between_threads() {
  cuda - --skip conformance::one_launch --skip conformance::processes --skip injection_sweep --skip residency:: \
    --skip a_driver_call_that_fails_in_a_ --skip what_cannot_be_given_back \
    --skip processes_return_to --skip machines_return_to \
    --skip a_resumed_world_grows --skip a_suspended_process_is_checkpointed \
    --skip threads::every_small_count --skip threads::every_placement
}
# The rest uses one core at a time. Between processes, where kernels behave as between threads, only part of the suite
# runs, since each process compiles the kernels that it uses.
other_arrangements() {
  one_launch &&
    cuda - conformance::processes::every_type conformance::processes::all_collectives_at_random &&
    cuda LATE threads:: collectives:: graphs:: errors:: --skip conformance
}
# nvcc's code of the probes that `gpu-check` runs between GPUs and beside a kernel.
gpu_check() {
  local flags
  mapfile -t flags < <(nvcc_flags)
  "$PTX_NVCC" -ptx -arch=compute_90 "${flags[@]}" -I csrc -o "$work/costs.ptx" csrc/probes/costs.cu || return
  # One module that takes the place of all.
  { cat "$ptx" && grep -vE '^\.(version|target|address_size)' "$work/costs.ptx"; } >"$work/all.ptx" || return
  FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc cargo build --package fast-allreduce-cli --features cuda || return
  STAND_IN_PTX=1 PTX_MACHINE_MODULE=$work/all.ptx PTX_MACHINE_COVERAGE='' \
    "$target/debug/fast-allreduce" gpu-check --small --step peers --step beside-a-kernel --step run-ahead
}
# ended STATUS LOG: reports how a background command ended, and prints its output.
ended() {
  cat "$2"
  return "$1"
}

export PTX_MACHINE_COVERAGE=$coverage
# The clock's predictions for published protocols next to the published figures: lab/gpu-model.md.
references() {
  "$PTX_NVCC" -ptx -lineinfo -arch=compute_90 -std=c++17 -O3 -o "$work/references.ptx" \
    lab/ptx_machine/tests/references/references.cu
  "$target/release/ptx-clock" "$work/references.ptx" --algorithms sentinel_one_shot --ranks 2 --sizes 8K \
    --references "$work/references.ptx" --most-off 35
}
# Calls that ptx-clock exports, as replay.py runs them on a GPU: a launch for each rank, branches of a graph, one launch
# for all ranks. The machine takes the GPU's place. A wrong result has to be found.
replay() {
  local calls=$work/calls how
  mkdir "$calls" && ln -s "$ptx" "$calls/kernels.ptx" &&
    lab/ptx_machine/join_ranks.py "$ptx" "$calls/kernels.joined.ptx" &&
    "$target/release/ptx-clock" "$ptx" --ranks 2 --sizes 1K --algorithms one_shot_push,two_shot_push --one-gpu \
      --programmatic --export "$calls" || return
  export STAND_IN_PTX=1 PTX_MACHINE_COVERAGE=''
  # The last one repeats an option: a launch for each rank has none of its own.
  for how in --joined --branches --limit=120; do
    lab/ptx_machine/replay.py --calls=2 --repeats=1 --limit=120 "$how" "$calls" || return
  done
  sed -i 's/"expected":\[\(\[[0-9]*,[0-9]*,"\)../"expected":[\1ff/' "$calls/one_shot_push.2.1K.pdl.json"
  lab/ptx_machine/replay.py --calls=2 --repeats=1 --limit=120 "$calls" >"$work/wrong"
  grep -q '^one_shot_push.2.1K.pdl: the result is wrong' "$work/wrong"
}
if [ -n "$machine" ]; then
  count "machine" machine
  [ -z "$full" ] || count "clock" references
  count "replay" replay
fi
if [ -n "$device" ]; then
  other_arrangements >"$work/other" 2>&1 &
  in_background=$!
  count "CUDA device, between threads" between_threads
  status=0
  wait "$in_background" || status=$?
  count "CUDA device, other arrangements" ended "$status" "$work/other"
fi
if [ -n "$end" ]; then
  count "coverage" "$target/release/ptx-coverage" "$ptx" "$coverage" lab/ptx_machine/coverage.list csrc
  # Not beside the tests: it refuses constants from a clock that changes.
  count "gpu-check" gpu_check
fi
if [ -z "$full" ]; then
  echo "planted bugs and the clock's references: left out; with FAST_ALLREDUCE_TEST_FULL=1"
elif [ -n "$machine$device" ]; then
  count "planted bugs" plants
fi
[ "$failed" -eq 0 ] || cat "$work/failed"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
