"""The compiled part of fast_allreduce. The package exports its names."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
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

# torch tensors, numpy arrays, bytearray, memoryview, CuPy arrays, ...: contiguous, and writable if they are written.
_Buffer = Union[_Interface, _CudaInterface, _Dlpack, RawBuffer, bytes, bytearray, memoryview, Any]
# A ReduceOp or its name ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor"), or the result of premul_sum().
_Op = str
# A cudaStream_t, or a stream of torch, CuPy or cuda.core. Only for calls on a GPU.
_Stream = Union[int, Any]

def get_unique_id() -> UniqueId:
    """Creates an id for a world. The process that creates it must run until all ranks have joined."""

def inspect(what: int | str | PathLike[str]) -> list[dict[str, Any]]:
    """Returns the flight records of the worlds of a process (an int) with those of its peers, or of a directory that
    FAST_ALLREDUCE_FLIGHT_DIR named: dicts as from `Communicator.flight_record`. The ranks may hang or have died.

    Raises `Unavailable` if nothing can be read.
    """

def inspect_metrics(what: int | str | PathLike[str]) -> str:
    """Returns the metrics of the same ranks in Prometheus' text format."""

def build_facts() -> list[tuple[str, str]]:
    """Returns facts about this build (version, compilers, features) as pairs of name and value."""

def direct_allreduce(input: Any, communicator: str, op: _Op = "sum") -> Any:
    """Calls the operator `torch.ops.fast_allreduce.allreduce`.

    Contiguous CPU tensors take no Python code on the way. Compiled code uses it.
    """

def direct_allreduce_rms_norm(
    input: Any, residual: Any, weight: Any, communicator: str, epsilon: float = 1e-6, unit_offset: bool = False
) -> tuple[Any, Any]:
    """Calls the operator `torch.ops.fast_allreduce.allreduce_rms_norm`, as `direct_allreduce` does."""

class UniqueId:
    """Identifies a world. Send it to the other ranks as `bytes(id)` or `str(id)`, or pickled.

    Any process of the same user that knows it can join the world.
    """

    def __init__(self, of: bytes | str) -> None:
        """Parses the 128 bytes or the text of an id. Raises `InvalidArgument` for anything else."""

    def __bytes__(self) -> bytes: ...
    def __hash__(self) -> int: ...

class RawBuffer:
    """Memory by its address. It must stay allocated while it is used, which nothing checks.

    It names no stream: a call on a GPU with no other buffer needs `stream`.
    """

    def __init__(self, address: int, count: int, dtype: Any, *, device: str = "cpu", readonly: bool = False) -> None:
        """Describes `count` elements at an address.

        `dtype` is a name such as "f32" or "float32", or a type of numpy, ml_dtypes or torch.
        """

class RegisteredBuffer:
    """Registered memory: calls pull from it without a copy. See `Communicator.alloc`.

    `numpy.asarray(buffer)` is its bytes, `.view(numpy.float32)` of that an array of floats, and `torch.from_numpy` of
    that a tensor.
    """

    @property
    def address(self) -> int:
        """Address of the first byte, on its device."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def device(self) -> str:
        """Device of the memory, such as "cpu" or "cuda:0"."""

    def __len__(self) -> int: ...

class Progress:
    """How far the ranks of a communicator had come when it was formed."""

    @property
    def completed(self) -> int:
        """Number of collective calls that every rank of the earlier world had completed; on GPUs 0."""

    @property
    def of_rank(self) -> list[int | None]:
        """The number of each rank; None for one that is new."""

class Counters:
    """Counters of a rank since its communicator was made."""

    @property
    def calls(self) -> int:
        """Number of collective calls begun."""

    @property
    def bytes(self) -> int:
        """Number of bytes of this rank's messages."""

    @property
    def waits(self) -> list[int]:
        """Number of waits for each rank that took longer than the first polls."""

    @property
    def timeouts(self) -> list[int]:
        """Number of waits for each rank that timed out."""

class Group:
    """The context manager that `fast_allreduce.group()` returns."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

class Communicator:
    """A rank's handle of a world.

    All ranks make the same calls in the same order, with the same counts, types and operations. Any thread may call it;
    its calls run one after the other. A waiting call releases the GIL. If the main thread waits, signal handlers run. A
    handler that raises, as for Ctrl-C, ends the call and aborts the communicator.

    On the CPU a call has ended when it returns, and takes no stream. On a GPU it is enqueued on `stream`. Without one
    it is enqueued on torch's current stream if a buffer is a torch tensor, else on the stream that a buffer's
    `__cuda_array_interface__` (version 3) names. If none names one, it raises `ValueError`. It runs after the work on
    all streams that interfaces name, and DLPack exporters are passed its stream. `synchronize` waits for a stream and
    raises if a call on it has failed.

    If ranks are threads that share a GPU, a copy to pageable memory behind a call (such as `.cpu()`, `.item()`,
    `print(tensor)`) keeps the other threads from launching theirs until the call times out. First `synchronize`, or
    copy to pinned memory.

    Buffers are contiguous and of one type: f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3 or f8e5m2. Any shape
    will do: calls see the elements in C order. Lengths must be exact. An invalid argument raises `ValueError`, which
    names it, before the call begins. Every other failure of a call poisons the communicator: see
    `fast_allreduce.errors`. A failed collective step (`alloc`, `register_buffer`, `split`, `shrink`) does not poison
    it, unless a rank was lost or timed out.
    """

    @staticmethod
    def init(
        nranks: int, rank: int, unique_id: UniqueId, device: str = "cpu", **settings: Unpack[Settings]
    ) -> Communicator:
        """Joins the world of an id, and returns when all `nranks` ranks have joined.

        Settings are the keywords of `_catalogue.Settings`, which docs/tuning.md describes. None is the default. An
        unknown name or an invalid value raises `InvalidSetting`, which lists the valid ones. `Disagreement` is raised
        on all ranks if they differ in a setting that must be equal, `Timeout` if ranks are missing, `Unavailable`
        without the device::

            communicator = Communicator.init(2, rank, unique_id, "cuda:0", timeout=60, order="any")

        A process with several communicators on a GPU chooses how they share it. By default each takes half of the
        multiprocessors that the earlier ones have left. `max_blocks` limits the blocks of one. `one_at_a_time=True`
        promises that no call of this communicator runs on the GPU at the same time as a call of another communicator of
        the process, on any rank, for example because all calls are on one stream. It may then use all multiprocessors.
        If the promise is broken, calls may wait for each other until they time out. `programmatic_launch=True` launches
        kernels with programmatic dependent launch. It promises that every other kernel launched this way on the calls'
        streams executes griddepcontrol.wait before it ends.
        """

    @staticmethod
    def init_spare(unique_id: UniqueId, device: str = "cpu", **settings: Unpack[Settings]) -> Communicator:
        """Waits as a spare until ranks `join` or `grow`, and takes a place that they have for a new process.

        The `unique_id` is their `join_id`, for one world. The limit of the wait is the setting `join_timeout`, else
        `timeout`, else 30 s; a spare usually sets `join_timeout` to 0 (no limit). Raises `Refused` if the world forms
        without a place for it.
        """

    @staticmethod
    def from_env(device: str = "cpu", **settings: Unpack[Settings]) -> Communicator | None:
        """Joins the world that environment variables describe, or returns None if they describe none.

        The variables are FAST_ALLREDUCE_RANK, FAST_ALLREDUCE_WORLD_SIZE, and FAST_ALLREDUCE_UNIQUE_ID or
        FAST_ALLREDUCE_SOCKET_DIR. Settings and errors are those of `init`, except that `timeout` does not limit
        joining: `join_timeout` does, else FAST_ALLREDUCE_JOIN_TIMEOUT, else 120 s.
        """

    @property
    def name(self) -> str:
        """Name of the communicator in this process, for operators of compiled graphs. A number unless it is set."""

    @name.setter
    def name(self, name: str) -> None:
        """Sets the name. Possible once, before the name is read; raises `InvalidArgument` later or if it is taken.

        Compiled code that is cached for other processes contains the name.
        """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def nranks(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> str:
        """Device of its buffers, such as "cpu" or "cuda:0"."""

    @property
    def is_valid(self) -> bool:
        """Whether it has not been destroyed."""

    @property
    def plan_source(self) -> str:
        """Where its plans come from, as text: a tuning file, or a built-in table, and why."""

    @property
    def binding(self) -> str | None:
        """Cores that the ranks' threads are bound to, as text such as "core (0, 1)". None on a GPU."""

    @property
    def nvls_refused(self) -> str | None:
        """None if in-switch reductions (NVLS) are available, else the reason why not.

        Reasons: no setting asks for it (`order="any"`, an algorithm), the GPUs, driver or links do not support it,
        ranks share a GPU, or the communicator is on the CPU.
        """

    @property
    def survivors(self) -> list[int]:
        """Ranks whose processes run and whose communicators are open, as far as is known."""

    @property
    def behind(self) -> list[int]:
        """Ranks that have begun fewer calls than this one. A call of all ranks waits for them."""

    def allreduce(
        self, sendbuf: _Buffer, recvbuf: _Buffer | None = None, op: _Op = "sum", *, stream: _Stream | None = None
    ) -> None:
        """Reduces the ranks' buffers element by element. Every rank gets the result, with the same bits.

        Buffers have the same length on all ranks. Without `recvbuf` it works in place. Bitwise operations take
        integers, `premul_sum` takes floats::

            communicator.allreduce(tensor)
            communicator.allreduce(gradients, averages, fa.AVG)
        """

    def allreduce_quantized(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        *,
        tolerance: float,
        transport: str = "int8",
        stream: _Stream | None = None,
    ) -> None:
        """Sums the ranks' buffers, and moves about one byte for each element, for slow links. In place without
        `recvbuf`.

        Types are f16, bf16 and f32. Transports are "int8" and "f8e4m3". The error of an element is at most `tolerance`
        times the sum over the ranks of the largest magnitude in its group of 32 elements. A tolerance that the
        transport cannot guarantee raises `InvalidArgument`, which names the one that it can. All ranks get the same
        bits: see docs/quantized.md.
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
        expert_table: _Buffer | None = None,
        expert_weights: _Buffer | None = None,
        shared_expert: _Buffer | None = None,
        routed_scale: float | None = None,
        stream: _Stream | None = None,
    ) -> None:
        """Adds the sum of the ranks' buffers to `residual`, which is equal on all ranks, and normalises the rows of the
        result.

        Types are f16, bf16 and f32. `residual`, `residual_out`, `sum_out` and `recvbuf` have the length of `sendbuf`.
        The new residual goes to `residual_out`, or in place. `norm` is "rms" or "layer". Normalised rows, times
        `weight` and plus `bias` ("layer" only), go to `recvbuf`, or in place of `sendbuf`. A row has `hidden` elements,
        by default the length of `weight`. `unit_offset` multiplies by `1 + weight`, as Gemma and LayerNorm1P do.
        `sum_out` gets the ranks' sum alone. It is one call for an allreduce, an addition and a norm, with the bits of
        these: see docs/fused.md::

            communicator.allreduce_fused(hidden, residual=residual, norm="rms", weight=weight, epsilon=1e-5)

        With `scaling` the normalised rows are quantised into `numbers`, and also go to `recvbuf` if it is given:

        * "given" quantises to 8-bit numbers (int8, float8_e4m3fn, float8_e5m2) by the one f32 in `scales`.
        * "per_row" and "per_group" write such numbers, and to `scales` an f32 for each row, or for each 128 elements of
          a row.
        * "nvfp4" and "nvfp4_tiled" write two 4-bit floats to a byte (uint8), and to `scales` a byte (uint8 or
          float8_e4m3fn) for each 16 elements of a row: row by row, or in the tiles of 128 rows and 4 scales that matrix
          products of the format read. `global_scale`, one f32, is 448 * 6 / the largest magnitude. "nvfp4_8x4" has
          tiles of 8 rows and 4 scales.
        * "mxfp8", "mxfp8_tiled" and "mxfp8_8x4" write 8-bit floats, "mxfp4" and "mxfp4_tiled" 4-bit floats, and to
          `scales` a power of two (uint8 or float8_e8m0fnu) for each 32 elements of a row, by OCP's rule.
        * "per_group_columns" is "per_group" with scales column by column. "per_group_ue8m0" writes 8-bit floats and
          powers of two, rounded up, column by column, four to a word (uint8, float8_e8m0fnu or int32); "per_32_ue8m0"
          has one for each 32 elements.
          docs/quantized-rows.md has the sizes.

        With `expert_table`, int32, the input is computed from experts' rows, which `sendbuf` has. The table has an
        equal number of entries, at most 64, for each row of `residual`; each is the number of an experts' row, or
        negative for none. These rows are multiplied by `expert_weights` (f32, or the type of the call), one for each
        entry, and added up; the sum is multiplied by `routed_scale`, and the row of `shared_expert` is added.
        Normalised rows go to `recvbuf` or `numbers`, never in place. Lengths are those of `residual`.
        """

    def sharded_rms_norm(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        *,
        width: int,
        columns: Sequence[tuple[int, int]],
        totals: Sequence[int],
        weights: Sequence[_Buffer | None] | None = None,
        epsilon: float = 1e-6,
        unit_offset: bool = False,
        stream: _Stream | None = None,
    ) -> None:
        """Normalises rows whose elements are divided among the ranks, by RMSNorm over the whole rows.

        `sendbuf` has rows of `width` elements; types are f16, bf16 and f32. `columns` has one or two parts of each row,
        from a first column up to an end, which are normalised independently: queries and keys, for example. `totals`
        has the number of elements of each part on all ranks, `weights` the weights of this rank's columns. Results
        replace the columns of `recvbuf`, or of `sendbuf`; other columns stay as they are. See docs/fused.md::

            communicator.sharded_rms_norm(qkv, width=1024, columns=[(0, 768), (768, 896)], totals=[6144, 1024])
        """

    def allgather(self, sendbuf: _Buffer, recvbuf: _Buffer, *, stream: _Stream | None = None) -> None:
        """Concatenates the ranks' buffers, in rank order, on every rank.

        Buffers of n elements give `nranks * n` elements in `recvbuf`.
        """

    def allgather_v(
        self, sendbuf: _Buffer, recvbuf: _Buffer, counts: Sequence[int], *, stream: _Stream | None = None
    ) -> None:
        """Concatenates buffers of different lengths: `counts[r]` elements of rank r. All ranks pass the same counts."""

    def allgather_rows(
        self,
        numbers: _Buffer,
        scales: _Buffer,
        all_numbers: _Buffer,
        all_scales: _Buffer,
        counts: Sequence[int] | None = None,
        *,
        scaling: str,
        hidden: int,
        stream: _Stream | None = None,
    ) -> None:
        """Gathers quantised rows: numbers in rank order, and scales in the layout of one message.

        `numbers` and `scales` are those that `reduce_scatter_fused` writes. Ranks have equal shares, or `counts[r]`
        elements of `numbers` on rank r: whole rows, possibly none. With `reduce_scatter_fused` the result has the bits
        of `allreduce_fused`. "given" has no scales to gather: use `allgather` for the numbers.
        """

    def reduce_scatter(
        self, sendbuf: _Buffer, recvbuf: _Buffer, op: _Op = "sum", *, stream: _Stream | None = None
    ) -> None:
        """Reduces the ranks' buffers. Rank r gets share r of the result.

        `recvbuf` has n elements, and `sendbuf` `nranks * n`.
        """

    def reduce_scatter_fused(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        counts: Sequence[int] | None = None,
        *,
        residual: _Buffer,
        residual_out: _Buffer | None = None,
        norm: str | None = None,
        weight: _Buffer | None = None,
        bias: _Buffer | None = None,
        hidden: int | None = None,
        epsilon: float = 1e-6,
        unit_offset: bool = False,
        scaling: str | None = None,
        numbers: _Buffer | None = None,
        scales: _Buffer | None = None,
        global_scale: _Buffer | None = None,
        stream: _Stream | None = None,
    ) -> None:
        """Sums the ranks' buffers. Rank r gets share r of the sum, adds its own residual, and normalises its rows.

        Arguments and bits are those of `allreduce_fused`, without the plain sum and experts. `residual`,
        `residual_out`, `recvbuf`, `numbers` and `scales` are those of the rank's own rows. Shares are equal, or have
        `counts[r]` elements for rank r: whole rows, possibly none. Normalised rows go to `recvbuf` or `numbers`;
        `recvbuf` may be the own share of `sendbuf`::

            communicator.reduce_scatter_fused(hidden, mine, residual=residual, norm="rms", weight=weight)
        """

    def reduce_scatter_v(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer,
        counts: Sequence[int],
        op: _Op = "sum",
        *,
        stream: _Stream | None = None,
    ) -> None:
        """Reduces the ranks' buffers into shares of different lengths: `counts[r]` elements for rank r.

        All ranks pass the same counts.
        """

    def broadcast(
        self, sendbuf: _Buffer | None, recvbuf: _Buffer | None = None, root: int = 0, *, stream: _Stream | None = None
    ) -> None:
        """Copies the root's `sendbuf` to the `recvbuf` of every rank, or to `sendbuf` without one.

        The `sendbuf` of other ranks is ignored if they pass a `recvbuf`.
        """

    def reduce(
        self,
        sendbuf: _Buffer,
        recvbuf: _Buffer | None = None,
        op: _Op = "sum",
        root: int = 0,
        *,
        stream: _Stream | None = None,
    ) -> None:
        """Reduces the ranks' buffers into the root's `recvbuf`, or its `sendbuf` without one.

        Other ranks' `recvbuf` is ignored.
        """

    def gather(
        self, sendbuf: _Buffer, recvbuf: _Buffer | None = None, root: int = 0, *, stream: _Stream | None = None
    ) -> None:
        """Concatenates the ranks' buffers, in rank order, in the root's `recvbuf`.

        Other ranks' `recvbuf` is ignored.
        """

    def scatter(
        self, sendbuf: _Buffer | None, recvbuf: _Buffer, root: int = 0, *, stream: _Stream | None = None
    ) -> None:
        """Copies share r of the root's `sendbuf` to the `recvbuf` of rank r. Other ranks' `sendbuf` is ignored."""

    def alltoall(self, sendbuf: _Buffer, recvbuf: _Buffer, *, stream: _Stream | None = None) -> None:
        """Copies share r of each rank's `sendbuf` to rank r, which gets the shares in rank order. Shares are equal."""

    def alltoall_v(
        self,
        sendbuf: _Buffer,
        sendcounts: Sequence[int],
        recvbuf: _Buffer,
        recvcounts: Sequence[int],
        *,
        stream: _Stream | None = None,
    ) -> None:
        """Exchanges shares of different lengths: `sendcounts[r]` elements to rank r, `recvcounts[r]` from it."""

    def send(self, sendbuf: _Buffer, peer: int, *, tag: int = 0, stream: _Stream | None = None) -> None:
        """Sends a buffer to a rank, at once or at the end of the thread's `group()`.

        The buffer may be changed when this returns (on a GPU: later on the stream), which may be before the peer has
        received it. `tag` is an unsigned 32-bit number.
        """

    def recv(self, recvbuf: _Buffer, peer: int, *, tag: int = 0, stream: _Stream | None = None) -> None:
        """Receives a message of exactly the buffer's length from a rank, with the same tag.

        Element types are not compared.
        """

    def barrier(self, *, stream: _Stream | None = None) -> None:
        """Returns when every rank has called it.

        With a stream of a GPU, later work on that waits for all ranks' streams.
        """

    def check(self) -> None:
        """Raises the error of an earlier call that has failed, also on a stream. Does not wait."""

    def synchronize(self, *, stream: _Stream | None = None) -> None:
        """Waits for the work on a stream of a GPU, then raises as `check` does. On the CPU it only checks."""

    def alloc(self, nbytes: int) -> RegisteredBuffer:
        """Allocates zeroed, registered memory on every rank, from which calls pull without a copy. Collective.

        Raises `Allocation` or `PeerFailed`. All ranks pass the same length::

            shared = np.asarray(communicator.alloc(4 * 1000)).view(np.float32)
        """

    def register_buffer(self, buffer: Any) -> RegisteredBuffer:
        """Registers existing memory of a GPU, such as a torch tensor, so that calls pull from it without a copy.
        Collective.

        The buffer must stay allocated as long as the result exists. Drop the result and call `barrier()` before freeing
        the buffer. Host memory raises `Unavailable`: use `alloc`. A `RegisteredBuffer` is returned unchanged.
        """

    def split(self, color: int | None = None, key: int = 0) -> Communicator | None:
        """Returns a communicator of the ranks with the same color, ordered by key, then rank. Collective.

        Returns None for the color None.
        """

    def shrink(self, exclude_ranks: Sequence[int] | None = None) -> Communicator:
        """Returns a communicator without some ranks, by default the lost ones. Collective among the others.

        It also works on a poisoned communicator::

            except fa.errors.PeerLost:
                communicator = communicator.shrink()
        """

    def grow(self, nranks: int, timeout: float = 30.0) -> Communicator:
        """Returns a larger communicator, of all ranks of this one and of new processes. Collective among all.

        The ranks keep their numbers; the new processes call `init` with the `join_id` and the numbers after them. It
        waits for `timeout` seconds at most; 0 is no limit. Replace ranks in a world of another size so::

            except fa.errors.PeerLost:
                communicator = communicator.shrink()
                publish(str(communicator.join_id()))
                communicator = communicator.grow(nranks)

        If calls of other threads leave no gap in time, it raises `Unavailable`, and on the other ranks `Disagreement`.
        """

    def suspend(self) -> int:
        """Leaves the world and gives back its shared memory; returns the bytes. Collective.

        Buffers keep their addresses and contents. Until `resume`, calls raise `Unavailable`. On GPUs captured graphs
        are valid again afterwards; replay none in between.
        """

    @property
    def is_suspended(self) -> bool:
        """Whether the communicator is suspended."""

    def resume(self, timeout: float = 30.0) -> Progress:
        """Returns into the world after `suspend`. Collective. It waits for `timeout` seconds at most; 0 is no limit.

        After an error, such as `Timeout`, the communicator is still suspended, and can try again.
        """

    def join_id(self) -> UniqueId:
        """Returns the id by which new processes join or take the places of ranks that have gone, with `init`.

        It is the same on all ranks, and for the next `join`, `resume` or `grow` alone.
        """

    def join(self, survivors: Sequence[int], timeout: float = 30.0) -> Progress:
        """Replaces the ranks that have gone by new processes. Collective among `survivors` and them.

        The communicator works again, with the same buffers. Repeat from call number `completed` of the result. The
        `timeout` is as in `resume`. The new processes call `init` with the `join_id`, and `inherit` their buffers::

            except fa.errors.PeerLost:
                publish(str(communicator.join_id()))
                progress = communicator.join(communicator.survivors)

        If calls of other threads leave no gap in time, it raises as `grow` does.
        """

    def progress(self) -> Progress:
        """Returns how far the ranks had come when this communicator was formed."""

    def inherited(self) -> list[tuple[int, int]]:
        """Returns number and length of each registered buffer that this rank has found in its place."""

    def inherit(self, number: int) -> RegisteredBuffer:
        """Takes a buffer of `inherited`, filled with zeros. Local."""

    def set_timeout(self, timeout: float | None) -> None:
        """Limits the waits of this rank's later calls, in seconds.

        None and 0 are no limit. Raises `ValueError` for others.
        """

    def abort(self) -> None:
        """Ends a running call of another thread with `Aborted`, also `split` and `shrink`, and poisons the communicator
        on all ranks. Communicators that were split off before are not aborted: to end all, abort each.
        """

    def destroy(self) -> None:
        """Closes the communicator after running calls of other threads. A second call does nothing."""

    def counters(self) -> Counters:
        """Returns the counters of this rank."""

    def flight_record(self) -> dict[str, Any]:
        """Returns the latest calls of all ranks of this machine, also of ranks that hang or have died.

        The keys are the fields of `FlightRecord` in Rust: `ranks` is a list with a dict for each rank, whose `calls`
        are dicts with `number`, `call`, `begin_ns`, `waited_for` and others. It does not wait, and also works while
        another thread is in a call, or after a failure.
        """

    def metrics(self, path: str | PathLike[str] | None = None) -> str:
        """Returns this rank's metrics in Prometheus' text format. With `path` it also writes them to that file, which
        readers see whole, for example for node_exporter's textfile collector.

        Raises `System` if the file cannot be written.
        """

    def plan(self, count: int, dtype: Any) -> tuple[str, int]:
        """Returns the algorithm of an allreduce of `count` elements, and the bytes of each piece."""

    def __enter__(self) -> Communicator: ...
    def __exit__(self, *exception: object) -> None: ...
