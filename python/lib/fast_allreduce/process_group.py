"""Communicators of the ranks of a torch process group. The group, whatever its backend, carries the id to the ranks."""

import functools
import os
import socket

import torch

from . import MAX_RANKS, Communicator, UniqueId, errors, get_unique_id

# Largest message of a rank to the others, in bytes.
_BYTES = 1024

# The variable that names a directory in which ranks meet.
_DIRECTORY = "FAST_ALLREDUCE_SOCKET_DIR"


def node():
    """Returns this rank's location as text: its machine, its network namespace, and its directory to meet in.

    The kernel's boot id identifies a machine. Host names do not, because containers of one machine have different ones.
    The host name is used only if the kernel gives no boot id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            machine = boot.read().strip()
    except OSError:
        machine = socket.gethostname()
    return " ".join((machine, _identity("/proc/self/ns/net"), _identity(os.environ.get(_DIRECTORY) or None)))


def _identity(path):
    """Returns text that identifies a file on this machine, whichever path names it, or "-" if there is none."""
    try:
        status = os.stat(path)
    except (OSError, TypeError):
        return "-"
    return f"{status.st_dev}:{status.st_ino}"


def check_size(size):
    """Raises `WorldSize` if a communicator cannot have this number of ranks."""
    if size > MAX_RANKS:
        raise errors.WorldSize(
            f"fast_allreduce has at most {MAX_RANKS} ranks, and this group has {size}: use gloo, or nccl on GPUs",
            world_size=size,
        )


def check_nodes(rank, nodes):
    """Raises `InvalidArgument` if the ranks cannot meet: on several machines, or in several networks without a
    directory.

    `nodes[r]` is the result of `node()` on rank r, and `rank` is this rank.
    """
    machine, network, directory = nodes[rank].split(" ")
    for other, theirs in enumerate(nodes):
        their_machine, their_network, their_directory = theirs.split(" ")
        if their_machine != machine:
            raise errors.InvalidArgument(
                f"fast_allreduce is for the ranks of one machine: rank {rank} is on {machine!r}, rank {other} on "
                f"{their_machine!r}; use gloo, or nccl on GPUs, between machines, and this within each machine"
            )
        if their_directory != directory:
            raise errors.InvalidArgument(
                f"{_DIRECTORY} names another directory on rank {other} than on rank {rank}, or only one of them sets "
                "it: all ranks need the same directory"
            )
        if their_network != network and directory == "-":
            raise errors.InvalidArgument(
                f"rank {rank} and rank {other} are on one machine, in different network namespaces (containers): let "
                f"all ranks share a directory, and name it in {_DIRECTORY}"
            )


def machines(nodes):
    """Returns the machine of each rank, numbered in the order of their first ranks.

    `nodes[r]` is the result of `node()` on rank r.
    """
    names = [node.partition(" ")[0] for node in nodes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def check_machines(of_ranks):
    """Raises `InvalidArgument` unless each machine has equally many consecutive ranks, and not too many.

    `of_ranks[r]` is the machine of rank r.
    """
    count = max(of_ranks) + 1
    each = [of_ranks.count(machine) for machine in range(count)]
    if min(each) != max(each):
        raise errors.InvalidArgument(
            f"fast_allreduce needs equally many ranks on each machine, and these have {', '.join(map(str, each))}: "
            "start the same number on each, or use gloo"
        )
    check_size(each[0])
    if of_ranks != sorted(of_ranks):
        raise errors.InvalidArgument(
            f"ranks of a machine must be consecutive, and the machines of the ranks are {of_ranks}: number the ranks "
            "machine by machine"
        )


def _exchanged(group, text):
    """Returns each rank's text, in rank order."""
    mine = torch.zeros(_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    received = [torch.empty_like(mine) for _ in range(group.size())]
    # By the group's method: torch.distributed's functions take only groups that it has a name for.
    group.allgather([received], [mine]).wait()
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in received]


def communicator_of(group, device="cpu", **settings):
    """Returns a communicator of the ranks of a process group. Collective.

    `group` must carry CPU tensors, as gloo does. `settings` are those of `Communicator.init`. If a rank fails, all
    ranks raise: that rank its error, the others one that names the rank (`PeerFailed`, `PeerLost`)::

        communicator = communicator_of(dist.new_group(backend="gloo"), "cuda:0")
    """
    return communicator_among(group.rank(), group.size(), functools.partial(_exchanged, group), device, **settings)


def communicator_among(rank, size, exchange, device="cpu", **settings):
    """Returns a communicator like `communicator_of`, of ranks that reach each other by a function. Collective.

    `exchange(text)` returns the texts of all ranks, in rank order, on each of them.
    """
    check_size(size)
    texts = exchange(f"{get_unique_id() if rank == 0 else ''}|{node()}")
    unique_id = texts[0].partition("|")[0]
    check_nodes(rank, [text.partition("|")[2] for text in texts])

    def init(size, rank):
        return Communicator.init(size, rank, UniqueId(unique_id), device, **settings)

    communicator = failure = None
    try:
        # No world has 0 ranks. Errors of the settings come first: ranks that joined would wait for this one.
        init(0, 0)
    except errors.WorldSize:
        pass
    except (errors.Error, TypeError) as error:
        failure = error
    _raise(failure, exchange(str(failure or "")))
    try:
        communicator = init(size, rank)
    except errors.Error as error:
        failure = error
    failures = exchange(str(failure or ""))
    try:
        _raise(failure, failures)
    except errors.PeerFailed:
        if communicator is not None:
            communicator.destroy()
        raise
    return communicator


def _raise(failure, failures):
    """Raises this rank's failure, else `PeerFailed` with the first rank that has failed, if any."""
    if failure is not None:
        raise failure
    for other, reason in enumerate(failures):
        if reason:
            raise errors.PeerFailed(f"rank {other} could not join: {reason}", rank=other, reason=reason)
