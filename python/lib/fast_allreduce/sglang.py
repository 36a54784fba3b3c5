"""A plugin for SGLang: the allreduce and all-gather of its CPU ranks by this library.

SGLang finds it by its entry point (`sglang.srt.plugins`) in each of its processes. It changes nothing unless the environment
variable FAST_ALLREDUCE_SGLANG is "cpu". Then the operators `sgl_kernel::initialize`, `shm_allreduce` and `shm_allgather` are this
library's, in compiled graphs too.
"""

import importlib
import logging
import os

import torch
import torch.distributed as dist

from . import errors
from .servers import description, server_communicator_of
from .tensors import as_moved

logger = logging.getLogger(__name__)

# Whose operators these were written for.
VERSION = "0.5.23"

_SUM = int(dist.ReduceOp.SUM)

_OPERATORS = "sgl_kernel"


class _Ranks:
    """The ranks that `initialize` tells of. They meet in the first call, as torch.distributed is not set up before."""

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
        """The process group of these ranks: SGLang's of tensor parallelism, or all."""
        try:
            group = importlib.import_module("sglang.srt.distributed.parallel_state").get_tp_group().cpu_group
        except (ImportError, AssertionError):
            group = dist.group.WORLD
        if group is None or (group.size(), group.rank()) != (self.size, self.rank):
            raise errors.InvalidArgument(f"no process group has rank {self.rank} of {self.size} ranks, as initialize says")
        return group


_ranks = _Ranks()


def initialize(size, rank):
    """`sgl_kernel::initialize`: how many ranks there are, and which this one is. Once, as there."""
    if _ranks.size is None:
        _ranks.size, _ranks.rank = size, rank


def shm_allreduce(data, reduce_op):
    """`sgl_kernel::shm_allreduce`: the sum, in place."""
    if reduce_op != _SUM:
        raise errors.InvalidArgument(f"reduce_op {reduce_op}: only torch.distributed.ReduceOp.SUM is supported")
    moved = data.contiguous()
    _ranks.joined().allreduce(moved)
    if moved is not data:
        data.copy_(moved)


def shm_allgather(data, dim):
    """`sgl_kernel::shm_allgather`: all ranks' tensors, one after the other along a dimension."""
    communicator, source = _ranks.joined(), data.contiguous()
    dim = dim + data.dim() if dim < 0 else dim
    gathered = data.new_empty((communicator.nranks, *data.shape))
    communicator.allgather(as_moved(source), as_moved(gathered))
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def replace():
    """Puts this library's functions in place of SGLang's operators. A second time is nothing."""
    if _ranks.library is not None:
        return
    try:
        # The operators must be there: those that come later would take the place of these.
        importlib.import_module("sgl_kernel")
        operators = getattr(torch.ops, _OPERATORS)
        for name in ("initialize", "shm_allreduce", "shm_allgather"):
            getattr(operators, name)
    except (ImportError, AttributeError) as error:
        raise errors.Unavailable(
            f"sgl_kernel has not the operators of SGLang {VERSION} on CPUs: {error}", what="SGLang's operators", reason="not there"
        ) from error
    _ranks.library = torch.library.Library(_OPERATORS, "IMPL")
    _ranks.library.impl("initialize", initialize, "CompositeImplicitAutograd", allow_override=True)
    _ranks.library.impl("shm_allreduce", shm_allreduce, "CPU", allow_override=True)
    _ranks.library.impl("shm_allgather", shm_allgather, "CPU", allow_override=True)


def register():
    """What SGLang calls in each of its processes."""
    wanted = os.environ.get("FAST_ALLREDUCE_SGLANG", "")
    if wanted not in ("", "cpu"):
        raise errors.InvalidSetting(
            f"FAST_ALLREDUCE_SGLANG is {wanted!r}: cpu is known", name="FAST_ALLREDUCE_SGLANG", value=wanted, expected="cpu"
        )
    if wanted:
        replace()
