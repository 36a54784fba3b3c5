"""torch tensors as arguments of calls: the types that can be reduced, and views of the others as bytes."""

import torch

from . import errors
from ._catalogue import TORCH_TYPES

# The longest row of a fused call, in elements.
LONGEST_ROW = 65536

REDUCED = frozenset(getattr(torch, name) for name in TORCH_TYPES if hasattr(torch, name))


def check_dense(tensor):
    """Raises `InvalidArgument` if a tensor is sparse.

    The compiled calls check only tensors that they are passed unchanged.
    """
    if tensor.layout is not torch.strided:
        raise errors.InvalidArgument(
            f"a tensor is sparse ({tensor.layout}): pass its to_dense(), or its values if all ranks have the same "
            "indices"
        )


def as_moved(tensor):
    """Returns a view of a contiguous tensor in a type that calls can move: its own type, its real components, or bytes.

    Raises `InvalidArgument` for a tensor of another type that is sparse or not contiguous.
    """
    if tensor.dtype in REDUCED:
        return tensor
    check_dense(tensor)
    if not tensor.is_contiguous():
        raise errors.InvalidArgument("a tensor is not contiguous")
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)
