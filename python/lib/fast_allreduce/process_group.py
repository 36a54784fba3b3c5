"""Communicators of the ranks of a torch process group: the group carries the id, whatever its backend is."""

import os
import socket

import torch

from . import MAX_RANKS, Communicator, UniqueId, errors, get_unique_id

# What a rank may say to the others at a time.
_BYTES = 1024


def node():
    """Names the machine, and the network namespace that ranks meet in."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            machine = boot.read().strip()
        return f"{socket.gethostname()} {machine} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def check_size(size):
    """Raises if a communicator cannot have so many ranks."""
    if size > MAX_RANKS:
        raise errors.WorldSize(
            f"fast_allreduce has at most {MAX_RANKS} ranks, and this group has {size}: use gloo, or nccl on GPUs, for it",
            world_size=size,
        )


def check_nodes(rank, nodes):
    """Raises if the ranks, by what `node` says on each, are not on one machine."""
    for other, theirs in enumerate(nodes):
        if theirs != nodes[rank]:
            raise errors.InvalidArgument(
                f"fast_allreduce is for the ranks of one machine: rank {rank} is on {nodes[rank]!r}, rank {other} on {theirs!r}; "
                "use gloo, or nccl on GPUs, between machines, and this for a group of each machine's ranks"
            )


def _exchanged(group, text):
    """What each rank says, in the order of the ranks."""
    mine = torch.zeros(_BYTES, dtype=torch.uint8)
    said = text.encode()[:_BYTES]
    mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    heard = [torch.empty_like(mine) for _ in range(group.size())]
    # By the group's own call: torch.distributed's functions take only groups that it has a name for.
    group.allgather([heard], [mine]).wait()
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in heard]


def communicator_of(group, device="cpu", **settings):
    """Makes a communicator of the ranks of `group`, which must carry tensors on the CPU, as gloo does. Collective.

    `settings` are those of `Communicator.init`. Either all ranks get one or all raise: the one that failed its own error, the
    others `PeerFailed`, which names it.
    """
    rank, size = group.rank(), group.size()
    check_size(size)
    said = _exchanged(group, f"{get_unique_id() if rank == 0 else ''}|{node()}")
    unique_id = said[0].partition("|")[0]
    check_nodes(rank, [one.partition("|")[2] for one in said])
    communicator = failure = None
    try:
        communicator = Communicator.init(size, rank, UniqueId(unique_id), device, **settings)
    except errors.Error as error:
        failure = error
    failures = _exchanged(group, str(failure or ""))
    if failure is not None:
        raise failure
    for other, reason in enumerate(failures):
        if reason:
            communicator.destroy()
            raise errors.PeerFailed(f"rank {other} could not join: {reason}", rank=other, reason=reason)
    return communicator
