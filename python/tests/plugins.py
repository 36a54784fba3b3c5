"""What the tests of the plugins share: ranks in a gloo group, the entry points, and values with their sums."""

import contextlib
import functools
import logging
from importlib.metadata import entry_points

import pytest
import stand_ins
import torch
import torch.distributed as dist
from groups import group
from ranks import LIMIT, on_ranks


def in_gloo(*sizes, limit=LIMIT, **environment):
    """Makes a test of a function, as `on_ranks` does, whose ranks have a gloo group and these variables."""
    return on_ranks(*sizes, limit=limit, setup=functools.partial(_server, environment=environment))


@contextlib.contextmanager
def _server(rank, nranks, store_path, environment):
    with pytest.MonkeyPatch.context() as patch, group(rank, nranks, store_path, "gloo"):
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            yield
            dist.barrier()
        finally:
            stand_ins.forget()


def plugin(group, name="fast_allreduce"):
    """Returns the function that the server calls: the entry point of the installed package."""
    (found,) = entry_points(group=group, name=name)
    return found.load()


def values(rank, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_rank_order(nranks, shape, dtype):
    """Returns the sum in f32 in rank order, rounded once."""
    total = values(0, shape, dtype).float()
    for rank in range(1, nranks):
        total += values(rank, shape, dtype).float()
    return total.to(dtype)


class Said(logging.Handler):
    """Collects the lines of a logger, at the levels that a server shows."""

    def __init__(self, name):
        super().__init__(logging.INFO)
        self.logger, self.lines = logging.getLogger(name), []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(logging.NOTSET)
