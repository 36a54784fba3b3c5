"""Exceptions: a class for each kind of failure, with its facts as attributes.

An invalid argument raises `InvalidArgument`, which is a `ValueError`, on this rank alone and before the call begins.
The communicator stays usable. Any other error of a call poisons the communicator: each later call raises it again, at
once::

    try:
        communicator.allreduce(tensor)
    except fa.errors.Timeout as error:
        print(error.missing)    # ranks that did not take part
"""


class Error(Exception):
    """Base class of the exceptions of fast_allreduce."""

    def __init__(self, message: str = "", **fields):
        super().__init__(message)
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self):
        return (_restored, (type(self), str(self), self.__dict__))


def _restored(kind, message, fields):
    return kind(message, **fields)


class InvalidArgument(Error, ValueError):
    """An argument is invalid. The message names it and the reason."""


class WorldSize(InvalidArgument):
    """The number of ranks is zero or larger than `MAX_RANKS`. Field: world_size."""


class RankOutOfRange(InvalidArgument):
    """A rank is not below the number of ranks. Fields: rank, world_size."""


class LengthMismatch(InvalidArgument):
    """Input and output have different numbers of elements. Fields: input, output."""


class InvalidPointer(InvalidArgument):
    """An address is null, misaligned, or of another device. Fields: which, address, problem, element_size."""


class Overlap(InvalidArgument):
    """Buffers overlap without being the same. Fields: input, output, bytes."""


class InvalidSetting(InvalidArgument):
    """A setting has an unknown name or an invalid value. Fields: name, value, expected."""


class InvalidStream(InvalidArgument):
    """The stream is on another device than the communicator. Fields: stream, device."""


class Tuning(Error):
    """A tuning file cannot be used. Fields: file, reason."""


class Allocation(Error, MemoryError):
    """Shared memory could not be allocated. Fields: bytes, reason."""


class Timeout(Error, TimeoutError):
    """A wait for other ranks timed out. Fields: operation, epoch, missing (ranks), waited (seconds), last_seen."""


class PeerLost(Error, ConnectionError):
    """A rank's process has ended, or its communicator was closed. Fields: rank, reason."""


class PeerFailed(Error):
    """Another rank failed in a collective step or call. Fields: rank, reason."""


class Forked(Error):
    """This process is a fork of the one that made the communicator, which alone can use it."""


class Aborted(Error):
    """`Communicator.abort` was called, or a signal handler raised during the wait, as for Ctrl-C."""


class Rendezvous(Error, ConnectionError):
    """The ranks could not meet. Field: reason."""


class Refused(Error, PermissionError):
    """The rendezvous refused this process. Field: reason."""


class Malformed(Error):
    """A message of another rank cannot be decoded. Fields: rank, reason."""


class Disagreement(Error):
    """Ranks differ in a call or a setting. Fields: what, rank, theirs, own_rank, ours."""


class Unavailable(Error):
    """This build or this machine does not support the request. Fields: what, reason."""


class Driver(Error):
    """A call of the CUDA driver failed. Fields: call, code."""


class System(Error, OSError):
    """A system call failed. Fields: call, errno."""
