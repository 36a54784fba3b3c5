#!/usr/bin/env bash
# Compares on two nodes of the test bed (lab/README.md), with two ranks on each: the program's hierarchical allreduce
# with MPI and gloo among all ranks, then benches/machines.py. Needs root, Open MPI, and a Python with torch; for the
# latter also this package.
#
#   benches/machines.sh [PYTHON [OPTION OF compare...]]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
shift $(($# > 0))
target=${CARGO_TARGET_DIR:-target}
MPICC=mpicc.openmpi cargo build --quiet --release --target-dir "$target/mpi/openmpi" --package fast-allreduce-cli \
  --no-default-features --features mpi
# Each node has as many ranks as it may have, but all share this machine's cores: ranks that wait have to give way.
PATH=$(dirname "$(command -v "$python")"):$PATH
# shellcheck disable=SC2016
scripts/network.sh --launcher unshare --uts bash -c 'hostname launcher && exec \
  mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 \
    --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 --bind-to none --host node0:2,node1:2 \
    "$0" compare --nodes 2 --vs mpi --vs gloo --bind none "$@"' \
  "$target/mpi/openmpi/release/fast-allreduce" --rounds 21 "$@"
if ! "$python" -c 'import fast_allreduce' 2>/dev/null; then
  echo "$python has no fast_allreduce: without benches/machines.py" >&2
  exit
fi
# shellcheck disable=SC2016
scripts/network.sh bash -c 'for rank in 0 1 2 3; do
    on "node$((rank / 2))" env GLOO_SOCKET_IFNAME=eth0 MASTER_ADDR=198.18.0.1 MASTER_PORT=29500 WORLD_SIZE=4 \
      RANK="$rank" OMP_NUM_THREADS=1 "$0" benches/machines.py &
  done; wait' "$python"
