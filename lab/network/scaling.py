#!/usr/bin/env python3
"""Measures the hierarchical allreduce between nodes of the test bed, whose delay and rate are set, and compares the
times with the model of docs/scaling.md. Prints a table, and fails if a time is more than 20 % from the model.

    lab/network/scaling.py NETWORK MACHINES LIBRARIES [NODES...]

NETWORK is the bed's program (examples/network), MACHINES that of benches/machines.c, LIBRARIES the folder of the C
library; NODES is 2, 3 or 4, by default all. scripts/scaling.sh builds them and runs it. Needs root and Open MPI.
"""

import subprocess
import sys

# Of the switch: so slow and far that software and scheduling on a shared machine are small beside them. The queue is
# larger than what TCP sends, so that nothing is lost.
DELAY_S, RATE_BITS, QUEUE_KIB = 0.020, 100e6, 64 << 10
RANKS = 2

# Of a frame's 1514 bytes, 1448 are data.
BANDWIDTH = RATE_BITS / 8 * 1448 / 1514

# MPI sends larger messages in two parts, and the second when the receiver has answered the first.
EAGER_BYTES = 64 << 10

# The message in which nodes compare calls, which carries those of small calls (src/hierarchical/gathered.rs).
CALL_BYTES, DATA_BYTES = 16, 8192

MOST = 0.20

# A ring, whatever MPI would choose. A slow start after each pause would be another model.
RUN = """
for node in {nodes}; do on $node sh -c 'echo 0 >/proc/sys/net/ipv4/tcp_slow_start_after_idle'; done
hostname launcher && exec mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 \
  --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 --mca btl_tcp_eager_limit {eager} \
  --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4 --bind-to none \
  -x LD_LIBRARY_PATH="$1" --host {hosts} "$0" alone
"""


def ring(nodes, size):
    """Returns the time in which each of the ranks of all nodes reduces `size` bytes with those of the other nodes."""
    delays = 3 if size / nodes > EAGER_BYTES else 1
    return 2 * (nodes - 1) * (delays * DELAY_S + RANKS * size / nodes / BANDWIDTH)


def model(nodes, size):
    compared = ring(nodes, (CALL_BYTES + DATA_BYTES // nodes) * nodes)
    return compared if size <= DATA_BYTES // nodes else compared + ring(nodes, size / RANKS)


def measure(network, machines, libraries, nodes):
    """Returns times by size, in seconds."""
    names = [f"node{node}" for node in range(nodes)]
    hosts = ",".join(f"{name}:{RANKS}" for name in names)
    command = [
        network, "--nodes", str(nodes), "--delay", str(DELAY_S * 1e3), "--rate", str(RATE_BITS / 1e6),
        "--queue", str(QUEUE_KIB), "--launcher", "unshare", "--uts", "bash", "-ec",
        RUN.format(nodes=" ".join(names), hosts=hosts, eager=EAGER_BYTES), machines, libraries,
    ]  # fmt: skip
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return {int(size): float(time) / 1e6 for size, time in map(str.split, lines)}


def main(network, machines, libraries, *nodes):
    far = 0
    print("| S (bytes) | nodes | model (ms) | measured (ms) | measured / model |\n|---|---|---|---|---|")
    for count in map(int, nodes or (2, 3, 4)):
        times = measure(network, machines, libraries, count)
        if len(times) != 9:
            sys.exit(f"{len(times)} sizes were measured, not 9")
        for size, time in times.items():
            expected = model(count, size)
            far += abs(time / expected - 1) > MOST
            name = f"{size >> 20} Mi" if size >= 1 << 20 else f"{size >> 10} Ki"
            row = f"| {name} | {count} | {expected * 1e3:.0f} | {time * 1e3:.0f} | {time / expected:.2f} |"
            print(row, flush=True)
    if far:
        sys.exit(f"{far} times are more than {MOST:.0%} from the model")


main(*sys.argv[1:])
