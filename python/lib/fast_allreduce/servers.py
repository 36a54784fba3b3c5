"""Communicators of servers: what the plugins for vLLM and SGLang share."""

import os

import torch

from . import __version__
from .process_group import communicator_of

# The limit of each wait in seconds, as torch.distributed's for gloo. A rank of a server may be minutes late, in a compilation or a
# long prefill; one that has died is noticed without it.
TIMEOUT = 1800


def server_communicator_of(group, device="cpu"):
    """Makes a communicator as `communicator_of`, with the limit of servers unless FAST_ALLREDUCE_TIMEOUT gives one."""
    limit = {} if os.environ.get("FAST_ALLREDUCE_TIMEOUT") else {"timeout": TIMEOUT}
    return communicator_of(group, device, **limit)


def description(communicator, group):
    """Says in a line for a server's log that a communicator is used for a group, and with which plan."""
    small, large = (communicator.plan(size // 2, torch.bfloat16)[0] for size in (16 << 10, 1 << 20))
    limit = os.environ.get("FAST_ALLREDUCE_TIMEOUT") or TIMEOUT
    return (
        f"fast_allreduce {__version__} is used for the group {group}: rank {communicator.rank} of {communicator.nranks} on "
        f"{communicator.device}; allreduce of 16 KiB: {small}, of 1 MiB: {large}, plan: {communicator.plan_source}; "
        f"a wait ends after {limit} s (FAST_ALLREDUCE_TIMEOUT, 0: never)"
    )
