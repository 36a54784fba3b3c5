"""torch.distributed's backend `fast_allreduce` over machines, against gloo among all ranks, in turns.

Of f32, in place; every element is checked. A ratio is that of medians; the time of a turn is that of the slowest rank.
Start it by torchrun; benches/machines.sh runs it on two nodes of the test bed.
"""

import datetime
import os
import statistics
import time

import fast_allreduce.distributed  # noqa: F401
import torch
import torch.distributed as dist

TURNS, LARGEST = 21, 16 << 20

torch.set_num_threads(1)
dist.init_process_group("fast_allreduce", timeout=datetime.timedelta(seconds=60))
flat = dist.new_group(backend="gloo")
rank, nranks = dist.get_rank(), dist.get_world_size()
size = 1 << 10
while size <= LARGEST:
    pattern = torch.arange(size // 4, dtype=torch.float32) % 7
    expected = nranks * pattern + nranks * (nranks - 1) / 2
    calls = 40 if size < 1 << 16 else 10 if size < 1 << 20 else 3
    times = {None: [], flat: []}
    for turn in range(1 + TURNS):
        for group, taken in times.items():
            tensors = [pattern + rank for _ in range(calls)]
            dist.barrier(group=flat)
            start = time.perf_counter()
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
            own = torch.tensor([(time.perf_counter() - start) / calls])
            dist.all_reduce(own, dist.ReduceOp.MAX, group=flat)
            assert all(torch.equal(tensor, expected) for tensor in tensors)
            if turn:
                taken.append(1e6 * own.item())
    ours, theirs = statistics.median(times[None]), statistics.median(times[flat])
    if rank == 0:
        both = f"hierarchical over gloo {ours:9.1f} us  gloo of all ranks {theirs:9.1f} us"
        print(f"{size:9} B  {both}  ratio {theirs / ours:5.2f}", flush=True)
    size *= 4
dist.barrier(group=flat)
os._exit(0)
