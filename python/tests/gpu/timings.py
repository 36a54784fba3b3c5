#!/usr/bin/env python3
"""Prints the time of allreduces of bf16 in microseconds: ranks are threads that share a GPU, whose links it does not
measure. Calls are launched from graphs of 50 calls, or one by one.

    python timings.py [RANKS...]
"""

import functools
import statistics
import sys
import threading

import torch
from worlds import DEVICE, World, captured

CALLS, ROUNDS = 50, 7
SIZES = [8 << 10, 64 << 10, 512 << 10, 1 << 20, 8 << 20]


def timed(world, function):
    """Returns the median time of a call in microseconds: the longest of the ranks' times, between events."""
    met = threading.Barrier(world.nranks)

    def of_rank(rank):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(ROUNDS):
            met.wait()
            begin.record()
            function(rank)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
        return times

    return statistics.median(map(max, zip(*world.each(of_rank))))


def measure(nranks):
    with World(nranks) as world:
        for size in SIZES:
            made = world.each(
                lambda _: torch.ones(2, size // 2, dtype=torch.bfloat16, device=DEVICE).unbind()  # noqa: B023
            )

            def calls(rank):
                for _ in range(CALLS):
                    world.communicators[rank].allreduce(*made[rank])  # noqa: B023

            world.each(calls)
            torch.cuda.synchronize()
            launches = timed(world, calls)
            replays = [captured(world.streams[rank], functools.partial(calls, rank)) for rank in range(nranks)]
            world.each(lambda rank: replays[rank]())  # noqa: B023
            torch.cuda.synchronize()
            graph = timed(world, lambda rank: replays[rank]())  # noqa: B023
            for communicator in world.communicators:
                communicator.check()
            plan = world.communicators[0].plan(size // 2, "bf16")[0]
            found = f"{graph:8.2f} us in graphs, {launches:8.2f} us by launches, {plan}"
            print(f"{nranks} ranks, {size >> 10:5} KiB: {found}", flush=True)


for given in sys.argv[1:] or ["2", "4"]:
    measure(int(given))
