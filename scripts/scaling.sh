#!/usr/bin/env bash
# Compares the hierarchical allreduce between nodes of the test bed with the model of docs/scaling.md: lab/network/
# scaling.py, in the release build. Some minutes. Needs root and Open MPI.
#
#   scripts/scaling.sh [NODES...]      2, 3 or 4; by default all
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --package fast-allreduce-network --example network
MPICC=mpicc.openmpi cargo build --quiet --release --target-dir "$target/mpi/openmpi" --package fast-allreduce-cli \
  --no-default-features --features mpi
lab/network/scaling.py "$target/debug/examples/network" "$target/mpi/openmpi/release/fast-allreduce" "$@"
