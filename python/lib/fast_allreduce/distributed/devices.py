"""The communicators of a process group: the host's, and one of a GPU once a tensor on it comes."""

import datetime

import torch

from .. import Communicator, UniqueId, errors, get_unique_id


def seconds(timeout):
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)


def current_stream(device):
    """Where calls with tensors of a GPU are put; None for the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Devices:
    def __init__(self, host, timeout, ranks):
        self.host = host
        # Of calls that name none, in seconds.
        self.timeout = timeout
        self._limit = timeout
        host.set_timeout(timeout)
        # Each rank's number in the world, if it is not that in the group.
        self._ranks = None if list(ranks) == list(range(len(ranks))) else list(ranks)
        self._gpu = self._device = None

    def of(self, tensor):
        """The communicator for a tensor. The first one on a GPU makes one: a collective step."""
        return self.host if tensor.is_cpu else self.on(tensor.device)

    def on(self, device):
        if device == self._device:
            return self._gpu
        if device.type != "cuda":
            raise errors.InvalidArgument(f"a tensor is on {device}: cpu and cuda are supported")
        if self._gpu is not None:
            raise errors.InvalidArgument(f"a tensor is on {device}, and this group's rank on {self._device}: one GPU for each rank")
        unique_id = bytearray(bytes(get_unique_id()) if self.host.rank == 0 else 128)
        self.host.broadcast(unique_id)
        name = f"cuda:{device.index}"
        self._gpu = Communicator.init(
            self.host.nranks, self.host.rank, UniqueId(bytes(unique_id)), name, timeout=self._limit
        )
        self._device = device
        return self._gpu

    def barrier(self):
        if self._gpu is not None:
            # What was put on the stream is over when the barrier is.
            current_stream(self._device).synchronize()
            self._gpu.check()
        self.host.barrier()

    def limit(self, timeout):
        """Limits the waits of the calls that follow: seconds."""
        if timeout != self._limit:
            for communicator in self.each():
                communicator.set_timeout(timeout)
            self._limit = timeout

    def behind(self):
        """Ranks that have begun fewer calls than this one."""
        return sorted({rank for communicator in self.each() for rank in communicator.behind})

    def globally(self, ranks):
        """The numbers in the world of ranks of the group."""
        return ranks if self._ranks is None else [self._ranks[rank] for rank in ranks]

    def name_globally(self, error):
        """Adds to an error about ranks of the group which ranks of the world they are, once."""
        if self._ranks is None or hasattr(error, "global_ranks"):
            return
        named = getattr(error, "missing", None) or [rank for rank in [getattr(error, "rank", None)] if rank is not None]
        if named:
            error.global_ranks = self.globally(named)
            told = ", ".join(
                f"rank {rank} of the group (global rank {number})" for rank, number in zip(named, error.global_ranks)
            )
            error.args = (f"{told}: {error}",)

    def each(self):
        return [one for one in (self._gpu, self.host) if one is not None]

    def abort(self):
        for communicator in self.each():
            communicator.abort()

    def destroy(self):
        for communicator in self.each():
            communicator.destroy()
