"""A backend of torch.distributed, for tensors on the CPU and on a GPU.

torch finds it by its entry point; otherwise `import fast_allreduce.distributed` registers it. Each machine has at most
16 ranks. Between machines, which have equally many consecutive ranks, gloo carries the data of tensors on the CPU, and
GPUs need nccl. Other devices may have other backends, as in "cpu:fast_allreduce,cuda:nccl"::

    dist.init_process_group("fast_allreduce")
    dist.all_reduce(tensor)

Calls of a group run in the order in which they are made. On the CPU the calling thread runs a synchronous call. A call
with `async_op=True` is queued, and runs in the first thread that waits for it, or in the group's own thread. So a
program that waits at once does not pay for a thread switch. On a GPU each call is enqueued on the current stream.
Messages (`send`, `isend`, `recv`, ...) are gathered until one of them is waited for or the next collective is called,
and then run concurrently. So two ranks may both send first.
"""

import re

import torch

# Older versions do not call backends that are written in Python.
_NEEDED = (2, 15)

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _NEEDED:
    raise ImportError(
        f"fast_allreduce.distributed needs torch {'.'.join(map(str, _NEEDED))} or newer, and this is torch "
        f"{torch.__version__}; fast_allreduce.Communicator and fast_allreduce.process_group do not need it"
    )

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import Backend as _Backend  # noqa: E402

from .backend import NAME, FastAllreduceBackend  # noqa: E402
from .devices import Devices, seconds  # noqa: E402
from .meeting import meet  # noqa: E402

__all__ = ["NAME", "FastAllreduceBackend", "register"]


def _create(dist_options, backend_options):
    rank, size = dist_options.group_rank, dist_options.group_size
    store, timeout = dist_options.store, dist_options.timeout
    if dist_options.split_from is not None:
        return dist_options.split_from.split(store, dist_options.global_ranks_in_group, backend_options)
    limit, global_ranks = seconds(timeout), list(dist_options.global_ranks_in_group) or list(range(size))
    communicator = meet(store, rank, size, limit, global_ranks)
    options = backend_options if isinstance(backend_options, _Backend.Options) else None
    options = options or _Backend.Options(NAME, timeout=timeout)
    options._timeout = timeout
    return FastAllreduceBackend(Devices(communicator, limit, global_ranks), options)


def register():
    """Registers the backend with torch.distributed, once."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
