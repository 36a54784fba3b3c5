"""A backend of torch.distributed: `torch.distributed.init_process_group("fast_allreduce")`, for tensors on the CPU and on a GPU.

torch finds it by its entry point; where it does not, `import fast_allreduce.distributed` registers it. Ranks are the processes
of one machine, 16 at most; with other backends for other devices as in "cpu:fast_allreduce,cuda:nccl".

Calls of a group are carried out in the order in which they are made. On the CPU a synchronous one is carried out by the thread
that calls; with `async_op=True` it is queued, and carried out by a thread of the group's, or by whoever waits for it first: so a
program that waits at once pays for no other thread. On a GPU each is put on the current stream. Messages (`send`, `isend`,
`recv`, ...) are gathered until one of them is waited for, or the next collective comes, and then go together: so two ranks may
both send first.
"""

import re

import torch

# Older ones do not ask a backend that is written in Python for its calls.
_NEEDED = (2, 15)

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _NEEDED:
    raise ImportError(
        f"fast_allreduce.distributed needs torch {'.'.join(map(str, _NEEDED))} or newer, and this is torch {torch.__version__}; "
        "fast_allreduce.Communicator and fast_allreduce.process_group do not need it"
    )

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import Backend as _Backend  # noqa: E402

from ..process_group import check_size  # noqa: E402
from .backend import NAME, FastAllreduceBackend  # noqa: E402
from .devices import Devices, seconds  # noqa: E402
from .meeting import meet  # noqa: E402

__all__ = ["NAME", "FastAllreduceBackend", "register"]


def _create(dist_options, backend_options):
    rank, size = dist_options.group_rank, dist_options.group_size
    store, timeout = dist_options.store, dist_options.timeout
    if dist_options.split_from is not None:
        return dist_options.split_from.split(store, dist_options.global_ranks_in_group, backend_options)
    check_size(size)
    limit, global_ranks = seconds(timeout), list(dist_options.global_ranks_in_group) or list(range(size))
    communicator = meet(store, rank, size, limit, global_ranks)
    options = backend_options if isinstance(backend_options, _Backend.Options) else None
    options = options or _Backend.Options(NAME, timeout=timeout)
    options._timeout = timeout
    return FastAllreduceBackend(Devices(communicator, limit, global_ranks), options)


def register():
    """Makes the backend known to torch.distributed, once."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
