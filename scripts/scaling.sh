#!/usr/bin/env bash
# Compares the hierarchical allreduce between nodes of the test bed with the model of docs/scaling.md: lab/network/
# scaling.py, in the release build. Some minutes. Needs root and Open MPI.
#
#   scripts/scaling.sh [NODES...]      2, 3 or 4; by default all
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
capi/install.sh --prefix "$scratch" >"$scratch/log" 2>&1 || { tail "$scratch/log" && exit 1; }
# shellcheck disable=SC2046
mpicc.openmpi -O2 -DOMPI_SKIP_MPICXX benches/machines.c -o "$scratch/machines" \
  $(PKG_CONFIG_PATH=$scratch/lib/pkgconfig pkg-config --cflags --libs fast_allreduce)
cargo build --quiet --package fast-allreduce-network --example network
lab/network/scaling.py "${CARGO_TARGET_DIR:-target}/debug/examples/network" "$scratch/machines" "$scratch/lib" "$@"
