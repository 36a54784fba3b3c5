"""The communicators of a process group: one of the host, and one of a GPU after the first call with a tensor on it."""

import datetime

import torch

from .. import Communicator, UniqueId, errors, get_unique_id


def seconds(timeout):
    """Converts a limit, a `timedelta` or a number, to seconds."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)


def current_stream(device):
    """Returns torch's current stream of a GPU, or None for the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Devices:
    """The communicators of a process group, and the limit of their waits."""

    def __init__(self, host, timeout, ranks):
        self.host = host
        self.set_timeout(timeout)
        self._limit = timeout
        host.set_timeout(timeout)
        # The global rank of each rank, or None if they are equal.
        self._ranks = None if list(ranks) == list(range(len(ranks))) else list(ranks)
        self._gpu = self._device = None

    def set_timeout(self, timeout):
        """Sets the limit in seconds of calls that have none of their own.

        Raises `InvalidArgument` unless it is positive.
        """
        if timeout <= 0:
            raise errors.InvalidArgument(f"the timeout of a process group is {timeout} s, and must be positive")
        self.timeout = timeout

    def of(self, tensor):
        """Returns the communicator of a tensor's device. The first tensor on a GPU makes it, in a collective step."""
        return self.host if tensor.is_cpu else self.on(tensor.device)

    def on(self, device):
        """Returns the communicator of a GPU, which is made if there is none.

        Raises `InvalidArgument` for a second GPU.
        """
        if device == self._device:
            return self._gpu
        if device.type != "cuda":
            raise errors.InvalidArgument(f"a tensor is on {device}: cpu and cuda are supported")
        if self._gpu is not None:
            raise errors.InvalidArgument(
                f"a tensor is on {device}, and this group's rank on {self._device}: one GPU for each rank"
            )
        unique_id = bytearray(bytes(get_unique_id()) if self.host.rank == 0 else 128)
        self.host.broadcast(unique_id)
        name = f"cuda:{device.index}"
        self._gpu = Communicator.init(
            self.host.nranks, self.host.rank, UniqueId(bytes(unique_id)), name, timeout=self._limit
        )
        self._device = device
        return self._gpu

    def barrier(self):
        """Waits for the current stream and for all ranks."""
        if self._gpu is not None:
            # Work on the stream must have ended when the barrier returns.
            current_stream(self._device).synchronize()
            self._gpu.check()
        self.host.barrier()

    def limit(self, timeout):
        """Limits the waits of later calls, in seconds."""
        if timeout != self._limit:
            for communicator in self.each():
                communicator.set_timeout(timeout)
            self._limit = timeout

    def flight_record(self):
        """Returns the flight records of all communicators: a list of dicts."""
        return [communicator.flight_record() for communicator in self.each()]

    def behind(self):
        """Returns the ranks that have begun fewer calls than this one."""
        return sorted({rank for communicator in self.each() for rank in communicator.behind})

    def globally(self, ranks):
        """Converts ranks of the group to global ranks."""
        return ranks if self._ranks is None else [self._ranks[rank] for rank in ranks]

    def name_globally(self, error):
        """Adds the global ranks to an error that names ranks of the group, once."""
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
