#!/usr/bin/env python3
"""Measures the hierarchical allreduce between nodes of the test bed, whose delay and rate are set, and compares the
times with the model of docs/scaling.md. Prints a table, and fails if a time is more than 20 % from the model.

    lab/network/scaling.py NETWORK PROGRAM [NODES...]

NETWORK is the bed's program (examples/network), PROGRAM is fast-allreduce with the feature `mpi`; NODES is 2, 3 or 4,
by default all. scripts/scaling.sh builds them and runs it. Needs root and Open MPI.
"""

import json
import subprocess
import sys

# Of the switch: so slow and far that software and scheduling on a shared machine are small beside them. The queue is
# larger than what TCP sends, so that nothing is lost. With more nodes more links are busy, and one thread serves all.
DELAY_S, QUEUE_KIB = 0.020, 64 << 10
RATE_BITS = {2: 100e6, 3: 50e6, 4: 50e6}
RANKS = 2

# Of a frame's 1514 bytes, 1448 are data.
PAYLOAD = 1448 / 1514

# Constants of the engine: src/hierarchical/mpi.rs, and gathered.rs for small messages.
PIECE_BYTES, LATENCY_BYTES, SMALL_BYTES = 4 << 20, 16 << 10, 8192

MOST = 0.20

# Bytes that a node may have under way, in products of its link's rate and the time there and back.
WINDOWS = 2

# Sizes, the calls that are timed, and the runs, of which the fastest counts: ranks leave a barrier up to a delay apart,
# and a run of short calls may stay so.
SWEEPS = [(1 << 10, 256 << 10, 10, 3), (1 << 20, 4 << 20, 3, 1), (16 << 20, 64 << 20, 1, 1)]

# TCP's windows would be another model. They are open from the beginning, and so large that all of a node's connections
# together keep its link busy, and no larger: TCP repeats what waits in the queue for longer than 0.2 s.
RUN = """
for node in {nodes}; do
  on $node 'cd /proc/sys/net/ipv4 && echo 0 >tcp_slow_start_after_idle && echo 4096 16777216 67108864 >tcp_rmem &&
    echo 4096 16777216 67108864 >tcp_wmem &&
    ip route change 198.18.0.0/16 dev eth0 initcwnd {window} initrwnd 20000 cwnd lock {window}'
done
hostname launcher && exec mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 \
  --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 --bind-to none \
  --host {hosts} "$0" bench --nodes {count} -b {least} -e {most} -n {calls} -w {calls} --bind none --format json
"""


def step(nodes, size):
    """Returns the time in which each rank of a node sends `size` bytes to each other node, and receives as many."""
    return DELAY_S + RANKS * size / (RATE_BITS[nodes] / 8 * PAYLOAD)


def piece(nodes, size):
    is_one_shot = size * (nodes - 1) * (nodes - 2) / nodes <= LATENCY_BYTES
    return step(nodes, size) if is_one_shot else 2 * step(nodes, size / nodes)


def model(nodes, size):
    between = size if size <= SMALL_BYTES // nodes else size / RANKS
    whole, rest = divmod(between, PIECE_BYTES)
    return whole * piece(nodes, PIECE_BYTES) + (piece(nodes, rest) if rest else 0)


def measure(network, program, nodes):
    """Returns times by size, in seconds."""
    names = [f"node{node}" for node in range(nodes)]
    hosts = ",".join(f"{name}:{RANKS}" for name in names)
    times = {}
    for least, most, calls, runs in SWEEPS:
        script = RUN.format(
            nodes=" ".join(names), hosts=hosts, count=nodes, least=least, most=most, calls=calls,
            window=round(WINDOWS * 2 * DELAY_S * RATE_BITS[nodes] / 8 / 1448 / (RANKS * (nodes - 1))),
        )  # fmt: skip
        command = [
            network, "--nodes", str(nodes), "--delay", str(DELAY_S * 1e3), "--rate", str(RATE_BITS[nodes] / 1e6),
            "--queue", str(QUEUE_KIB), "--launcher", "unshare", "--uts", "bash", "-ec", script, program,
        ]  # fmt: skip
        for _ in range(runs):
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for row in json.loads(said)["results"]:
                time = row["out_of_place"]["time_us"] / 1e6
                times[row["size"]] = min(time, times.get(row["size"], time))
    return times


def main(network, program, *nodes):
    far = 0
    print("| S (bytes) | nodes | model (ms) | measured (ms) | measured / model |\n|---|---|---|---|---|")
    for count in map(int, nodes or RATE_BITS):
        times = measure(network, program, count)
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
