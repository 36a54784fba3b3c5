#!/usr/bin/env bash
# Tests everything that needs an MPI, with each of those given (openmpi, mpich): the conformance suite under mpirun
# with 2, 3 and 4 ranks, the MPI bootstrap, ranks on two nodes of the test bed (lab/network), which needs root, and the
# program. Expects Debian's names for them, such as mpicc.openmpi.
set -euo pipefail
cd "$(dirname "$0")/.."

targets=${CARGO_TARGET_DIR:-$PWD/target}
export FAST_ALLREDUCE_NVCC=none
# Open MPI refuses to run as root, as CI does, and to share cores among ranks, unless these settings allow it.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  echo "FAILED: $*"
  cat "$scratch/out" "$scratch/error" 2>/dev/null | tail -n 60
  exit 1
}

# Runs a command with a time limit, and keeps its output and status.
run() {
  status=0
  timeout --kill-after=5 300 "$@" >"$scratch/out" 2>"$scratch/error" </dev/null || status=$?
}

mpirun() {
  local ranks=$1
  shift
  case $mpi in
    openmpi) run mpirun.openmpi --oversubscribe -np "$ranks" "$@" ;;
    *) run "mpirun.$mpi" -np "$ranks" "$@" ;;
  esac
}

# Reads the path of the test program from Cargo's output.
executable() {
  cargo test --package fast-allreduce --features mpi --test mpi --no-run 2>&1 | tee "$scratch/build" >&2
  sed -n 's/^ *Executable .*(\(.*\))$/\1/p' "$scratch/build"
}

lines() {
  grep -c -- "$1" "$scratch/out" || true
}

# A file for each rank: the test harness writes lines in pieces, which mpirun would mix.
conformance() {
  local ranks
  for ranks in 2 3 4; do
    rm -rf "$scratch/ranks" && mkdir "$scratch/ranks"
    FAST_ALLREDUCE_TEST_SEED=$((RANDOM * 32768 + RANDOM)) \
      mpirun "$ranks" bash -c 'exec "$@" >"$0/$$"' "$scratch/ranks" \
      "$tests" --test-threads=1 --color never --nocapture mpirun::
    cat "$scratch/ranks/"* >>"$scratch/out"
    [ "$status" -eq 0 ] || fail "$mpi: the conformance suite between $ranks ranks, status $status"
    # Every rank ran every case.
    [ "$(lines 'test result: ok. 18 passed; 0 failed; 0 ignored')" -eq "$ranks" ] ||
      fail "$mpi: the conformance suite did not run on all of $ranks ranks"
    echo "$mpi: conformance suite between $ranks ranks passed"
  done
}

# Runs a part of tests/mpi, which all ranks must pass. If $3 is `unfinalised`, a rank may leave without finalising.
part() {
  local ranks=$1 name=$2
  mpirun "$ranks" "$tests" "$name"
  [ "$status" -eq 0 ] || [ "${3:-}" = unfinalised ] || fail "$mpi: $name between $ranks ranks, status $status"
  [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || fail "$mpi: $name between $ranks ranks hangs"
  [ "$(lines "$name: passed")" -ge "$ranks" ] || fail "$mpi: $name between $ranks ranks"
  echo "$mpi: $name between $ranks ranks passed"
}

bootstrap() {
  local ranks name
  for ranks in 2 3; do
    for name in gathers borrowed threads threads-in-turns late funneled finalized; do
      part "$ranks" "$name"
    done
  done
  part 3 late-and-large unfinalised
  part 3 nodes-of-1
  part 4 nodes-of-2
  part 6 nodes-of-2
  part 6 nodes-of-3
  part 3 nodes-of-3
  part 3 unequal-nodes
  part 3 late-node unfinalised
  part 2 different-calls
  part 4 different-calls
  part 4 different-calls-of-2
  part 6 different-calls-of-2
  part 2 nodes
  part 3 nodes
}

# Runs two ranks on each of two nodes of the test bed. mpirun is on neither: it has another name.
on_nodes() {
  # shellcheck disable=SC2016
  CARGO_TARGET_DIR=$targets run scripts/network.sh --launcher unshare --uts bash -c 'hostname launcher &&
    exec mpirun.openmpi --oversubscribe --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 \
      --mca oob_tcp_if_include eth0 --host node0:2,node1:2 "$@"' mpirun "$@"
}

# Not with MPICH: its UCX may hang in MPI_Finalize there, after all calls were right.
machines() {
  local contender environment
  [ "$mpi" = openmpi ] || return 0
  # The time limit is that of the run.
  CARGO_TARGET_DIR=$targets cargo build --quiet --package fast-allreduce-network --example network
  on_nodes "$tests" machines
  [ "$status" -eq 0 ] && [ "$(lines "machines: passed")" -eq 4 ] || fail "$mpi: two machines, status $status"
  echo "$mpi: two machines passed"
  # gloo is that of the torch of this python3.
  environment=$(scripts/torch-environment.sh)
  PATH=$environment/bin:$PATH on_nodes "$cli" compare --nodes 2 --vs mpi --vs gloo --vs naive -b 1000 -e 300K -f 300 \
    -n 20 --rounds 2
  for contender in fast-allreduce mpi gloo; do
    [ "$status" -eq 0 ] && [ "$(lines "^# $contender *: out of bounds values 0 OK")" -eq 1 ] ||
      fail "$mpi: $contender of compare on two machines, status $status"
  done
  [ "$(lines '^# naive left out: ')" -eq 1 ] || fail "$mpi: compare on two machines with ranks that share memory"
  on_nodes "$cli" bench -e 1K
  # Ranks on both may print it before they are killed.
  [ "$status" -ne 0 ] && grep -q 'a world of several nodes is not available' "$scratch/error" ||
    fail "$mpi: two machines without --nodes, status $status"
  mpirun 2 "$cli" bench --nodes 2 -e 1K
  refused "one machine with --nodes" "--nodes 2, but the ranks are on 1"
  echo "$mpi: compare on two machines passed"
}

# Checks that the last run ended with status 2, and that the program printed one error line, with this text.
refused() {
  [ "$status" -eq 2 ] || fail "$1: status $status and not 2"
  [ "$(grep -c '^error: ' "$scratch/error")" -eq 1 ] || fail "$1: not one line"
  grep -q -- "$2" "$scratch/error" || fail "$1: it does not say: $2"
  echo "$mpi: $1 passed"
}

program() {
  local ranks
  run "$cli" --version --verbose
  [ "$(lines 'built with MPI: \(Open MPI v\|MPICH\)')" -eq 1 ] || fail "$mpi: --version does not name the library"
  for ranks in 1 2 4; do
    mpirun "$ranks" "$cli" bench -e 64K
    [ "$status" -eq 0 ] || fail "$mpi: bench of $ranks ranks, status $status"
    [ "$(lines '# Out of bounds values : 0 OK')" -eq 1 ] ||
      fail "$mpi: bench of $ranks ranks prints no table, or several"
    [ "$(lines "^# .* ranks $ranks device")" -eq 1 ] || fail "$mpi: bench of $ranks ranks has another world"
  done
  mpirun 3 "$cli" bench --collective all_reduce_fused --hidden 4096 --rows 1,8 -d all
  [ "$status" -eq 0 ] && [ "$(lines '# fast-allreduce : out of bounds values 0 OK')" -eq 1 ] ||
    fail "$mpi: bench of all_reduce_fused"
  echo "$mpi: bench of 1, 2 and 4 ranks passed"
  mpirun 4 "$cli" compare --vs mpi -e 16K -n 20 --rounds 2
  [ "$status" -eq 0 ] && [ "$(lines '# mpi .*: out of bounds values 0 OK')" -eq 1 ] || fail "$mpi: compare of 4 ranks"
  # Not all types: in Open MPI 4.1.4 sums of 8 bits saturate, and MPICH 4.0.2 takes minima of unsigned numbers as
  # signed.
  mpirun 2 "$cli" compare --vs mpi -b 1000 -e 1000 -d f64 -o all -n 2 --rounds 1
  [ "$status" -eq 0 ] && [ "$(lines ' mpi  *-  ')" -eq 4 ] && [ "$(lines '# mpi left out of f64 avg')" -eq 1 ] ||
    fail "$mpi: compare of all operations"
  # A norm after MPI_Allreduce.
  mpirun 2 "$cli" compare --vs mpi --collective all_reduce_fused --hidden 4096 --rows 8 -d all -n 20 --rounds 2
  [ "$status" -eq 0 ] && [ "$(lines ' mpi  *-  ')" -eq 1 ] &&
    [ "$(lines '# mpi .*: out of bounds values 0 OK')" -eq 1 ] &&
    [ "$(lines '# mpi left out of all_reduce_fused bf16 sum')" -eq 1 ] || fail "$mpi: compare of all_reduce_fused"
  echo "$mpi: compare of 2 and 4 ranks passed"
  # Both libraries are checked against the reference: each collective, also in place.
  mpirun 3 "$cli" compare --vs mpi --collective all -r 1 -b 1000 -e 1000 -d f64 -n 2 --rounds 1
  [ "$status" -eq 0 ] && [ "$(lines '# mpi .*: out of bounds values 0 OK')" -eq 1 ] &&
    [ "$(lines ' mpi  *-  ')" -eq 12 ] ||
    fail "$mpi: compare of all collectives"
  echo "$mpi: compare of all collectives passed"
  mpirun 2 "$cli" bench -e 1K --ranks 3
  refused "other --ranks" "--ranks 3, but"
  mpirun 2 "$cli" bench -e 1K --set max_bytes=1
  refused "a setting out of range" "max_bytes = 1"
  mpirun 2 "$cli" bench -e 1K --set max_bytes=1024G
  refused "no memory" "cannot allocate"
  mpirun 1 "$cli" bench -e 1K : -np 1 "$cli" bench -e 2K
  refused "other arguments" "other arguments"
  # A rank that refuses its own arguments does not leave the others waiting in MPI_Init.
  mpirun 1 "$cli" bench -e 1K : -np 1 "$cli" bench -e nonsense
  refused "nonsense of one rank" "other arguments"
  mpirun 1 "$cli" bench -e 1K : -np 1 "$cli" bench -e 1K --ranks 3
  refused "other --ranks of one rank" "other arguments"
  mpirun 1 "$cli" bench -b 2K -e 1K : -np 1 "$cli" bench -e 1K
  refused "no sizes of one rank" "other arguments"
  mpirun 2 "$cli" bench -e nonsense
  refused "nonsense" "nonsense"
  # As started by srun without PMI: for MPI each rank is a world of one.
  SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 run "$cli" bench -e 1K
  refused "a launcher that MPI does not know" "made a world of 1"
  SLURM_NTASKS=2 SLURM_PROCID=0 run "$cli" bench --ranks 3 -e 1K
  [ "$status" -eq 0 ] && [ "$(lines '^# .* ranks 3 device')" -eq 1 ] || fail "$mpi: bench in a shell of an allocation"
  mpirun 2 env FAST_ALLREDUCE_NODE=a "$cli" bench -e 1K : -np 2 env FAST_ALLREDUCE_NODE=b "$cli" bench -e 1K
  refused "several nodes" "a world of several nodes is not available"
  renamed
  directory
  killed
}

# Ranks on one kernel with different host names, and ranks that cannot read their kernel's boot id.
renamed() {
  local hide='mount --bind /dev/null /proc/sys/kernel/random/boot_id && exec "$0" "$@"'
  mpirun 1 unshare --uts sh -c 'hostname another && exec "$0" "$@"' "$cli" bench -e 1K : -np 1 "$cli" bench -e 1K
  [ "$status" -eq 0 ] && [ "$(lines '# Out of bounds values : 0 OK')" -eq 1 ] || fail "$mpi: bench of two host names"
  # MPICH's UCX then prints "failed to get boot id", and on a busy machine it may hang at exit.
  [ "$mpi" = openmpi ] || return 0
  mpirun 1 unshare --mount sh -c "$hide" "$cli" bench -e 1K : -np 1 "$cli" bench -e 1K
  [ "$status" -eq 0 ] && [ "$(lines '# Out of bounds values : 0 OK')" -eq 1 ] || fail "$mpi: bench without a boot id"
  mpirun 1 unshare --mount --uts sh -c "hostname another && $hide" "$cli" bench -e 1K : -np 1 "$cli" bench -e 1K
  refused "two host names without a boot id" "a world of several nodes is not available"
}

# Ranks that exchange memory through a directory, as containers with separate networks do.
directory() {
  local one=$scratch/one other=$scratch/other
  mkdir -p "$one" "$other"
  mpirun 1 env FAST_ALLREDUCE_SOCKET_DIR="$one" "$cli" bench -e 1K : \
    -np 1 env FAST_ALLREDUCE_SOCKET_DIR="$other/../one" "$cli" bench -e 1K
  [ "$status" -eq 0 ] && [ "$(lines '# Out of bounds values : 0 OK')" -eq 1 ] || fail "$mpi: bench by a directory"
  [ -z "$(find "$one" "$other" -mindepth 1)" ] || fail "$mpi: bench by a directory leaves files"
  echo "$mpi: bench by a directory passed"
  mpirun 1 env FAST_ALLREDUCE_SOCKET_DIR="$one" "$cli" bench -e 1K : \
    -np 1 env FAST_ALLREDUCE_SOCKET_DIR="$other" "$cli" bench -e 1K
  refused "two directories" "FAST_ALLREDUCE_SOCKET_DIR of device"
  mpirun 1 env FAST_ALLREDUCE_SOCKET_DIR="$one" "$cli" bench -e 1K : -np 1 "$cli" bench -e 1K
  refused "a directory of one rank" "FAST_ALLREDUCE_SOCKET_DIR of device"
  mpirun 2 env FAST_ALLREDUCE_SOCKET_DIR="$one/none" "$cli" bench -e 1K
  refused "no directory" "an existing directory"
  [ "$mpi" = mpich ] || return 0
  # Its ranks reach their launcher through inherited descriptors, and so may be in any network.
  mpirun 1 env FAST_ALLREDUCE_SOCKET_DIR="$one" unshare --net "$cli" bench -e 1K : \
    -np 1 env FAST_ALLREDUCE_SOCKET_DIR="$one" unshare --net "$cli" bench -e 1K
  [ "$status" -eq 0 ] && [ "$(lines '# Out of bounds values : 0 OK')" -eq 1 ] || fail "$mpi: bench in two networks"
  mpirun 1 unshare --net "$cli" bench -e 1K : -np 1 unshare --net "$cli" bench -e 1K
  refused "two networks without a directory" "a world of several nodes is not available"
}

# A rank that is killed or stopped ends the run.
killed() {
  local signal started victim
  for signal in KILL STOP; do
    started=$SECONDS
    mpirun 2 "$cli" bench -b 64M -e 64M -n 100000 --timeout 2 &
    for _ in $(seq 100); do
      victim=$(pgrep -n -f "^$cli bench -b 64M" || true)
      [ -n "$victim" ] && grep -q memfd:fast-allreduce "/proc/$victim/maps" 2>/dev/null && break
      sleep 0.1
    done
    sleep 0.5
    kill -s "$signal" "$victim" || fail "$mpi: no rank to send $signal"
    wait $! || true
    [ $((SECONDS - started)) -lt 90 ] || fail "$mpi: a rank that gets $signal leaves the others hanging"
    # The launcher does not wait until the ranks that it kills have ended.
    for _ in $(seq 300); do
      pgrep -f "^$cli bench -b 64M" >/dev/null || break
      sleep 0.1
    done
    ! pgrep -f "^$cli bench -b 64M" >/dev/null || fail "$mpi: ranks are left after $signal"
    echo "$mpi: a rank that gets $signal passed"
  done
}

for mpi in "${@:-openmpi mpich}"; do
  for mpi in $mpi; do
    export CARGO_TARGET_DIR=$targets/mpi/$mpi MPICC=mpicc.$mpi
    tests=$(executable)
    cargo build --package fast-allreduce-cli --no-default-features --features mpi
    cli=$CARGO_TARGET_DIR/debug/fast-allreduce
    conformance
    bootstrap
    machines
    program
  done
done
