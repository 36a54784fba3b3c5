"""Code shared by the plugins for vLLM and SGLang: communicators, and the variables that turn the plugins on."""

import os

import torch

from . import __version__, errors
from .process_group import communicator_of

# Limit of each wait in seconds, the same as torch.distributed's with gloo. A rank of a server may be minutes late
# because of a compilation or a long prefill. A dead rank is detected without the limit.
TIMEOUT = 1800


def limit():
    """Returns the setting of a server's limit, or none if FAST_ALLREDUCE_TIMEOUT sets one."""
    return {} if os.environ.get("FAST_ALLREDUCE_TIMEOUT") else {"timeout": TIMEOUT}


def server_communicator_of(group, device="cpu"):
    """Makes a communicator like `communicator_of`, with the limit of servers."""
    return communicator_of(group, device, **limit())


def description(communicator, group):
    """Returns a line for a server's log: the communicator is used for a group, with these algorithms."""
    small, large = (communicator.plan(size // 2, torch.bfloat16)[0] for size in (16 << 10, 1 << 20))
    seconds = os.environ.get("FAST_ALLREDUCE_TIMEOUT") or TIMEOUT
    return (
        f"fast_allreduce {__version__} is used for the group {group}: rank {communicator.rank} of "
        f"{communicator.nranks} on {communicator.device}; allreduce of 16 KiB: {small}, "
        f"of 1 MiB: {large}, plan: {communicator.plan_source}; "
        f"a wait ends after {seconds} s (FAST_ALLREDUCE_TIMEOUT, 0: never)"
    )


def requested_devices(variable, known):
    """Returns the devices that an environment variable lists, such as "cpu,cuda".

    Raises `InvalidSetting` for an unknown one.
    """
    text = os.environ.get(variable, "")
    devices = [device for device in text.replace(" ", "").split(",") if device]
    for device in devices:
        if device not in known:
            expected = ", ".join(sorted(known)) + (", or a list of them" if len(known) > 1 else "")
            raise errors.InvalidSetting(
                f"{variable} = {text!r} is not valid: {device!r} is not one of {expected}",
                name=variable, value=text, expected=expected,
            )  # fmt: skip
    return devices
