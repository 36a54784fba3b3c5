"""torch tensors as this library's calls take them: which can be reduced, and bytes of those that are only moved."""

import torch

from . import errors

REDUCED = frozenset(
    getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64",
        "float8_e4m3fn", "float8_e5m2",
    )  # fmt: skip
    if hasattr(torch, name)
)


def check_dense(tensor):
    """Raises if a tensor is sparse, which the compiled calls check of those that they are given as they are."""
    if tensor.layout is not torch.strided:
        raise errors.InvalidArgument(
            f"a tensor is sparse ({tensor.layout}): give its to_dense(), or its values where all ranks have the same indices"
        )


def as_moved(tensor):
    """The same memory as a tensor of a type that can be moved."""
    if tensor.dtype in REDUCED:
        return tensor
    check_dense(tensor)
    if not tensor.is_contiguous():
        raise errors.InvalidArgument("a tensor is not contiguous")
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)
