"""A rank that measures Gloo through torch.distributed, which reduces in place only. rank.hpp describes the protocol."""

import os
import socket
import statistics
import sys
import time

rank, ranks = int(os.environ["PEERS_RANK"]), int(os.environ["PEERS_RANKS"])
cores = [int(core) for core in os.environ["PEERS_CORES"].split(",")]
# Before the import, so that the backend's threads inherit the core.
os.sched_setaffinity(0, {cores[rank % len(cores)]})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# As in rank.hpp.
SCALE, GROWTH, PERIOD = -110, 200, 1021
DOUBLINGS = ranks.bit_length() - 1
CHUNK = GROWTH // DOUBLINGS - 10


def values(of: int) -> torch.Tensor:
    return ((torch.arange(PERIOD) * 13 + of * 7) % PERIOD + 1).to(torch.float32) * 2.0**SCALE


def repeated(period: torch.Tensor, count: int) -> torch.Tensor:
    return period.repeat(count // PERIOD + 1)[:count]


def measure(count: int, calls: int) -> str:
    group = dist.group.WORLD
    data = torch.empty(count, dtype=torch.float32)
    mine = repeated(values(rank), count)
    total = repeated(sum(values(of) for of in range(ranks)), count)
    times, wrong = [], 0
    while len(times) < calls:
        timed = min(calls - len(times), CHUNK)
        untimed = min(max(timed // 2, 1), 10)
        data.copy_(mine)
        for _ in range(untimed):
            group.allreduce([data]).wait()
        before = time.perf_counter_ns()
        for _ in range(timed):
            group.allreduce([data]).wait()
            now = time.perf_counter_ns()
            times.append(now - before)
            before = now
        # f64, because an f32 cannot hold the factor; it can hold the products.
        expected = (total.double() * 2.0 ** (DOUBLINGS * (untimed + timed - 1))).float()
        wrong += int((data != expected).sum())
    return f"took {statistics.median_high(times)} {statistics.fmean(times)} {wrong}"


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["PEERS_SOCKET"])
    stream = connection.makefile("rw")
    print(f"rank {rank}", file=stream, flush=True)
    torch.set_num_threads(1)
    store = os.environ["PEERS_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    print(f"ready Gloo of torch {torch.__version__}", file=stream, flush=True)
    for line in stream:
        word, size, calls, where = line.split()
        if word != "measure" or where != "in":
            sys.exit(f"not understood: {line}")
        print(measure(int(size) // 4, int(calls)), file=stream, flush=True)


main()
