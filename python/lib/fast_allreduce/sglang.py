"""A plugin for SGLang: this library runs the allreduce and all-gather of its CPU ranks.

SGLang loads it by its entry point (`sglang.srt.plugins`) in each of its processes. It changes nothing unless the
environment variable FAST_ALLREDUCE_SGLANG is "cpu". Then it replaces the operators `sgl_kernel::initialize`,
`shm_allreduce` and `shm_allgather`, also in compiled graphs.
"""

import importlib
import logging

import torch
import torch.distributed as dist

from . import errors
from .servers import description, requested_devices, server_communicator_of
from .tensors import as_moved

logger = logging.getLogger(__name__)

# The version of SGLang that has these operators.
VERSION = "0.5.23"

_SUM = int(dist.ReduceOp.SUM)

_OPERATORS = "sgl_kernel"


class _Ranks:
    """The ranks that `initialize` was passed.

    They meet in the first call, because torch.distributed is not set up before.
    """

    size = rank = communicator = library = None

    def joined(self):
        if self.communicator is None:
            if self.size is None:
                raise errors.Unavailable(
                    "sgl_kernel.initialize has not been called", what="the ranks", reason="not initialized"
                )
            group = self._group()
            self.communicator = server_communicator_of(group)
            logger.info("%s", description(self.communicator, group.group_name))
        return self.communicator

    def _group(self):
        """Returns the process group of these ranks: SGLang's tensor-parallel group, or the world."""
        try:
            group = importlib.import_module("sglang.srt.distributed.parallel_state").get_tp_group().cpu_group
        except (ImportError, AssertionError):
            group = dist.group.WORLD
        if group is None or (group.size(), group.rank()) != (self.size, self.rank):
            raise errors.InvalidArgument(
                f"no process group has rank {self.rank} of {self.size}, which initialize was passed"
            )
        return group


_ranks = _Ranks()


def initialize(size, rank):
    """Implements `sgl_kernel::initialize`: sets the number of ranks and this rank, once."""
    if _ranks.size is None:
        _ranks.size, _ranks.rank = size, rank


def shm_allreduce(data, reduce_op):
    """Implements `sgl_kernel::shm_allreduce`: sums `data` over the ranks, in place."""
    if reduce_op != _SUM:
        raise errors.InvalidArgument(f"reduce_op {reduce_op}: only torch.distributed.ReduceOp.SUM is supported")
    moved = data.contiguous()
    _ranks.joined().allreduce(moved)
    if moved is not data:
        data.copy_(moved)


def shm_allgather(data, dim):
    """Implements `sgl_kernel::shm_allgather`: returns all ranks' tensors, concatenated along a dimension."""
    communicator, source = _ranks.joined(), data.contiguous()
    dim = dim + data.dim() if dim < 0 else dim
    gathered = data.new_empty((communicator.nranks, *data.shape))
    communicator.allgather(as_moved(source), as_moved(gathered))
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def replace():
    """Replaces SGLang's operators. A second call does nothing. Raises `Unavailable` if there are none."""
    if _ranks.library is not None:
        return
    try:
        # The operators must exist already: registered later, they would replace these.
        importlib.import_module("sgl_kernel")
        operators = getattr(torch.ops, _OPERATORS)
        for name in ("initialize", "shm_allreduce", "shm_allgather"):
            getattr(operators, name)
    except (ImportError, AttributeError) as error:
        raise errors.Unavailable(
            f"sgl_kernel has no CPU operators of SGLang {VERSION}: {error}",
            what="SGLang's operators",
            reason="not found",
        ) from error
    _ranks.library = torch.library.Library(_OPERATORS, "IMPL")
    _ranks.library.impl("initialize", initialize, "CompositeImplicitAutograd", allow_override=True)
    _ranks.library.impl("shm_allreduce", shm_allreduce, "CPU", allow_override=True)
    _ranks.library.impl("shm_allgather", shm_allgather, "CPU", allow_override=True)


def register():
    """Replaces the operators if FAST_ALLREDUCE_SGLANG asks for it. SGLang calls it in each of its processes.

    Raises `InvalidSetting` for an unknown device, and `Unavailable` as `replace` does.
    """
    if requested_devices("FAST_ALLREDUCE_SGLANG", ("cpu",)):
        replace()
