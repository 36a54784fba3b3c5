"""Tensor-parallel allreduce by direct access to the peers' memory: between CPU processes, and on CUDA GPUs.

A *rank* is one participant, usually a process. One rank creates an id and sends it to the others by any means. Each
rank makes a `Communicator` from it, and all ranks then make the same calls in the same order::

    import fast_allreduce as fa

    communicator = fa.Communicator.init(nranks, rank, unique_id)     # device="cuda:0" for a GPU
    communicator.allreduce(tensor)                                   # in place; a torch tensor, numpy array, ...

Names and semantics follow NVIDIA's nccl4py (`nccl.core`) where they fit. `fast_allreduce.distributed` is a backend for
`torch.distributed`. After `import fast_allreduce.operators` these calls work in compiled code.
"""

from . import errors
from ._catalogue import ReduceOp
from ._native import (
    MAX_RANKS,
    Communicator,
    Counters,
    Group,
    Progress,
    RawBuffer,
    RegisteredBuffer,
    UniqueId,
    __version__,
    build_facts,
    get_unique_id,
    inspect,
    inspect_metrics,
)
from .errors import Error

SUM, PROD, MIN, MAX, AVG = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR


def premul_sum(scale: float) -> str:
    """Returns the operation that multiplies this rank's floats by `scale` and sums the products over the ranks.

    Ranks may have different scales. The product is computed in the type in which sums are accumulated, and the sum is
    rounded to the element type. Calls on integers with it raise `ValueError`::

        communicator.allreduce(tensor, op=fa.premul_sum(0.5))
    """
    return f"premul_sum:{float(scale)!r}"


def group() -> Group:
    """Returns a context manager: messages that this thread sends and receives inside it run concurrently, at its end.

    A group has at most 64 messages of each communicator. Collectives run at once, also inside a group. If the block
    raises, none of its messages is sent or received::

        with fa.group():
            communicator.send(mine, right)
            communicator.recv(theirs, left)
    """
    return Group()


__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MAX_RANKS",
    "MIN",
    "PROD",
    "SUM",
    "Communicator",
    "Counters",
    "Error",
    "Group",
    "Progress",
    "RawBuffer",
    "ReduceOp",
    "RegisteredBuffer",
    "UniqueId",
    "__version__",
    "build_facts",
    "errors",
    "get_unique_id",
    "group",
    "inspect",
    "inspect_metrics",
    "premul_sum",
]
