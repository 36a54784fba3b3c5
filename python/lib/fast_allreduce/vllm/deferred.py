"""Models that are not compiled: the allreduce of a row-parallel layer is deferred until its result is used. If an
RMSNorm with a residual uses it, both become one call.

Any other use computes the sum first, so a model needs not be known. At most one sum of a group is deferred: the next
call of the group computes it. So all ranks make the same calls in the same order.
"""

import importlib
from contextlib import suppress

import torch

from .. import errors

_LAYERS = "vllm.model_executor.layers"

# What can be read of a tensor before its values are known: its description.
_DESCRIPTION = {
    torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_contiguous, torch.Tensor.stride,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
    ),
}  # fmt: skip


class Pending(torch.Tensor):
    """A tensor of which this rank has its part until a function of torch takes it, which gets the sum."""

    @classmethod
    def of(cls, part, calls):
        """Returns a deferred sum of a contiguous tensor. `calls` has the group's communicator."""
        pending = part.as_subclass(cls)
        pending.part, pending.calls = part, calls
        return pending

    def settle(self):
        """Computes the sum, in place. A second call does nothing."""
        calls, self.calls = self.calls, None
        if calls is not None:
            other, calls.pending = calls.pending, None
            if other is not None and other is not self:
                other.settle()
            calls._ranks.allreduce(self.part)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function not in _DESCRIPTION:
            for value in torch.utils._pytree.tree_leaves((arguments, keywords)):
                if isinstance(value, cls):
                    value.settle()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **keywords)


def _fused(given, residual, weight, epsilon, unit_offset, in_place):
    """Returns the rows and the new residual, or None if the call does not take these tensors."""
    part, calls = given.part, given.calls
    if isinstance(residual, Pending):
        residual.settle()
        residual = residual.part
    if calls is None or residual.dtype != part.dtype or residual.shape != part.shape or not residual.is_contiguous():
        return None
    if weight is not None and (weight.dtype != part.dtype or weight.shape != part.shape[-1:]):
        return None
    norm = {"norm": "rms", "weight": weight, "hidden": part.shape[-1], "epsilon": epsilon, "unit_offset": unit_offset}
    calls.pending = None
    if in_place:
        given.calls = None
        calls._ranks.allreduce_fused(part, residual=residual, **norm)
        return part, residual
    # The sum stays deferred: the norm leaves its input as it is.
    rows, total = torch.empty_like(part), torch.empty_like(part)
    calls._ranks.allreduce_fused(part, rows, residual=residual, residual_out=total, **norm)
    return rows, total


def _rms_norm(own):
    def forward_native(self, x, residual=None):
        ours = not torch.compiler.is_compiling() and type(x) is Pending and residual is not None
        if ours and self.variance_size_override is None:
            weight = self.weight.data if self.pass_weight_add else None
            # vLLM lets this norm write its inputs (`maybe_inplace`).
            done = _fused(x, residual, weight, self.variance_epsilon, False, True)
            if done is not None:
                return done
        return own(self, x, residual)

    return forward_native


def _gemma_rms_norm(own):
    def forward_native(self, x, residual=None):
        if not torch.compiler.is_compiling() and type(x) is Pending and residual is not None:
            done = _fused(x, residual, self.weight.data, self.variance_epsilon, True, False)
            if done is not None:
                return done
        return own(self, x, residual)

    return forward_native


def _all_reduce(own):
    def tensor_model_parallel_all_reduce(input_):
        if torch.compiler.is_compiling():
            return own(input_)
        group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
        defer = getattr(getattr(group.device_communicator, "dist_module", None), "defer", None)
        return own(input_) if defer is None else defer(input_)

    return tensor_model_parallel_all_reduce


# Module, path to the function, its replacement, and what the function's owner must have.
_REPLACED = (
    (f"{_LAYERS}.layernorm", "RMSNorm.forward_native", _rms_norm),
    (f"{_LAYERS}.layernorm", "GemmaRMSNorm.forward_native", _gemma_rms_norm),
    (f"{_LAYERS}.linear", "tensor_model_parallel_all_reduce", _all_reduce),
)


def enable():
    """Replaces vLLM's functions in this process. A second call does nothing.

    Raises `Unavailable` if this vLLM has not all of them, and then replaces none.
    """
    found = []
    for module, path, replacement in _REPLACED:
        *owners, name = path.split(".")
        owner = None
        with suppress(ImportError):
            owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part, None)
        if not hasattr(owner, name):
            raise errors.Unavailable(
                f"{module} has no {path}: this plugin was written for vLLM 0.32.0",
                what=f"vLLM's {path}", reason="not found",
            )  # fmt: skip
        found.append((owner, name, replacement))
    for owner, name, replacement in found:
        own = getattr(owner, name)
        if own.__module__ != __name__:
            setattr(owner, name, replacement(own))
