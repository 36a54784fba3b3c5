#!/usr/bin/env bash
# Tests the Python package with torch on the GPU of this machine, which needs neither Rust nor the CUDA toolkit.
#
#   scripts/gpu-python.sh WHEEL TESTS OUT_DIR
#
# WHEEL has kernels for the GPU, and TESTS is python/tests or a copy of it. `python3` has torch with CUDA, numpy and
# pytest with pytest-timeout; the wheel is installed into a temporary folder. The output of each part is
# OUT_DIR/NAME.log, and the summary is OUT_DIR/summary.log. The script ends within BUDGET seconds (145 unless set),
# whatever hangs. `lost`, `compiled` and `others` run at the same time: most of theirs is the import of torch.
set -u

if [ $# -ne 3 ]; then
  echo "usage: $0 WHEEL TESTS OUT_DIR" >&2
  exit 2
fi
wheel=$1
tests=$(cd "$2" && pwd) || exit 2
mkdir -p "$3" || exit 2
out=$(cd "$3" && pwd)
budget=${BUDGET:-145}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$site:$tests:$tests/gpu PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 CUDA_DEVICE_MAX_CONNECTIONS=32
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$wheel" || exit
cd "$tests" || exit
: >"$out/summary.log"

# part <name> <seconds> <command...>
part() {
  local name=$1 seconds=$2 start=$SECONDS status
  shift 2
  [ "$seconds" -le $((budget - SECONDS)) ] || seconds=$((budget - SECONDS))
  [ "$seconds" -ge 1 ] || { echo "$name: FAILED, the time is over" >>"$out/summary.log" && return; }
  timeout --signal=INT --kill-after=5 "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null
  status=$?
  {
    echo "$name: exit status $status after $((SECONDS - start)) of at most $seconds s"
    grep -E -e '^(FAILED|ERROR|SKIPPED|[0-9]+ (passed|failed|ranks)|.* in [0-9.]+s)' \
      -e 'CUDA graphs were|^\(.returned|notices' "$out/$name.log" | cut -c 1-300
    # The test that was running.
    [ "$status" -eq 0 ] || grep '::' "$out/$name.log" | tail -n 1
  } >>"$out/summary.log"
}

suite() {
  local name=$1 seconds=$2
  shift 2
  part "$name" "$seconds" python3 -m pytest --rootdir="$tests" --confcutdir="$tests" -p no:cacheprovider --timeout=55 \
    -v -rfEsP "$@"
}

processes=gpu/test_processes.py
part facts 15 python3 -c 'import torch, fast_allreduce as fa
print(torch.__version__, torch.cuda.get_device_name(), fa.build_facts())'
suite threads 45 gpu/test_threads.py
suite collectives 35 $processes -k test_the_suite
suite compiled 60 $processes -k test_compiled &
suite lost 60 $processes -k test_a_rank &
suite others 60 $processes -k 'not test_the_suite and not test_compiled and not test_a_rank'
wait
part timings 20 python3 gpu/timings.py 2 4 8
cat "$out/facts.log" "$out/summary.log"
! grep -qE 'FAILED|exit status [1-9]' "$out/summary.log"
