"""Times allreduce from Python between processes: python -m fast_allreduce.bench [--ranks 2] [--max-bytes 16M]
[--decode].

If torch is installed, the same tensors also go through torch.distributed, with this backend and with gloo, alternating
within one run. Every result is checked. `--decode` times a decoding step of a tensor-parallel transformer and an MLP
(random weights) through DTensor, with either backend. With `--mpi` the ranks are mpi4py's, and its Allreduce
alternates:

    mpirun -n 2 python -m fast_allreduce.bench --mpi
"""

import argparse
import array
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import fast_allreduce as fa

ROUNDS = 5


def size(text):
    """Parses a number of bytes, such as 16M."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def timed(calls, most):
    """Returns the median time in microseconds of each call. Calls alternate, `most` times each."""
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(3):
                call()
            for _ in range(max(3, most // ROUNDS)):
                before = time.perf_counter_ns()
                call()
                times[name].append((time.perf_counter_ns() - before) / 1000)
    return {name: statistics.median(of) for name, of in times.items()}


def pinned(rank):
    """Binds this process to a core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def table(communicator, arguments, head, columns, ratio, calls_of):
    """Prints a line of times for each size.

    `calls_of(count)` checks the calls for `count` f32 elements and returns them by name. `ratio` names two of them.
    """
    if communicator.rank == 0:
        print(
            f"# fast_allreduce {fa.__version__}, {communicator.nranks} ranks, f32, medians in us of {ROUNDS} "
            f"alternating rounds; {head}"
        )
        print(f"{'bytes':>10} {''.join(f'{name:>14}' for name in columns)}{'/'.join(ratio):>14}")
    count = 256
    while count * 4 <= arguments.max_bytes:
        result = timed(calls_of(count), max(15, min(400, (64 << 20) // (count * 4))))
        if communicator.rank == 0:
            times = "".join(f"{value:>14.2f}" for value in result.values())
            against = f"{result[ratio[0]] / result[ratio[1]]:>14.1f}" if ratio else ""
            print(f"{count * 4:>10} {times}{against}", flush=True)
        count *= 4


def check(is_right):
    """Ends the program if a result is wrong."""
    if not is_right:
        sys.exit("a wrong sum")


def without_torch(communicator, arguments):
    """Times the communicator alone, on the standard library's arrays."""

    def calls_of(count):
        data = array.array("f", [1.0]) * count
        communicator.allreduce(data)
        check(all(value == communicator.nranks for value in data))
        return {"ours": lambda: communicator.allreduce(data, op="max")}

    table(communicator, arguments, "torch is not installed", ["ours"], (), calls_of)


def with_mpi(arguments):
    """Times the communicator and mpi4py, on numpy arrays."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pinned(world.rank)
    unique_id = world.bcast(bytes(fa.get_unique_id()) if world.rank == 0 else None)
    communicator = fa.Communicator.init(world.size, world.rank, fa.UniqueId(unique_id))

    def calls_of(count):
        mine, output = np.full(count, world.rank + 1, np.float32), np.empty(count, np.float32)
        calls = {
            "ours": lambda: communicator.allreduce(mine, output),
            "mpi4py": lambda: world.Allreduce(mine, output),
        }
        for call in calls.values():
            output.fill(0)
            call()
            check((output == world.size * (world.size + 1) / 2).all())
        return calls

    head = MPI.Get_library_version().split(",")[0].strip()
    table(communicator, arguments, head, ["ours", "mpi4py"], ("mpi4py", "ours"), calls_of)


def with_torch(communicator, torch, dist, gloo, arguments):
    """Times the communicator and torch.distributed with both backends, on torch tensors."""

    def calls_of(count):
        tensor, largest = torch.ones(count), dist.ReduceOp.MAX
        sums = [
            lambda: communicator.allreduce(tensor),
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, group=gloo),
        ]
        for power, call in enumerate(sums, 1):
            call()
            check(torch.equal(tensor, torch.full_like(tensor, float(communicator.nranks) ** power)))
        return {
            "ours": lambda: communicator.allreduce(tensor, op="max"),
            "torch": lambda: dist.all_reduce(tensor, largest),
            "gloo": lambda: dist.all_reduce(tensor, largest, group=gloo),
        }

    columns = ["ours", "torch", "torch, gloo"]
    table(communicator, arguments, f"torch {torch.__version__}", columns, ("gloo", "torch"), calls_of)


def decode(rank, nranks, folder, backend):
    """Prints tokens per second of a decoding step of some transformer blocks, with the weights split over the ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if nranks <= len(os.sched_getaffinity(0)):
        pinned(rank)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/decode", rank=rank, world_size=nranks)
    width, layers, past, heads = 256, 4, 64, 4

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.out = nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            self.norm = nn.LayerNorm(width)

        def forward(self, x, cache):
            x = self.norm(x)
            parts = [part(x).view(1, 1, -1, width // heads) for part in (self.query, self.key, self.value)]
            query, key, value = (part.transpose(1, 2) for part in parts)
            keys, values = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            attention = nn.functional.scaled_dot_product_attention(query, keys, values)
            x = x + self.out(attention.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.silu(self.up(x)))

    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (nranks,))
    blocks = [parallelize_module(Block(), mesh, plan) for _ in range(layers)]
    cache = torch.randn(2, 1, heads // nranks, past, width // heads)
    token = torch.randn(1, 1, width)

    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
    mlp = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step():
        x = token
        with torch.no_grad():
            for block in blocks:
                x = block(x, cache)
        return x

    def layer():
        # The addition waits for the layer's output.
        with torch.no_grad():
            return token + mlp(token)

    result = timed({"decoding": step, "MLP": layer}, 200)
    if rank == 0:
        decoding, one = (1e6 / result[name] for name in ("decoding", "MLP"))
        head = f"# {backend}: decoding, {layers} blocks of width {width}"
        print(f"{head}: {decoding:.0f} tokens/s; an MLP: {one:.0f} tokens/s", flush=True)
    dist.destroy_process_group()


def rank_process(rank, nranks, unique_id, folder, arguments):
    """Runs one rank of the benchmark."""
    if nranks <= len(os.sched_getaffinity(0)):
        pinned(rank)
    communicator = fa.Communicator.init(nranks, rank, fa.UniqueId(unique_id))
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return without_torch(communicator, arguments)
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("fast_allreduce", init_method=store, rank=rank, world_size=nranks)
    with_torch(communicator, torch, dist, dist.new_group(backend="gloo"), arguments)
    dist.destroy_process_group()


def main():
    """Runs the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of rank processes (default: 2)")
    parser.add_argument("--max-bytes", type=size, default=16 << 20, help="largest message (default: 16M)")
    parser.add_argument("--decode", action="store_true", help="also time decoding through DTensor")
    parser.add_argument("--mpi", action="store_true", help="compare with mpi4py, under mpirun")
    arguments = parser.parse_args()
    if arguments.mpi:
        return with_mpi(arguments)
    nranks, context, codes = arguments.ranks, multiprocessing.get_context("spawn"), []

    def run_ranks(function, *rest):
        processes = [context.Process(target=function, args=(rank, nranks, *rest)) for rank in range(nranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes.extend(abs(process.exitcode or 0) for process in processes)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(rank_process, bytes(fa.get_unique_id()), Path(folder), arguments)
    # Each backend has separate processes, in turn: DTensor caches its decisions for equal meshes.
    for backend in ("fast_allreduce", "gloo") * 2 if arguments.decode else ():
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(decode, folder, backend)
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
