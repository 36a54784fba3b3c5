"""Tests in a process group of torch.distributed: ranks with the backend `fast_allreduce`, or with another."""

import contextlib
import datetime
import functools

import torch
import torch.distributed as dist
from ranks import LIMIT, on_ranks


def in_group(*sizes, backend="fast_allreduce", timeout=60, limit=LIMIT):
    """Makes a test of a function, as `on_ranks` does, whose ranks have a process group of the world."""
    return on_ranks(*sizes, limit=limit, setup=functools.partial(group, backend=backend, timeout=timeout))


@contextlib.contextmanager
def group(rank, nranks, store_path, backend="fast_allreduce", timeout=60):
    """Returns a context with a process group."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    # Only the name is given: torch finds the entry point.
    dist.init_process_group(backend, init_method=f"file://{store_path}", rank=rank, world_size=nranks, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def full(value, *shape, dtype=torch.float32):
    """Returns a tensor of one value, of five elements unless a shape is given."""
    return torch.full(shape or (5,), value, dtype=dtype)
