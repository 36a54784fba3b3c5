"""Communicators of the ranks of a torch process group: the group carries the id, whatever its backend is."""

import os
import socket

import torch

from . import MAX_RANKS, Communicator, UniqueId, errors, get_unique_id

# What a rank may say to the others at a time.
_BYTES = 1024

# Names a directory to meet in.
_DIRECTORY = "FAST_ALLREDUCE_SOCKET_DIR"


def node():
    """Says where this rank is: its machine, its network namespace, and the directory that it would meet others in.

    A host's name does not tell a machine, as containers on one have names of their own. It stands in where the kernel tells nothing.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            machine = boot.read().strip()
    except OSError:
        machine = socket.gethostname()
    return " ".join((machine, _identity("/proc/self/ns/net"), _identity(os.environ.get(_DIRECTORY) or None)))


def _identity(path):
    """What tells a file from all others of the machine, by whichever path; "-" if there is none."""
    try:
        status = os.stat(path)
    except (OSError, TypeError):
        return "-"
    return f"{status.st_dev}:{status.st_ino}"


def check_size(size):
    """Raises if a communicator cannot have so many ranks."""
    if size > MAX_RANKS:
        raise errors.WorldSize(
            f"fast_allreduce has at most {MAX_RANKS} ranks, and this group has {size}: use gloo, or nccl on GPUs, for it",
            world_size=size,
        )


def check_nodes(rank, nodes):
    """Raises if the ranks, by what `node` says on each, cannot meet: on several machines, or behind several networks."""
    machine, network, directory = nodes[rank].split(" ")
    for other, theirs in enumerate(nodes):
        their_machine, their_network, their_directory = theirs.split(" ")
        if their_machine != machine:
            raise errors.InvalidArgument(
                f"fast_allreduce is for the ranks of one machine: rank {rank} is on {machine!r}, rank {other} on {their_machine!r}; "
                "use gloo, or nccl on GPUs, between machines, and this for a group of each machine's ranks"
            )
        if their_directory != directory:
            raise errors.InvalidArgument(
                f"{_DIRECTORY} is another directory on rank {other} than on rank {rank}, or is set on one of them alone: "
                "ranks meet in one directory that all share"
            )
        if their_network != network and directory == "-":
            raise errors.InvalidArgument(
                f"rank {rank} and rank {other} are on one machine and in network namespaces of their own (containers): have all ranks "
                f"share a directory, and name it in {_DIRECTORY}"
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
