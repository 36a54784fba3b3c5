"""A plugin for vLLM: its allreduce within a machine, on GPUs and on CPUs, by this library.

vLLM finds it by its entry point (`vllm.general_plugins`) in each of its processes. It changes nothing unless the environment
variable FAST_ALLREDUCE_VLLM says what it is to replace: "cpu", "cuda", or both, "cpu,cuda".

On GPUs it stands in for `CustomAllreduce`: no buffers are registered and no size or address is refused, in CUDA graphs neither.
On CPUs it stands in for `_CPUSHMDistributed`. Sums are taken in the order of the ranks, in f32, and rounded once: what vLLM's
batch-invariant mode asks for holds at any size, so that no call of it is left to another library.
"""

import importlib
import json
import logging
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist

from . import MAX_RANKS, errors, group
from ._native import communicators
from .servers import description, server_communicator_of
from .tensors import as_moved

# Below vLLM's own logger: what is of level INFO is shown by default.
logger = logging.getLogger("vllm.plugins.fast_allreduce")

_REDUCED = (torch.float32, torch.float16, torch.bfloat16)

# As many messages as go into one launch.
_MESSAGES = 64

# The groups of this process whose calls are this library's.
_groups = set()


def _joined(process_group, device, name):
    """A communicator for the group that vLLM names so, or None on all ranks, where vLLM goes on without."""
    try:
        if device == "cpu":
            # On GPUs vLLM's own operators are in the graphs. Not before: a process that does not ask for the plugin is as without it.
            importlib.import_module("fast_allreduce.operators")
        communicator = server_communicator_of(process_group, device)
    except errors.Error as error:
        logger.warning("fast_allreduce is not used for the group %s on %s: %s", name, device, error)
        return None
    # Graphs that vLLM keeps for other processes have this name. vLLM's are unique: one that is taken is of a group that is gone.
    communicators.pop(f"vllm {name}", None)
    communicator.name = f"vllm {name}"
    _groups.add(name)
    logger.info("%s", description(communicator, name))
    return communicator


def compiled_with():
    """Tells apart graphs with this library's operators, for the keys by which vLLM keeps compiled code."""
    from .operators import IDENTITY

    return f"{IDENTITY}, groups {sorted(_groups)}"


def _is_dense(tensor):
    """Whether its elements are one block of memory, in any order: what vLLM calls weakly contiguous."""
    if tensor.is_contiguous():
        return True
    rest = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return rest == tensor.numel() * tensor.element_size()


def _block(tensor):
    """A dense tensor's memory as one row."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class CustomAllreduceCalls:
    """The calls that vLLM makes of `CustomAllreduce`. The class that stands in for it also has that as a base."""

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
        # Whoever asks for these would call vLLM's own kernels with buffers that are not there.
        self.fully_connected = False
        self._ptr = self.mnnvl_multicast_ptr = self.mnnvl_lamport_ag_multicast_ptr = 0
        if 1 < self.world_size <= MAX_RANKS:
            self._communicator = _joined(group, str(self.device), f"{group.group_name} of {self.device}")
            self.disabled = self._communicator is None

    def finalize_p2p(self):
        """Some versions of vLLM have a second step of making it, which this has not."""

    def _stream(self):
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def capture(self):
        """Around the capture of CUDA graphs: any buffer can be captured, and none needs to be registered."""
        yield

    def register_graph_buffers(self):
        """Nothing: graphs hold addresses of this library's own memory alone."""

    def _fits(self, tensor, limit):
        return (
            not self.disabled
            and tensor.dtype in _REDUCED
            and (self.batch_invariant or tensor.nbytes <= limit)
            and _is_dense(tensor)
        )

    def should_custom_ar(self, inp):
        return self._fits(inp, self.max_size)

    def all_reduce(self, inp, *, out=None, registered=False):
        out = torch.empty_like(inp) if out is None else out
        if out.stride() != inp.stride():
            # One that only looks dense, or an output of another layout.
            data = inp.contiguous()
            data = data.clone() if data is inp else data
            self._communicator.allreduce(data, stream=self._stream())
            return out.copy_(data)
        self._communicator.allreduce(_block(inp), _block(out), stream=self._stream())
        return out

    def custom_all_reduce(self, input):
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def should_custom_all_gather(self, inp):
        return self._fits(inp, self.max_all_gather_size) and inp.dim() > 0 and inp.is_contiguous()

    def custom_all_gather(self, inp):
        if not self.should_custom_all_gather(inp):
            return None
        out = inp.new_empty((inp.shape[0] * self.world_size, *inp.shape[1:]))
        self._communicator.allgather(inp, out, stream=self._stream())
        return out

    def should_custom_reduce_scatter(self, inp):
        fits = self._fits(inp, self.max_reduce_scatter_size) and inp.dim() > 0 and inp.is_contiguous()
        return fits and inp.shape[0] % self.world_size == 0

    def should_mnnvl_multimem_reduce_scatter(self, inp):
        return False

    def custom_reduce_scatter(self, inp):
        if not self.should_custom_reduce_scatter(inp):
            return None
        out = inp.new_empty((inp.shape[0] // self.world_size, *inp.shape[1:]))
        self._communicator.reduce_scatter(inp, out, stream=self._stream())
        return out

    def close(self):
        self.disabled = True
        communicator, self._communicator = getattr(self, "_communicator", None), None
        if communicator is not None:
            communicator.destroy()

    def __del__(self):
        self.close()


class SharedMemoryCalls:
    """The calls that vLLM makes of `_CPUSHMDistributed`. Where the ranks cannot have a communicator, that answers them."""

    def __init__(self, communicator):
        group = communicator.device_group
        self._ranks = _joined(group, "cpu", getattr(communicator, "unique_name", group.group_name))
        self._members = dist.get_process_group_ranks(group)
        if self._ranks is None:
            super().__init__(communicator)
        else:
            self.communicator = communicator

    def all_reduce(self, input, group=None):
        if self._ranks is None:
            return super().all_reduce(input, group=group)
        if input.is_contiguous():
            self._ranks.allreduce(input)
        else:
            data = input.contiguous()
            self._ranks.allreduce(data)
            input.copy_(data)
        return None

    def gather(self, input, gather_list, dst=-1, group=None):
        if self._ranks is None:
            return super().gather(input, gather_list, dst=dst, group=group)
        # `dst` is a rank of the world, and the root one of the group.
        root = self._members.index(dst)
        part = as_moved(input.contiguous())
        flat = part.new_empty((self._ranks.nranks, part.numel())) if self._ranks.rank == root else None
        self._ranks.gather(part, flat, root)
        if flat is not None:
            for output, row in zip(gather_list, flat, strict=True):
                output.copy_(row.view(input.dtype).view(input.shape))
        return None

    def all_gather_into_tensor(self, output, input, group=None):
        if self._ranks is None:
            return super().all_gather_into_tensor(output, input, group=group)
        self._ranks.allgather(as_moved(input.contiguous()), as_moved(output))
        return None

    def send_tensor_dict(self, tensor_dict, dst):
        if self._ranks is None:
            return super().send_tensor_dict(tensor_dict, dst)
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
        if self._ranks is None:
            return super().recv_tensor_dict(src)
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
        # Both sides leave out the same ones.
        tensors = [as_moved(tensor) for tensor in tensors if tensor.numel() > 0]
        for start in range(0, len(tensors), _MESSAGES):
            with group():
                for tensor in tensors[start : start + _MESSAGES]:
                    call(tensor, peer)


# Where the classes are, and the version of vLLM that has them.
_COMMUNICATORS = "vllm.distributed.device_communicators"
_REPLACED = {
    "cuda": (f"{_COMMUNICATORS}.custom_all_reduce", "CustomAllreduce", CustomAllreduceCalls, "0.33.0"),
    "cpu": (f"{_COMMUNICATORS}.cpu_communicator", "_CPUSHMDistributed", SharedMemoryCalls, "0.32.0 and 0.33.0"),
}


def _found(where, name, version):
    found = getattr(importlib.import_module(where), name, None)
    if found is None:
        raise errors.Unavailable(
            f"{where} has no {name}: this plugin was written for vLLM {version}", what=f"vLLM's {name}", reason="not there"
        )
    return found


def replace(device):
    """Puts this library's class in place of vLLM's for a kind of device, "cpu" or "cuda". A second time is nothing."""
    where, name, calls, version = _REPLACED[device]
    original = _found(where, name, version)
    if device == "cpu":
        # vLLM keeps compiled code by keys in which all of its environment variables are. Without this one, code that was compiled
        # with this library's operators would be taken for code with vLLM's, and the other way round.
        _found("vllm.envs", "environment_variables", version)["FAST_ALLREDUCE_VLLM"] = compiled_with
    if not issubclass(original, calls):
        replaced = type(name, (calls, original), {"__module__": __name__, "__doc__": calls.__doc__})
        setattr(importlib.import_module(where), name, replaced)


def register():
    """What vLLM calls in each of its processes, maybe several times."""
    for device in filter(None, os.environ.get("FAST_ALLREDUCE_VLLM", "").replace(" ", "").split(",")):
        if device not in _REPLACED:
            raise errors.InvalidSetting(
                f"FAST_ALLREDUCE_VLLM names {device!r}: cpu and cuda are known, and a list of both",
                name="FAST_ALLREDUCE_VLLM", value=device, expected="cpu, cuda or cpu,cuda",
            )  # fmt: skip
        replace(device)
