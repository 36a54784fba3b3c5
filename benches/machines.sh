#!/usr/bin/env bash
# Runs benches/machines.c with Open MPI and benches/machines.py with gloo, each as two ranks on each of two nodes of the
# test bed (lab/README.md). Needs root, Open MPI, and a Python with torch and this package.
#
#   benches/machines.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
capi/install.sh --prefix "$scratch" >"$scratch/log" 2>&1 || { tail "$scratch/log" && exit 1; }
# shellcheck disable=SC2046
mpicc.openmpi -O2 -DOMPI_SKIP_MPICXX benches/machines.c -o "$scratch/machines" \
  $(PKG_CONFIG_PATH=$scratch/lib/pkgconfig pkg-config --cflags --libs fast_allreduce)
# Each node has as many ranks as it may have, but all share this machine's cores: ranks that wait have to give way.
# shellcheck disable=SC2016
scripts/network.sh --launcher unshare --uts bash -c 'hostname launcher && exec mpirun.openmpi --allow-run-as-root \
  --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 \
  --bind-to none -x LD_LIBRARY_PATH="$1" --host node0:2,node1:2 "$0"' "$scratch/machines" "$scratch/lib"
# shellcheck disable=SC2016
scripts/network.sh bash -c 'for rank in 0 1 2 3; do
    on "node$((rank / 2))" env GLOO_SOCKET_IFNAME=eth0 MASTER_ADDR=198.18.0.1 MASTER_PORT=29500 WORLD_SIZE=4 \
      RANK="$rank" OMP_NUM_THREADS=1 "$0" benches/machines.py &
  done; wait' "${1:-python3}"
