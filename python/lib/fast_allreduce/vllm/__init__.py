"""A plugin for vLLM: this library runs its allreduce within a machine, on GPUs and on CPUs.

vLLM loads it by its entry point (`vllm.general_plugins`) in each of its processes. It changes nothing unless the
environment variable FAST_ALLREDUCE_VLLM names what to replace: "cpu", "cuda", or both, "cpu,cuda". An allreduce, the
addition of the residual and an RMSNorm become one call (`fusion`, `deferred`), unless FAST_ALLREDUCE_VLLM_FUSION is 0.

On GPUs it replaces `CustomAllreduce`. It registers no buffers and refuses no address, also in CUDA graphs. On CPUs it
replaces `_CPUSHMDistributed`. Sums are computed in rank order, in f32, and rounded once. So vLLM's batch-invariant mode
holds at any size, and the plugin takes all of its calls.
"""

import importlib
import inspect
import json
import logging
import os
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .. import MAX_RANKS, errors, group
from .._native import communicators
from ..servers import description, requested_devices, server_communicator_of
from ..tensors import as_moved
from . import metrics

# A child of vLLM's logger, which shows level INFO by default.
logger = logging.getLogger("vllm.plugins.fast_allreduce")

_REDUCED = (torch.float32, torch.float16, torch.bfloat16)

# The number of messages that one launch takes.
_MESSAGES = 64

# Groups of this process that use this library.
_groups = set()


def _joined(process_group, device, name):
    """Returns a communicator of vLLM's group `name`, or None on all ranks if it cannot be made: vLLM then runs without
    it.
    """
    try:
        # Imported late: a process without the plugin must not change.
        importlib.import_module("fast_allreduce.operators")
        communicator = server_communicator_of(process_group, device)
    except errors.Error as error:
        logger.warning("fast_allreduce is not used for the group %s on %s: %s", name, device, error)
        return None
    # Graphs that vLLM caches for other processes contain this name. vLLM's names are unique: a taken one belongs to a
    # group that no longer exists.
    communicators.pop(f"vllm {name}", None)
    communicator.name = f"vllm {name}"
    _groups.add(name)
    logger.info("%s", description(communicator, name))
    return communicator


def _fuses():
    return os.environ.get("FAST_ALLREDUCE_VLLM_FUSION", "1") not in ("", "0")


def _enable_fusion(device, limit=None):
    """Lets this process make fused calls, in compiled models and on CPUs in others, if this vLLM has what they need.
    On GPUs sums of more than `limit` bytes are left to vLLM. Returns whether sums may be deferred.
    """
    from . import deferred, fusion

    defers = False
    try:
        if device == "cpu":
            fusion.enable()
            defers = deferred.knows_model()
            if defers:
                deferred.enable()
        else:
            fusion.enable_in_vllm(_name_on_gpus, limit)
    except (ImportError, AttributeError, errors.Error) as error:
        logger.warning("fast_allreduce makes calls without the norm: %s", error)
        return False
    return defers


def _name_on_gpus(name):
    """Returns the name of the communicator of a group of vLLM, or None."""
    group = importlib.import_module("vllm.distributed.parallel_state")._groups[name]()
    calls = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
    ready = isinstance(calls, CustomAllreduceCalls) and not calls.disabled
    return calls._communicator.name if ready else None


def compiled_with():
    """Returns text that identifies graphs with this library's operators, for the keys of vLLM's compiled code."""
    from . import fusion

    return f"{fusion.identity() if _fuses() else fusion.IDENTITY}, groups {sorted(_groups)}"


def _is_dense(tensor):
    """Returns whether a tensor's elements fill one block of memory, in any order: vLLM's "weakly contiguous"."""
    if tensor.is_contiguous():
        return True
    rest = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return rest == tensor.numel() * tensor.element_size()


def _block(tensor):
    """Returns a dense tensor's memory as a vector."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class CustomAllreduceCalls:
    """The interface of vLLM's `CustomAllreduce`. The class that replaces it derives from both."""

    def __init__(
        self,
        group,
        device,
        max_size=8 << 20,
        *,
        max_all_gather_size=2 << 20,
        max_reduce_scatter_size=16 << 20,
        **_for_other_paths,
    ):
        self.disabled = True
        self._communicator = None
        self.group = group
        self.device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        self.rank, self.world_size = group.rank(), group.size()
        self.max_size = max_size
        self.max_all_gather_size = max_all_gather_size
        self.max_reduce_scatter_size = max_reduce_scatter_size
        self.batch_invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
        # Code that reads these would call vLLM's own kernels with buffers that do not exist.
        self.fully_connected = False
        self._ptr = self.mnnvl_multicast_ptr = self.mnnvl_lamport_ag_multicast_ptr = 0
        if 1 < self.world_size <= MAX_RANKS:
            self._communicator = _joined(group, str(self.device), f"{group.group_name} of {self.device}")
            self.disabled = self._communicator is None
            if not self.disabled and _fuses():
                _enable_fusion("cuda", None if self.batch_invariant else max_size)

    def finalize_p2p(self):
        """Does nothing: the second step of construction in some versions of vLLM."""

    def _stream(self):
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def capture(self):
        """Returns a context for the capture of CUDA graphs. It does nothing: buffers need no registration."""
        yield

    def register_graph_buffers(self):
        """Does nothing: graphs contain only addresses of this library's own memory."""

    def _fits(self, tensor, limit):
        return (
            not self.disabled
            and tensor.dtype in _REDUCED
            and (self.batch_invariant or tensor.nbytes <= limit)
            and _is_dense(tensor)
        )

    def should_custom_ar(self, inp):
        """Returns whether `all_reduce` takes a tensor."""
        return self._fits(inp, self.max_size)

    def all_reduce(self, inp, *, out=None, registered=False):
        """Returns the sum over the ranks, in `out` or a new tensor of the same shape and layout."""
        out = torch.empty_like(inp) if out is None else out
        if out.stride() != inp.stride():
            # The input only looks dense, or the output has another layout.
            data = inp.contiguous()
            data = data.clone() if data is inp else data
            self._communicator.allreduce(data, stream=self._stream())
            return out.copy_(data)
        self._communicator.allreduce(_block(inp), _block(out), stream=self._stream())
        return out

    def custom_all_reduce(self, input):
        """Returns the sum over the ranks, or None for a tensor that another path must take."""
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def should_custom_all_gather(self, inp):
        """Returns whether `custom_all_gather` takes a tensor."""
        return self._fits(inp, self.max_all_gather_size) and inp.dim() > 0 and inp.is_contiguous()

    def custom_all_gather(self, inp):
        """Returns the ranks' tensors, concatenated along the first dimension, or None."""
        if not self.should_custom_all_gather(inp):
            return None
        out = inp.new_empty((inp.shape[0] * self.world_size, *inp.shape[1:]))
        self._communicator.allgather(inp, out, stream=self._stream())
        return out

    def should_custom_reduce_scatter(self, inp):
        """Returns whether `custom_reduce_scatter` takes a tensor."""
        fits = self._fits(inp, self.max_reduce_scatter_size) and inp.dim() > 0 and inp.is_contiguous()
        return fits and inp.shape[0] % self.world_size == 0

    def should_mnnvl_multimem_reduce_scatter(self, inp):
        """Returns False: there is no such path."""
        return False

    def custom_reduce_scatter(self, inp):
        """Returns this rank's share of the sum along the first dimension, or None."""
        if not self.should_custom_reduce_scatter(inp):
            return None
        out = inp.new_empty((inp.shape[0] // self.world_size, *inp.shape[1:]))
        self._communicator.reduce_scatter(inp, out, stream=self._stream())
        return out

    def close(self):
        """Destroys the communicator. A second call does nothing."""
        self.disabled = True
        communicator, self._communicator = getattr(self, "_communicator", None), None
        if communicator is not None:
            communicator.destroy()

    def __del__(self):
        self.close()


class SharedMemoryCalls:
    """The interface of vLLM's `_CPUSHMDistributed`, whose own methods run if the ranks cannot have a communicator."""

    @classmethod
    def make_group_name(cls, communicator):
        """Returns the name of the group's shared memory.

        vLLM compares the ranks' names before it makes an object of this class. If a rank has vLLM's own class, the
        names differ, and all ranks use torch.distributed.
        """
        return f"{super().make_group_name(communicator)}-fast_allreduce"

    def __init__(self, communicator):
        group = communicator.device_group
        self._ranks = _joined(group, "cpu", getattr(communicator, "unique_name", group.group_name))
        self._members = dist.get_process_group_ranks(group)
        # The sum that is deferred, if there is one, and the lock of the thread that computes it.
        self.pending, self.lock, self.defers = None, threading.RLock(), False
        if self._ranks is None:
            super().__init__(communicator)
        else:
            self.communicator = communicator
            # Only if all ranks can: a rank that defers makes other calls.
            able = torch.tensor([int(_fuses() and _enable_fusion("cpu"))], dtype=torch.int32)
            self._ranks.allreduce(able, op="min")
            self.defers = bool(able.item())

    def _settle(self):
        if self.pending is not None:
            self.pending.settle()

    def defer(self, input):
        """Returns the sum of a tensor over the ranks, which is computed when it is used, or not later than the next
        call. The input must not be used.
        """
        if not self.defers or not input.is_contiguous():
            self.all_reduce(input)
            return input
        from .deferred import Pending

        self._settle()
        self.pending = Pending.of(input, self)
        return self.pending

    def all_reduce(self, input, group=None):
        """Sums a tensor over the ranks, in place."""
        if self._ranks is None:
            return super().all_reduce(input, group=group)
        self._settle()
        if input.is_contiguous():
            self._ranks.allreduce(input)
        else:
            data = input.contiguous()
            self._ranks.allreduce(data)
            input.copy_(data)
        return None

    def gather(self, input, gather_list, dst=-1, group=None):
        """Copies the ranks' tensors to `gather_list` on the global rank `dst`."""
        if self._ranks is None:
            return super().gather(input, gather_list, dst=dst, group=group)
        self._settle()
        # `dst` is a rank of the world, the root a rank of the group.
        root = self._members.index(dst)
        part = as_moved(input.contiguous())
        flat = part.new_empty((self._ranks.nranks, part.numel())) if self._ranks.rank == root else None
        self._ranks.gather(part, flat, root)
        if flat is not None:
            for output, row in zip(gather_list, flat, strict=True):
                output.copy_(row.view(input.dtype).view(input.shape))
        return None

    def all_gather_into_tensor(self, output, input, group=None):
        """Concatenates the ranks' tensors in `output`."""
        if self._ranks is None:
            return super().all_gather_into_tensor(output, input, group=group)
        self._settle()
        self._ranks.allgather(as_moved(input.contiguous()), as_moved(output))
        return None

    def send_tensor_dict(self, tensor_dict, dst):
        """Sends a dictionary of tensors to a rank of the group. Raises `InvalidArgument` for other values."""
        if self._ranks is None:
            return super().send_tensor_dict(tensor_dict, dst)
        self._settle()
        for key, value in tensor_dict.items():
            if not isinstance(value, torch.Tensor):
                raise errors.InvalidArgument(f"{key!r} is a {type(value).__name__}: only tensors are sent")
        tensors = [value.contiguous() for value in tensor_dict.values()]
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        rows = [[key, name, list(tensor.shape)] for key, name, tensor in zip(tensor_dict, names, tensors)]
        head = json.dumps(rows).encode()
        self._ranks.send(len(head).to_bytes(8, "little"), dst)
        self._ranks.send(head, dst)
        self._each(tensors, self._ranks.send, dst)
        return None

    def recv_tensor_dict(self, src):
        """Returns the dictionary that a rank of the group has sent."""
        if self._ranks is None:
            return super().recv_tensor_dict(src)
        self._settle()
        length = bytearray(8)
        self._ranks.recv(length, src)
        head = bytearray(int.from_bytes(length, "little"))
        self._ranks.recv(head, src)
        rows = json.loads(head)
        tensors = [torch.empty(shape, dtype=getattr(torch, name)) for _, name, shape in rows]
        self._each(tensors, self._ranks.recv, src)
        return {row[0]: tensor for row, tensor in zip(rows, tensors)}

    @staticmethod
    def _each(tensors, call, peer):
        # Both sides skip the same empty tensors.
        tensors = [as_moved(tensor) for tensor in tensors if tensor.numel() > 0]
        for start in range(0, len(tensors), _MESSAGES):
            with group():
                for tensor in tensors[start : start + _MESSAGES]:
                    call(tensor, peer)


# The classes that are replaced: module, name, replacement, and the versions of vLLM that have them.
_COMMUNICATORS = "vllm.distributed.device_communicators"
_REPLACED = {
    "cuda": (f"{_COMMUNICATORS}.custom_all_reduce", "CustomAllreduce", CustomAllreduceCalls, "0.33.0"),
    "cpu": (f"{_COMMUNICATORS}.cpu_communicator", "_CPUSHMDistributed", SharedMemoryCalls, "0.32.0 and 0.33.0"),
}


def _unavailable(name, version, reason):
    return errors.Unavailable(
        f"{name} {reason}: this plugin was written for vLLM {version}", what=f"vLLM's {name}", reason=reason
    )


def _found(where, name, version):
    try:
        return getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise _unavailable(f"{where}.{name}", version, "is missing") from error


def _takes(ours, theirs):
    """Returns whether a method has the parameters of the method that it replaces."""
    mine, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    positional = [name for name, one in mine.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in mine.values())
    return positional == list(wanted)[: len(positional)] and (takes_any or wanted.keys() <= mine.keys())


def _check(original, calls, version):
    """Raises `Unavailable` unless `calls` has the constructor and all public methods of a class, with their parameters.

    Otherwise a method of the original class could run on an object that its constructor has not made.
    """
    for name, method in vars(original).items():
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            if not hasattr(calls, name):
                raise _unavailable(f"{original.__name__}.{name}", version, "is unknown")
            if not _takes(getattr(calls, name), method):
                reason = f"has the parameters {inspect.signature(method)}"
                raise _unavailable(f"{original.__name__}.{name}", version, reason)


def replace(device):
    """Replaces vLLM's class for a device, "cpu" or "cuda". A second call does nothing.

    Raises `Unavailable`, and replaces nothing, if this vLLM has no such class or one with another interface.
    """
    where, name, calls, version = _REPLACED[device]
    original = _found(where, name, version)
    if issubclass(original, calls):
        return
    _check(original, calls, version)
    # vLLM's keys of compiled code contain all of its environment variables. Without this one, code with this library's
    # operators and code with vLLM's would share a key.
    _found("vllm.envs", "environment_variables", version)["FAST_ALLREDUCE_VLLM"] = compiled_with
    replaced = type(name, (calls, original), {"__module__": __name__, "__doc__": calls.__doc__})
    setattr(importlib.import_module(where), name, replaced)


def register():
    """Replaces the classes that FAST_ALLREDUCE_VLLM asks for, and adds metrics of their calls. vLLM calls it in each of
    its processes, possibly repeatedly.

    Where `replace` raises `Unavailable`, vLLM keeps its own class, and a warning says why. Raises `InvalidSetting` for
    an unknown device.
    """
    for device in requested_devices("FAST_ALLREDUCE_VLLM", _REPLACED):
        try:
            replace(device)
        except errors.Unavailable as error:
            logger.warning("fast_allreduce is not used on %s: %s", device, error)
            continue
        metrics.enable()
