"""Stand-ins for the classes of vLLM on GPUs and of SGLang that call this package, written from their interfaces.

They have the original names and make the same calls in the same order, and contain nothing else.
"""

import sys
import types
from contextlib import nullcontext

import torch
import torch.distributed as dist

VLLM = "vllm.distributed.device_communicators"

# The modules that were created.
_made = []


def _modules(*names):
    """Creates modules of these names, and their packages."""
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                module = sys.modules[path] = types.ModuleType(path)
                module.__path__ = []
                _made.append(path)
                if length > 1:
                    setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], module)


class CustomAllreduce:
    """vLLM's class, which the plugin replaces and so nobody creates."""

    def __init__(self, group, device, max_size=0, **settings):
        raise AssertionError("vLLM's own CustomAllreduce was made")

    @staticmethod
    def create_shared_buffer(size_in_bytes, group=None, uncached=False):
        return ["vLLM's own"]


class CudaCommunicator:
    """vLLM's class that creates and calls `CustomAllreduce`."""

    def __init__(self, group, device):
        # Looked up when the communicator is made, as in vLLM.
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce as Found

        self.others = 0
        self.ca_comm = Found(group=group, device=device, symm_mem_enabled=False, register_graph_buffers=True)

    def capture(self):
        return self.ca_comm.capture() if self.ca_comm is not None else nullcontext()

    def all_reduce(self, input_):
        if not self.ca_comm.disabled and self.ca_comm.should_custom_ar(input_):
            out = self.ca_comm.custom_all_reduce(input_)
            assert out is not None
            return out
        self.others += 1
        out = input_.clone()
        dist.all_reduce(out)
        return out

    def all_gather(self, input_):
        return self.ca_comm.custom_all_gather(input_.contiguous())

    def reduce_scatter(self, input_):
        return self.ca_comm.custom_reduce_scatter(input_.contiguous())


def vllm():
    """Creates the modules that the plugin reads."""
    _modules(f"{VLLM}.custom_all_reduce", "vllm.envs")
    sys.modules["vllm.envs"].environment_variables = {}
    sys.modules[f"{VLLM}.custom_all_reduce"].CustomAllreduce = CustomAllreduce


class GroupCoordinator:
    """SGLang's class of a group, for CPU ranks. It records its own calls."""

    def __init__(self, group):
        self.cpu_group, self.world_size, self.unique_name = group, group.size(), "tp:0"
        self.device = torch.device("cpu")
        self.own = []

    def all_reduce(self, input_):
        self.own.append("all_reduce")
        dist.all_reduce(input_, group=self.cpu_group)
        return input_

    def all_gather(self, input_, dim=-1, output_tensor_list=None):
        self.own.append("all_gather")
        return dist.all_gather(output_tensor_list, input_, group=self.cpu_group)

    def destroy(self):
        self.cpu_group = None


class HookRegistry:
    """SGLang's registry, for methods. It applies hooks at once."""

    @staticmethod
    def register(target, hook, hook_type):
        where, name, method = target.rsplit(".", 2)
        owner = getattr(sys.modules[where], name)
        own = getattr(owner, method)

        def around(*arguments, **named):
            return hook(own, *arguments, **named)

        def after(*arguments, **named):
            hook(own(*arguments, **named), *arguments, **named)

        setattr(owner, method, {"AROUND": around, "AFTER": after}[hook_type])


def sglang():
    """Creates the modules that the plugin reads. Returns the class of groups."""
    state, registry = "sglang.srt.distributed.parallel_state", "sglang.srt.plugins.hook_registry"
    _modules(state, registry)
    sys.modules[registry].HookRegistry = HookRegistry
    sys.modules[registry].HookType = {"AROUND": "AROUND", "AFTER": "AFTER"}
    sys.modules[state].GroupCoordinator = type("GroupCoordinator", (GroupCoordinator,), {})
    return sys.modules[state].GroupCoordinator


def forget():
    """Removes all stand-ins from the process, and the plugins' replacements."""
    while _made:
        sys.modules.pop(_made.pop(), None)
    plugin = sys.modules.get("fast_allreduce.vllm")
    if plugin is not None:
        plugin._groups.clear()
    plugin = sys.modules.get("fast_allreduce.sglang")
    if plugin is not None:
        plugin._hooked.clear()
