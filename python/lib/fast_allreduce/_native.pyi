"""The compiled part of fast_allreduce. Its names are also those of the package."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Union
from weakref import WeakValueDictionary

from typing_extensions import Unpack

from ._catalogue import Settings

__version__: str
MAX_RANKS: int
communicators: WeakValueDictionary[str, Communicator]

class _Interface(Protocol):
    __array_interface__: dict[str, Any]

class _CudaInterface(Protocol):
    __cuda_array_interface__: dict[str, Any]

class _Dlpack(Protocol):
    def __dlpack__(self, **arguments: Any) -> Any: ...

# torch tensors, numpy arrays, bytearray, memoryview, CuPy arrays, ...; contiguous, and writable where they are written.
_Buffer = Union[_Interface, _CudaInterface, _Dlpack, RawBuffer, bytes, bytearray, memoryview, Any]
_Op = str  # a ReduceOp, or its name: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor"; what premul_sum() gives
# A cudaStream_t, or an object of torch, CuPy or cuda.core. Of calls on a GPU alone.
_Stream = Union[int, Any]

def get_unique_id() -> UniqueId:
    """Makes an id, once for each world. The process that made it must run until all ranks have met."""

def build_facts() -> list[tuple[str, str]]:
    """What this build was made with, by name."""

class UniqueId:
    """Names a world. It travels as `bytes(id)` or `str(id)`, and can be pickled.

    Whoever knows it, as the same user, can join the world.
    """

    def __init__(self, of: bytes | str) -> None: ...
    def __bytes__(self) -> bytes: ...
    def __hash__(self) -> int: ...

class RawBuffer:
    """Memory by its address. It must stay what it is for as long as it is used, and nothing checks that.

    It names no stream: a call with one on a GPU needs `stream`.
    """

    def __init__(
        self, address: int, count: int, dtype: Any, *, device: str = "cpu", readonly: bool = False
    ) -> None: ...

class RegisteredBuffer:
    """Memory that all ranks allocated together: calls pull from it without a copy. See `Communicator.alloc`.

    `numpy.asarray(buffer)` is its bytes; `.view(numpy.float32)` has them as numbers, and `torch.from_numpy` as a tensor.
    """

    @property
    def address(self) -> int:
        """Of its first byte, on its device."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""

    @property
    def device(self) -> str:
        """Such as "cpu" or "cuda:0"."""

    def __len__(self) -> int: ...

class Counters:
    """What a rank has done so far."""

    @property
    def calls(self) -> int:
        """Collective calls begun."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's messages."""

    @property
    def waits(self) -> list[int]:
        """Waits for each rank that outlasted the first polls."""

    @property
    def timeouts(self) -> list[int]:
        """Waits for each rank that ended in a timeout."""

class Group:
    """What `fast_allreduce.group()` gives: a context manager for messages that go together."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

class Communicator:
    """One rank of a world.

    Every rank makes the same calls in the same order, with the same counts, types and operations. Any thread may call it; its
    calls run one after the other. While a call waits, other threads of the interpreter run, and in the main thread handlers of
    signals. One that raises, as Ctrl-C does, ends the wait: the communicator is aborted then.

    A call on CPU buffers has ended when it returns, and takes no stream. A call on a GPU is put on `stream`. Without one it goes
    on torch's current stream where a buffer is a torch tensor, or else on the one that a buffer's `__cuda_array_interface__`
    (version 3) names; where nothing names one, it raises `ValueError`. It comes after what is on the streams that interfaces name,
    and DLPack is told its stream. `synchronize` waits for a stream, and says whether its calls succeeded.

    Buffers are contiguous, of one type: f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3 or f8e5m2. Others raise
    `ValueError`, which says which buffer and why. Every other failure of a call poisons the communicator: see
    `fast_allreduce.errors`. A step of all ranks that fails (`alloc`, `register_buffer`, `split`, `shrink`) does not: calls go
    on, and so do steps, unless a rank was lost or did not come in time.
    """

    @staticmethod
    def init(
        nranks: int,
        rank: int,
        unique_id: UniqueId,
        device: str = "cpu",
        **settings: Unpack[Settings],
    ) -> Communicator:
        """Joins the world of an id, and returns when all ranks have come.

        Settings are keywords: those of `_catalogue.Settings`, with the values that docs/tuning.md tells; None is the default. Ranks
        that have different ones where all must have the same raise `Disagreement`. Any value of a wrong kind, and an unknown name, is
        an `InvalidSetting` that tells what there is.

        A process with several communicators on a GPU says so: by default each takes half of the multiprocessors
        that those before it have left. `max_blocks` is the most that one takes. `one_at_a_time=True` is a promise: no call of this
        communicator runs on the GPU at the same time as one of another communicator of this process, on any rank, as where all
        calls are on one stream. It may then use all, and takes none from others; where the promise is broken, calls may
        wait for each other until they time out. `programmatic_launch=True` launches with the attribute of programmatic dependent launch,
        and is a promise that every other kernel so launched on the streams of calls executes griddepcontrol.wait before it ends.
        """

    @staticmethod
    def from_env(
        device: str = "cpu",
        **settings: Unpack[Settings],
    ) -> Communicator | None:
        """Joins the world that FAST_ALLREDUCE_UNIQUE_ID, _RANK and _WORLD_SIZE name, or _SOCKET_DIR in the place of an id; None where
        there is neither. Settings are those of `init`, except that ranks wait for all to come for `join_timeout` seconds, or as
        FAST_ALLREDUCE_JOIN_TIMEOUT says, or 120, whatever `timeout` is."""

    @property
    def name(self) -> str:
        """Its name among the communicators of this process, for operators of compiled graphs: a number, unless it is set before."""

    @name.setter
    def name(self, name: str) -> None:
        """Names it, once, before anything has read the name. Compiled code that is kept for other processes has the name in it."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def nranks(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> str:
        """Where its buffers are, such as "cpu" or "cuda:0"."""

    @property
    def is_valid(self) -> bool:
        """Whether it has not been destroyed."""

    @property
    def plan_source(self) -> str:
        """Where its plans come from, in words: a tuning file, or a built-in table, and why."""

    @property
    def binding(self) -> str | None:
        """What the ranks' threads are bound to, in words, such as "core (0, 1)". None on a GPU."""

    @property
    def nvls_refused(self) -> str | None:
        """None where the switch between the GPUs can add up (NVLS). Else why it does not: nothing asked for it (`order="any"`, an
        algorithm), or GPUs, driver or links have no such thing, or ranks share a GPU, or there are none."""

    @property
    def survivors(self) -> list[int]:
        """The ranks that are left: whose processes run and whose communicators are open, as far as is known."""

    def allreduce(
        self, sendbuf: _Buffer, recvbuf: _Buffer | None = None, op: _Op = "sum", *, stream: _Stream | None = None
    ) -> None:
        """Reduces the ranks' buffers element by element, on all ranks. Without `recvbuf`, in place."""

    def allreduce_quantized(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        *,
        tolerance: float,
        transport: str = "int8",
        stream: _Stream | None = None,
    ) -> None:
        """Sums the ranks' buffers, moving about a byte for each element, for slow links. Without `recvbuf`, in place.

        Types are f16, bf16 and f32, transports "int8" and "f8e4m3". No element is further from the exact sum than `tolerance`
        times the sum over the ranks of the largest magnitude among the 32 elements of its group; a tolerance that the transport
        cannot keep is refused, with what it can. The result is the same on all ranks: see docs/quantized.md.
        """

    def allreduce_fused(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        *,
        residual: _Buffer,
        residual_out: _Buffer | None = None,
        norm: str | None = None,
        weight: _Buffer | None = None,
        bias: _Buffer | None = None,
        hidden: int | None = None,
        epsilon: float = 1e-6,
        unit_offset: bool = False,
        sum_out: _Buffer | None = None,
        scaling: str | None = None,
        numbers: _Buffer | None = None,
        scales: _Buffer | None = None,
        global_scale: _Buffer | None = None,
        stream: _Stream | None = None,
    ) -> None:
        """Adds the sum of the ranks' buffers to `residual`, which is the same on all ranks: in place without `residual_out`.

        With a `norm` ("rms", or "layer", which takes a `bias`), the rows of that are normalised, times `weight` and plus `bias`: into `recvbuf`, or in place of
        `sendbuf`. Rows have `hidden` elements, by default as many as `weight`. `unit_offset` multiplies by `1 + weight`, as Gemma
        does. One call in place of an allreduce, an addition and a norm, with the bits of these, of f16, bf16 and f32: see
        docs/fused.md.

        With a `scaling` the normalised rows are quantised into `numbers`, and go to `recvbuf` as well if there is one: "given" to 8-bit
        numbers (int8, float8_e4m3fn, float8_e5m2) by the one f32 in `scales`; "per_row" and "per_group" to such numbers, with an
        f32 in `scales` for each row, or for each 128 elements of a row; "nvfp4" and "nvfp4_tiled" to two 4-bit floats in a byte
        (uint8), with a byte in `scales` (uint8, float8_e4m3fn) for each 16 elements of a row, row after row, or in tiles of 128
        rows and 4 such blocks, as matrix products of the format take them. `global_scale`, one f32, is then
        448 * 6 / greatest.

        `sum_out`, apart from all else, gets the ranks' sum alone, as `allreduce` has it.
        """

    def allgather(self, sendbuf: _Buffer, recvbuf: _Buffer, *, stream: _Stream | None = None) -> None:
        """Brings all ranks' buffers, one after the other, to every rank."""

    def allgather_v(
        self, sendbuf: _Buffer, recvbuf: _Buffer, counts: Sequence[int], *, stream: _Stream | None = None
    ) -> None:
        """The same with `counts[r]` elements from rank r."""

    def reduce_scatter(
        self, sendbuf: _Buffer, recvbuf: _Buffer, op: _Op = "sum", *, stream: _Stream | None = None
    ) -> None:
        """Reduces the ranks' buffers, and brings share r to rank r. Shares are equal."""

    def reduce_scatter_v(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer,
        counts: Sequence[int],
        op: _Op = "sum",
        *,
        stream: _Stream | None = None,
    ) -> None:
        """The same with `counts[r]` elements for rank r."""

    def broadcast(
        self,
        sendbuf: _Buffer | None,
        recvbuf: _Buffer | None = None,
        root: int = 0,
        *,
        stream: _Stream | None = None,
    ) -> None:
        """Copies the root's `sendbuf` to `recvbuf` of all; without `recvbuf`, to `sendbuf`. Other ranks' `sendbuf` is not read."""

    def reduce(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        op: _Op = "sum",
        root: int = 0,
        *,
        stream: _Stream | None = None,
    ) -> None:
        """Reduces the ranks' buffers on the root, whose `recvbuf` has the result; without one, its `sendbuf`."""

    def gather(
        self, sendbuf: _Buffer, recvbuf: _Buffer | None = None, root: int = 0, *, stream: _Stream | None = None
    ) -> None:
        """Brings all ranks' buffers, one after the other, to the root. Other ranks' `recvbuf` is not looked at."""

    def scatter(
        self, sendbuf: _Buffer | None, recvbuf: _Buffer, root: int = 0, *, stream: _Stream | None = None
    ) -> None:
        """Brings share r of the root's buffer to rank r. Other ranks' `sendbuf` is not looked at."""

    def alltoall(self, sendbuf: _Buffer, recvbuf: _Buffer, *, stream: _Stream | None = None) -> None:
        """Brings share r of every rank's buffer to rank r, in the order of the ranks. Shares are equal."""

    def alltoall_v(
        self,
        sendbuf: _Buffer,
        sendcounts: Sequence[int],
        recvbuf: _Buffer,
        recvcounts: Sequence[int],
        *,
        stream: _Stream | None = None,
    ) -> None:
        """The same with `sendcounts[r]` elements for rank r, and `recvcounts[r]` from it."""

    def send(self, sendbuf: _Buffer, peer: int, *, tag: int = 0, stream: _Stream | None = None) -> None:
        """Sends a buffer, which may be changed when this returns: the peer may not have it yet. In a group, with the others."""

    def recv(self, recvbuf: _Buffer, peer: int, *, tag: int = 0, stream: _Stream | None = None) -> None:
        """Receives as many bytes as the buffer has, sent with the same tag. Types of elements are not compared."""

    def barrier(self, *, stream: _Stream | None = None) -> None:
        """Returns when every rank has called it. With a stream of a GPU, what comes on that waits instead, for all ranks' streams."""

    def check(self) -> None:
        """Raises what has gone wrong so far, also in calls on streams that nobody has waited for. It waits for nothing."""

    def synchronize(self, *, stream: _Stream | None = None) -> None:
        """Waits for the work on a stream of a GPU, and raises what has gone wrong so far. On the CPU it is `check`."""

    def alloc(self, nbytes: int) -> RegisteredBuffer:
        """Allocates zeros on every rank, registered: calls from within pull without a copy. Collective."""

    def register_buffer(self, buffer: Any) -> RegisteredBuffer:
        """Registers memory of a GPU that is there already, such as a torch tensor: calls from within pull without a copy. Collective.

        The buffer stays allocated as long as what this returns; meet in a barrier after dropping that, before it may go. Memory of
        the host cannot be registered after it was allocated, which is an `Unavailable`. A `RegisteredBuffer` is given back.
        """

    def split(self, color: int | None = None, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks that give the same color, ordered by key, then rank. Collective; None for none."""

    def shrink(self, exclude_ranks: Sequence[int] | None = None) -> Communicator:
        """Makes a communicator without some ranks, by default those that have gone. Collective among the others."""

    def set_timeout(self, timeout: float | None) -> None:
        """Limits the waits of this rank's later calls: seconds, None for no limit."""

    @property
    def behind(self) -> list[int]:
        """Ranks that have begun fewer calls than this one: those that a call of all ranks waits for."""

    def abort(self) -> None:
        """Ends a call of another thread with `Aborted`, and poisons the communicator on all ranks."""

    def destroy(self) -> None:
        """Closes it, when calls of other threads have ended. A second time is nothing."""

    def counters(self) -> Counters:
        """What this rank has done so far."""

    def plan(self, count: int, dtype: Any) -> tuple[str, int]:
        """What an allreduce of so many elements does: its algorithm, and the bytes of a piece."""

    def __enter__(self) -> Communicator: ...
    def __exit__(self, *exception: object) -> None: ...
