"""What goes wrong: an exception for each way, with the facts to act on as attributes.

Arguments are refused on this rank alone, before anything is done, as `InvalidArgument`, a `ValueError`; the communicator goes
on. Any other error poisons the communicator: each later call raises it again, at once.
"""


class Error(Exception):
    """Any error of fast_allreduce."""

    def __init__(self, message: str = "", **fields):
        super().__init__(message)
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self):
        return (_restored, (type(self), str(self), self.__dict__))


def _restored(kind, message, fields):
    return kind(message, **fields)


class InvalidArgument(Error, ValueError):
    """An argument that no call could use: the message says which and why."""


class WorldSize(InvalidArgument):
    """More ranks than are supported, or none. Field: world_size."""


class RankOutOfRange(InvalidArgument):
    """A rank is not below the number of ranks. Fields: rank, world_size."""


class LengthMismatch(InvalidArgument):
    """Input and output have different numbers of elements. Fields: input, output."""


class InvalidPointer(InvalidArgument):
    """An address is null, misaligned, or of another device. Fields: which, address, problem, element_size."""


class Overlap(InvalidArgument):
    """Buffers overlap in another way than in place. Fields: input, output, bytes."""


class InvalidSetting(InvalidArgument):
    """A setting is out of its range. Fields: name, value, expected."""


class InvalidStream(InvalidArgument):
    """The stream is of another device than the communicator. Fields: stream, device."""


class Tuning(Error):
    """A tuning file cannot be used. Fields: file, reason."""


class Allocation(Error, MemoryError):
    """Shared memory could not be allocated. Fields: bytes, reason."""


class Timeout(Error, TimeoutError):
    """Ranks did not come in time. Fields: operation, epoch, missing (ranks), waited (seconds), last_seen."""


class PeerLost(Error, ConnectionError):
    """A rank's process has ended, or its communicator was closed. Fields: rank, reason."""


class PeerFailed(Error):
    """A step failed on another rank. Fields: rank, reason."""


class Forked(Error):
    """This process is a fork of the one that made the communicator: only that one can use it."""


class Aborted(Error):
    """`Communicator.abort` was called, or Ctrl-C ended the wait."""


class Rendezvous(Error, ConnectionError):
    """The ranks could not meet. Field: reason."""


class Refused(Error, PermissionError):
    """The rendezvous refused this process. Field: reason."""


class Malformed(Error):
    """A rank sent something that does not decode. Fields: rank, reason."""


class Disagreement(Error):
    """Ranks make different calls or have different settings. Fields: what, rank, theirs, own_rank, ours."""


class Unavailable(Error):
    """This build or this machine cannot do it. Fields: what, reason."""


class Driver(Error):
    """The CUDA driver refused a call. Fields: call, code."""


class System(Error, OSError):
    """A system call failed. Fields: call, errno."""
