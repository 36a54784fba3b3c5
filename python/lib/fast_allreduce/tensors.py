"""torch tensors as this library's calls take them: which can be reduced, and bytes of those that are only moved."""

import torch

from . import errors
from ._catalogue import TORCH_TYPES

REDUCED = frozenset(getattr(torch, name) for name in TORCH_TYPES if hasattr(torch, name))


def as_moved(tensor):
    """The same memory as a tensor of a type that can be moved."""
    if tensor.dtype in REDUCED:
        return tensor
    if not tensor.is_contiguous():
        raise errors.InvalidArgument("a tensor is not contiguous")
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)
