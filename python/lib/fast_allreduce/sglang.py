"""A plugin for SGLang: this library runs the allreduce and all-gather of its CPU ranks.

SGLang loads it by its entry point (`sglang.srt.plugins`) in each of its processes. It changes nothing unless the
environment variable FAST_ALLREDUCE_SGLANG is "cpu". Then it hooks the methods of `GroupCoordinator`, by SGLang's own
registry of hooks, on every CPU and whatever operators `sgl_kernel` has, also in compiled graphs.
"""

import importlib
import inspect
import logging

from . import errors
from ._native import communicators
from .servers import description, requested_devices, server_communicator_of
from .tensors import REDUCED, as_moved

logger = logging.getLogger(__name__)

# The version of SGLang that has these methods.
VERSION = "0.5.23"

_COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"

# The attribute of a group that has its communicator.
_ATTRIBUTE = "fast_allreduce"

# The classes whose methods have hooks.
_hooked = []


def create(_, group, *arguments, **settings):
    """Runs after `GroupCoordinator.__init__`: makes a communicator of the group's ranks, or none on all of them."""
    setattr(group, _ATTRIBUTE, None)
    if group.world_size == 1 or group.device.type != "cpu":
        return
    try:
        # Imported late: a process without the plugin must not change.
        importlib.import_module("fast_allreduce.operators")
        communicator = server_communicator_of(group.cpu_group)
    except errors.Error as error:
        logger.warning("fast_allreduce is not used for the group %s: %s", group.unique_name, error)
        return
    # Compiled graphs contain the name. SGLang's are unique: a taken one is of a group that no longer exists.
    communicators.pop(f"sglang {group.unique_name}", None)
    communicator.name = f"sglang {group.unique_name}"
    setattr(group, _ATTRIBUTE, communicator)
    logger.info("%s", description(communicator, group.unique_name))


def all_reduce(own, group, input_):
    """Runs in place of `GroupCoordinator.all_reduce`: sums a tensor over the ranks, in place, and returns it."""
    communicator = getattr(group, _ATTRIBUTE, None)
    if communicator is None or not input_.is_cpu or input_.dtype not in REDUCED:
        return own(group, input_)
    if input_.is_contiguous():
        communicator.allreduce(input_)
    else:
        data = input_.contiguous()
        communicator.allreduce(data)
        input_.copy_(data)
    return input_


def all_gather(own, group, input_, dim=-1, output_tensor_list=None):
    """Runs in place of `GroupCoordinator.all_gather`: returns the ranks' tensors, concatenated along a dimension."""
    communicator = getattr(group, _ATTRIBUTE, None)
    if communicator is None or not input_.is_cpu or output_tensor_list is not None or input_.dim() == 0:
        return own(group, input_, dim, output_tensor_list)
    dim = dim + input_.dim() if dim < 0 else dim
    gathered = input_.new_empty((communicator.nranks, *input_.shape))
    communicator.allgather(as_moved(input_.contiguous()), as_moved(gathered))
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def destroy(_, group):
    """Runs after `GroupCoordinator.destroy`."""
    communicator = getattr(group, _ATTRIBUTE, None)
    if communicator is not None:
        communicator.destroy()


# Each method with its hook, when that runs, and the arguments that it expects.
_HOOKS = {
    "__init__": (create, "AFTER", None),
    "all_reduce": (all_reduce, "AROUND", ["self", "input_"]),
    "all_gather": (all_gather, "AROUND", ["self", "input_", "dim", "output_tensor_list"]),
    "destroy": (destroy, "AFTER", ["self"]),
}


def replace():
    """Registers the hooks. SGLang applies them when it has loaded all plugins. A second call does nothing.

    Raises `Unavailable`, and registers none, if a method is missing or has other arguments.
    """
    where, name = _COORDINATOR.rsplit(".", 1)
    try:
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        coordinator = getattr(importlib.import_module(where), name)
        if coordinator in _hooked:
            return
        for method, (_, _, expected) in _HOOKS.items():
            found = list(inspect.signature(getattr(coordinator, method)).parameters)
            if expected is not None and found != expected:
                raise AttributeError(f"{method} has the arguments {found}, not {expected}")
    except (ImportError, AttributeError) as error:
        raise errors.Unavailable(
            f"this is not SGLang {VERSION}, for which the plugin was written: {error}",
            what="SGLang's groups", reason="not found",
        ) from error  # fmt: skip
    _hooked.append(coordinator)
    for method, (hook, kind, _) in _HOOKS.items():
        registry.HookRegistry.register(f"{_COORDINATOR}.{method}", hook, registry.HookType[kind])


def register():
    """Registers the hooks if FAST_ALLREDUCE_SGLANG asks for it. SGLang calls it in each of its processes.

    Raises `InvalidSetting` for an unknown device, and `Unavailable` as `replace` does.
    """
    if requested_devices("FAST_ALLREDUCE_SGLANG", ("cpu",)):
        replace()
