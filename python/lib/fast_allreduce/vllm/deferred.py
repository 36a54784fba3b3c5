"""Models that are not compiled: the allreduce of a row-parallel layer is deferred until its result is used. If an
RMSNorm with a residual uses it, both become one call.

Any other use by a function of torch computes the sum first. At most one sum of a group is deferred: the next call of
the group computes it. So all ranks make the same calls of a group in the same order.

A use that is not a call of a function of torch, such as `torch.tensor(sum)` or TorchScript, would read this rank's
part. So only models whose layers are known have deferred sums (`knows_model`).
"""

import importlib
from contextlib import suppress

import torch

from .. import errors
from ..tensors import LONGEST_ROW

_LAYERS = "vllm.model_executor.layers"

# Architectures whose row-parallel sums only reach norms and functions of torch.
_ARCHITECTURES = {
    "GemmaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
}  # fmt: skip

_TYPES = (torch.float32, torch.float16, torch.bfloat16)

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
        pending.part, pending.calls, pending.failure = part, calls, None
        return pending

    def settle(self):
        """Computes the sum, in place. A second call does nothing, or raises `Unavailable` if the first has failed."""
        # The sum is there when `calls` is None: another thread waits for the lock meanwhile.
        calls = self.calls
        if calls is None:
            return
        with calls.lock:
            if self.calls is not None:
                self.compute(lambda: calls._ranks.allreduce(self.part))

    def compute(self, call):
        """Makes the call that computes the sum. The caller has the group's lock."""
        if self.failure is not None:
            raise errors.Unavailable(
                f"the call that computes this sum has failed: {self.failure}", what="a sum", reason="failed"
            ) from self.failure
        other, self.calls.pending = self.calls.pending, None
        if other is not None and other is not self:
            other.settle()
        try:
            result = call()
        except BaseException as failure:
            self.failure = failure
            raise
        self.calls = None
        return result

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
    if residual is given:
        return None
    if isinstance(residual, Pending):
        residual.settle()
        residual = residual.part
    part, calls = given.part, given.calls
    if calls is None or residual.dtype != part.dtype or residual.shape != part.shape or not residual.is_contiguous():
        return None
    if part.dtype not in _TYPES or not 0 < part.shape[-1] <= LONGEST_ROW or not 0 <= epsilon < 1:
        return None
    if weight is not None and not (
        weight.dtype == part.dtype and weight.shape == part.shape[-1:] and weight.is_contiguous()
    ):
        return None
    norm = {"norm": "rms", "weight": weight, "hidden": part.shape[-1], "epsilon": epsilon, "unit_offset": unit_offset}
    with calls.lock:
        if given.calls is None:
            return None
        if in_place:
            given.compute(lambda: calls._ranks.allreduce_fused(part, residual=residual, **norm))
            return part, residual
        # The sum stays deferred: the norm leaves its input as it is.
        rows, total = torch.empty_like(part), torch.empty_like(part)
        calls.pending = None
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


# Module, path to the function, and what makes its replacement.
_REPLACED = (
    (f"{_LAYERS}.layernorm", "RMSNorm.forward_native", _rms_norm),
    (f"{_LAYERS}.layernorm", "GemmaRMSNorm.forward_native", _gemma_rms_norm),
    (f"{_LAYERS}.linear", "tensor_model_parallel_all_reduce", _all_reduce),
)


def knows_model():
    """Returns whether the layers of the model that vLLM runs in this process are known."""
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    model = config and config.model_config
    architectures = set(model.hf_config.architectures or ()) if model else set()
    return bool(architectures) and architectures <= _ARCHITECTURES


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
