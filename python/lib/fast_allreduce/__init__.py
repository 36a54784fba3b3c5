"""Tensor-parallel allreduce by direct access to the peers' memory: between CPU processes, and on CUDA GPUs.

A *rank* is one participant, usually a process. One makes an id and gives it to the others in any way; each makes a
`Communicator` with it, and all then make the same calls in the same order::

    import fast_allreduce as fa

    communicator = fa.Communicator.init(nranks, rank, unique_id)     # device="cuda:0" for a GPU
    communicator.allreduce(tensor)                                   # in place; a torch tensor, numpy array, ...

Names and meanings are those of NVIDIA's nccl4py (`nccl.core`) where they fit. `fast_allreduce.distributed` is a backend for
`torch.distributed`, and after `import fast_allreduce.operators` compiled code can make these calls.
"""

from . import errors
from ._catalogue import ReduceOp
from ._native import (
    MAX_RANKS,
    Communicator,
    Counters,
    Group,
    RawBuffer,
    RegisteredBuffer,
    UniqueId,
    __version__,
    build_facts,
    get_unique_id,
)
from .errors import Error


SUM, PROD, MIN, MAX, AVG = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR


def premul_sum(scale: float) -> str:
    """The operation that sums the ranks' floats, of which this rank's are multiplied by `scale` first.

    Each rank has a scale of its own. The product is computed as sums are accumulated, and rounded to the type.
    """
    return f"premul_sum:{float(scale)!r}"


def group() -> Group:
    """A context manager: messages that this thread sends and receives within go together, side by side, at its end.

    At most 64 for each communicator. Collectives are carried out at once, also within a group. After an exception nothing
    of the group is carried out.
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
    "RawBuffer",
    "ReduceOp",
    "RegisteredBuffer",
    "UniqueId",
    "__version__",
    "build_facts",
    "errors",
    "get_unique_id",
    "group",
    "premul_sum",
]
