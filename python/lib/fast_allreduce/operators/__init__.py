"""torch operators for this library's calls, and support for them in `torch.compile`.

After `import fast_allreduce.operators` torch traces the collective methods of `Communicator` to operators, also with
`fullgraph=True`. Code that is not compiled calls the methods as before. Code may also call the operators directly::

    total = torch.ops.fast_allreduce.allreduce(tensor, communicator.name)
    torch.ops.fast_allreduce.allreduce_(tensor, communicator.name)          # in place

Operators take numbers and text, so they identify a communicator by `Communicator.name`. Outputs are new tensors, except
those of operators whose names end in an underscore, which work in place. Every operator has torch's ordered effect:
torch removes none, merges no two and keeps their order, also if a result is unused. So ranks whose graphs differ make
their calls in program order. On a GPU a call is enqueued on the current stream of the input's device. Gradients are not
supported: where torch would record one, the call raises `Unavailable`.
"""

import hashlib

import torch
import torch._inductor.config

from .. import __version__
from . import tracing
from .definitions import SCHEMAS, named

# Identifies the operators in keys of caches of compiled code.
IDENTITY = f"fast_allreduce {__version__} {hashlib.sha256(str(SCHEMAS).encode()).hexdigest()[:16]}"

# By default torch does not cache code with effects for other processes. This allows it, and adds the identity to the
# keys.
torch._inductor.config.unsafe_marked_cacheable_functions["torch.ops.higher_order.with_effects"] = IDENTITY

# Imported only where it is needed, because it imports Inductor's lowerings.
if torch.__version__ < "2.15":
    from . import ordering

    ordering.keep_order()

__all__ = ["IDENTITY", "SCHEMAS", "named", "tracing"]
