#!/usr/bin/env bash
# Runs a command beside several nodes (network namespaces) of this machine, and ends them with it. Needs root. For
# example, an interactive shell in which "on node1 ip address" shows the addresses of the second node:
#
#   scripts/network.sh --nodes 2 --delay 5 --loss 1 --rate 100 bash
#
# "--launcher mpirun" with "--mca plm_rsh_agent" (Open MPI) or "-launcher-exec" (MPICH) set to "$ON" starts ranks on the
# nodes. --help lists all options; lab/README.md says what the nodes are.
set -euo pipefail
exec cargo run --quiet --manifest-path "$(dirname "$0")/../Cargo.toml" -p fast-allreduce-network \
  --example network -- "$@"
