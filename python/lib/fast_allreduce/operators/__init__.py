"""Operators of torch for this library's calls, and `torch.compile` of code that makes them.

After `import fast_allreduce.operators` the collective methods of `Communicator` can be traced: compiled graphs have operators in
their place, also with `fullgraph=True`. Code that is not compiled calls the methods as before. `torch.ops.fast_allreduce` has the
operators for code that names them itself::

    total = torch.ops.fast_allreduce.allreduce(tensor, communicator.name)
    torch.ops.fast_allreduce.allreduce_(tensor, communicator.name)          # in place

An operator names its communicator by `Communicator.name`, since operators take numbers and text. Its outputs are new tensors.
Every operator has torch's ordered effect: torch removes none, merges no two and keeps their order, whether results are used or
not. So ranks whose graphs differ make their calls in the order of their programs. On a GPU a call is put on the current stream of
the input's device. There are no gradients: `backward` raises `Unavailable`.
"""

import hashlib

import torch._inductor.config

from .. import __version__
from . import tracing
from .definitions import SCHEMAS, named

# Identifies the operators wherever compiled code that has them is kept.
IDENTITY = f"fast_allreduce {__version__} {hashlib.sha256(str(SCHEMAS).encode()).hexdigest()[:16]}"

# By default torch keeps no code with effects for other processes. This allows it, and puts the identity into the keys.
torch._inductor.config.unsafe_marked_cacheable_functions["torch.ops.higher_order.with_effects"] = IDENTITY

__all__ = ["IDENTITY", "SCHEMAS", "named", "tracing"]
