"""A backend of torch.distributed: `torch.distributed.init_process_group("fast_allreduce")`, for tensors on the CPU.

torch finds it by its entry point; where it does not, `import fast_allreduce.distributed` registers it. Ranks are the processes
of one machine, 16 at most; with other backends for other devices as in "cpu:fast_allreduce,cuda:nccl".

Calls of a group are carried out in the order in which they are made. A synchronous one is carried out by the thread that calls;
with `async_op=True` it is queued, and carried out by a thread of the group's, or by whoever waits for it first: so a program that
waits at once pays for no other thread. Messages (`send`, `isend`, `recv`, ...) are gathered until one of them is waited for, or
the next collective comes, and then go together: so two ranks may both send first.
"""

import datetime
import os
import socket
import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from . import MAX_RANKS, Communicator, UniqueId, errors, get_unique_id, group

NAME = "fast_allreduce"

_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "avg",
}
# Of truth values as bytes of 0 and 1.
_BOOLEAN = {"sum": "max", "prod": "min", "min": "min", "max": "max"}

_REDUCED = frozenset(
    getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64"
    )  # fmt: skip
    if hasattr(torch, name)
)

# As many messages as go into one launch.
_MESSAGES = 64

# Seconds that the caller of an asynchronous call has to wait for it itself.
_HEAD_START = 0.001


class _Work(dist._Work):
    """A call that has been made: carried out already, or queued."""

    def __init__(self, backend, call=None, tensors=()):
        super().__init__()
        self._backend = backend
        self._call = call
        self._tensors = tensors
        self._error = None
        self._future = None
        # Done too before this one is.
        self._after = None
        self._done = call is None

    def _run(self):
        """Carries the call out. The group's lock is held."""
        try:
            self._call()
            if self._after is not None:
                self._after()
        except BaseException as error:
            self._error = error
        self._call = None
        self._done = True
        if self._future is not None:
            self._settle(self._future)

    def _settle(self, future):
        if self._error is None:
            future.set_result(list(self._tensors))
        else:
            future.set_exception(self._error)

    def wait(self, timeout=None):
        if not self._done:
            self._backend._carry_out(self, timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return self._done

    def is_success(self):
        return self._done and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return list(self._tensors)

    def get_future(self):
        if self._future is None:
            future = torch.futures.Future()
            # Carried out meanwhile, it would settle this one or not: under the lock it has or it has not been.
            with self._backend._lock:
                if self._done:
                    self._settle(future)
                self._future = future
        return self._future


def _seconds(timeout):
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)


def _bytes_of(tensor):
    """The same memory as a tensor of a type that can be moved."""
    if tensor.dtype in _REDUCED:
        return tensor
    if not tensor.is_contiguous():
        raise errors.InvalidArgument("a tensor is not contiguous")
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


class FastAllreduceBackend(_Backend):
    """One process group's calls. torch makes it; programs use torch.distributed."""

    def __init__(self, communicator, options):
        super().__init__(communicator.rank, communicator.nranks)
        self._communicator = communicator
        self._options = options
        # Held while a call is carried out, so that calls keep their order.
        self._lock = threading.RLock()
        # What has been made and not carried out; messages at its end go together.
        self._queue = deque()
        self._worker = None
        self._woken = threading.Event()
        self._wakes = False
        self._coalescing = None
        self._closed = False

    # --- order ---

    def _now_or_queued(self, opts, call, tensors=()):
        if self._coalescing is not None or getattr(opts, "asyncOp", False):
            work = _Work(self, call, tensors)
            self._queue.append(work)
            if self._coalescing is not None:
                self._coalescing.append(work)
            elif not self._wakes:
                self._wake()
            return work
        with self._lock:
            if self._queue:
                self._drain()
            call()
        return _Work(self, None, tensors)

    def _drain(self, until=None):
        """Carries out what is queued, as far as `until`. The lock is held."""
        while self._queue and not (until is not None and until._done):
            work = self._queue.popleft()
            if isinstance(work, _Message):
                messages = [work]
                while self._queue and isinstance(self._queue[0], _Message):
                    messages.append(self._queue.popleft())
                self._exchange(messages)
            else:
                work._run()

    def _exchange(self, messages):
        for start in range(0, len(messages), _MESSAGES):
            part = messages[start : start + _MESSAGES]
            try:
                with group():
                    for message in part:
                        message.put(self._communicator)
                error = None
            except BaseException as raised:
                error = raised
            for message in part:
                message._error = error
                message._call = None
                message._done = True
                if message._future is not None:
                    message._settle(message._future)

    def _carry_out(self, work, timeout=None):
        if timeout is None or _seconds(timeout) <= 0:
            with self._lock:
                self._drain(work)
            return
        # The library's own limit may be longer: then this rank gives up for the group.
        timer = threading.Timer(_seconds(timeout), self._communicator.abort)
        timer.daemon = True
        timer.start()
        try:
            with self._lock:
                self._drain(work)
        finally:
            timer.cancel()
        if isinstance(work._error, errors.Aborted):
            work._error = errors.Timeout(
                f"a call of the process group was not done within {_seconds(timeout)} s; the group is aborted",
                operation="wait", missing=[], waited=_seconds(timeout), last_seen="", epoch=0,
            )  # fmt: skip

    def _wake(self):
        """Has the group's thread look at the queue, in a moment."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="fast-allreduce-group", daemon=True)
            self._worker.start()
        self._wakes = True
        self._woken.set()

    def _work(self):
        while not self._closed:
            self._woken.wait()
            self._woken.clear()
            # Who waits at once does it itself; and a thread is woken once in a while, not for each call.
            time.sleep(_HEAD_START)
            self._wakes = False
            with self._lock:
                # Messages at the end wait for those that may come: the peer's may depend on them.
                while self._queue and any(not isinstance(work, _Message) for work in self._queue):
                    self._drain(next(work for work in self._queue if not isinstance(work, _Message)))

    def start_coalescing(self):
        self._coalescing = []

    def end_coalescing(self):
        works, self._coalescing = self._coalescing or [], None
        if not works:
            return _Work(self)
        last = works[-1]

        def call():
            for work in works:
                if work._error is not None:
                    raise work._error

        if isinstance(last, _Message):
            # Nothing of the batch is still to come: it may be begun.
            last = _Work(self, call)
            self._queue.append(last)
        else:
            with self._lock:
                last._after = call
                if last._done and last._error is None:
                    # It was carried out before it was known to be the last.
                    last._done = False
                    last._call = last._after
                    last._after = None
                    self._queue.append(last)
        self._wake()
        return last

    # --- collectives ---

    def _operation(self, opts, tensor):
        """The tensor to reduce, and how."""
        name = _OPERATIONS.get(getattr(opts.reduceOp, "op", opts.reduceOp))
        if name is None:
            raise errors.InvalidArgument(
                f"{opts.reduceOp} is not supported by {NAME}: SUM, PRODUCT, MIN, MAX and AVG are"
            )
        if tensor.dtype in _REDUCED:
            return tensor, name
        if tensor.dtype == torch.bool and name in _BOOLEAN:
            return tensor.view(torch.uint8), _BOOLEAN[name]
        if tensor.is_complex() and name in ("sum", "avg"):
            return torch.view_as_real(tensor), name
        raise errors.InvalidArgument(f"{NAME} does not reduce elements of {tensor.dtype} by {name}")

    def _one(self, tensors):
        if len(tensors) != 1:
            raise errors.InvalidArgument(f"{NAME} takes one tensor for each rank, not {len(tensors)}")
        return tensors[0]

    def allreduce(self, tensors, opts):
        tensor, op = self._operation(opts, tensors[0] if len(tensors) == 1 else self._one(tensors))
        return self._now_or_queued(opts, lambda: self._communicator.allreduce(tensor, None, op), tensors)

    def allreduce_coalesced(self, tensors, opts):
        pairs = [self._operation(opts, tensor) for tensor in tensors]

        def call():
            for tensor, op in pairs:
                self._communicator.allreduce(tensor, None, op)

        return self._now_or_queued(opts, call, tensors)

    def broadcast(self, tensors, opts):
        tensor, root = _bytes_of(self._one(tensors)), opts.rootRank
        return self._now_or_queued(opts, lambda: self._communicator.broadcast(tensor, None, root), tensors)

    def reduce(self, tensors, opts):
        tensor, op = self._operation(opts, self._one(tensors))
        root = opts.rootRank
        return self._now_or_queued(opts, lambda: self._communicator.reduce(tensor, None, op, root), tensors)

    def all_gather_single(self, output, input, opts):
        call_output, call_input = _bytes_of(output), _bytes_of(input)
        return self._now_or_queued(opts, lambda: self._communicator.allgather(call_input, call_output), [output])

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        pairs = [(_bytes_of(one), _bytes_of(other)) for one, other in zip(inputs, outputs)]

        def call():
            for one, other in pairs:
                self._communicator.allgather(one, other)

        return self._now_or_queued(opts, call, outputs)

    def allgather(self, output_lists, inputs, opts):
        outputs, tensor = self._one(output_lists), _bytes_of(self._one(inputs))
        if len(outputs) != self.size():
            raise errors.InvalidArgument(f"{len(outputs)} outputs for {self.size()} ranks")
        counts = [_bytes_of(output).numel() for output in outputs]
        moved = [output.is_contiguous() for output in outputs]
        if not all(moved):
            raise errors.InvalidArgument("an output is not contiguous")

        def call():
            flat = torch.empty(sum(counts), dtype=tensor.dtype)
            self._communicator.allgather_v(tensor, flat, counts)
            for output, part in zip(outputs, flat.split(counts)):
                _bytes_of(output).view(-1).copy_(part)

        return self._now_or_queued(opts, call, outputs)

    def allgather_coalesced(self, output_lists, inputs, opts):
        # A list of outputs for each input.
        works = [self.allgather([outputs], [one], opts) for outputs, one in zip(output_lists, inputs)]
        return works[-1] if works else _Work(self)

    def gather(self, output_lists, inputs, opts):
        tensor, root = _bytes_of(self._one(inputs)), opts.rootRank
        outputs = self._one(output_lists) if self.rank() == root else []

        def call():
            flat = torch.empty(tensor.numel() * self.size(), dtype=tensor.dtype) if outputs else None
            self._communicator.gather(tensor, flat, root)
            for rank, output in enumerate(outputs):
                part = flat[rank * tensor.numel() : (rank + 1) * tensor.numel()]
                _bytes_of(output).view(-1).copy_(part)

        return self._now_or_queued(opts, call, outputs)

    def scatter(self, outputs, input_lists, opts):
        output, root = self._one(outputs), opts.rootRank
        target = _bytes_of(output)
        inputs = self._one(input_lists) if self.rank() == root else []

        def call():
            flat = torch.cat([_bytes_of(one).reshape(-1) for one in inputs]) if inputs else None
            self._communicator.scatter(flat, target, root)

        return self._now_or_queued(opts, call, outputs)

    def reduce_scatter_single(self, output, input, opts):
        source, op = self._operation(opts, input)
        target, _ = self._operation(opts, output)
        return self._now_or_queued(opts, lambda: self._communicator.reduce_scatter(source, target, op), [output])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        parts = [(*self._operation(opts, one), self._operation(opts, other)[0]) for one, other in zip(inputs, outputs)]

        def call():
            for source, op, target in parts:
                self._communicator.reduce_scatter(source, target, op)

        return self._now_or_queued(opts, call, outputs)

    def reduce_scatter(self, outputs, input_lists, opts):
        output, inputs = self._one(outputs), self._one(input_lists)
        target, op = self._operation(opts, output)
        sources = [self._operation(opts, one)[0] for one in inputs]
        counts = [source.numel() for source in sources]

        def call():
            flat = torch.cat([source.reshape(-1) for source in sources])
            self._communicator.reduce_scatter_v(flat, target, counts, op)

        return self._now_or_queued(opts, call, outputs)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts):
        source, target = _bytes_of(input), _bytes_of(output)
        if not output_splits and not input_splits:
            return self._now_or_queued(opts, lambda: self._communicator.alltoall(source, target), [output])
        send = self._elements("input", input, source, input_splits)
        receive = self._elements("output", output, target, output_splits)
        call = lambda: self._communicator.alltoall_v(source, send, target, receive)  # noqa: E731
        return self._now_or_queued(opts, call, [output])

    def _elements(self, name, tensor, moved, splits):
        """Splits of the first dimension, as elements of what is moved."""
        rows, size = tensor.size(0) if tensor.dim() else 0, self.size()
        if not splits:
            if rows % size:
                raise errors.InvalidArgument(f"{name} has {rows} rows, which {size} ranks cannot share equally")
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise errors.InvalidArgument(f"{name} has {rows} rows, and its splits for {size} ranks are {list(splits)}")
        row = moved.numel() // rows if rows else 0
        return [split * row for split in splits]

    def alltoall(self, outputs, inputs, opts):
        sources, targets = [_bytes_of(one) for one in inputs], [_bytes_of(one) for one in outputs]
        send, receive = [one.numel() for one in sources], [one.numel() for one in targets]

        def call():
            flat = torch.cat([one.reshape(-1) for one in sources])
            received = torch.empty(sum(receive), dtype=flat.dtype)
            self._communicator.alltoall_v(flat, send, received, receive)
            for target, part in zip(targets, received.split(receive)):
                target.view(-1).copy_(part)

        return self._now_or_queued(opts, call, outputs)

    def barrier(self, opts):
        return self._now_or_queued(opts, self._communicator.barrier)

    # --- messages ---

    def _message(self, tensors, peer, tag, sends):
        tensor = self._one(tensors)
        message = _Message(self, _bytes_of(tensor), peer, tag, sends, tensors)
        self._queue.append(message)
        if self._coalescing is not None:
            self._coalescing.append(message)
        return message

    def send(self, tensors, dst, tag=0):
        return self._message(tensors, dst, tag, True)

    def recv(self, tensors, src, tag=0):
        return self._message(tensors, src, tag, False)

    def recv_anysource(self, tensors, tag=0):
        raise errors.Unavailable(
            f"{NAME} receives from a rank that is named, not from any", what="recv from any source", reason="no such call"
        )

    # --- the group ---

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return True

    def getBackendName(self):
        return NAME

    def split(self, store, ranks, opts):
        ranks = list(ranks)
        if opts is None:
            opts = _Backend.Options(NAME, timeout=self._options._timeout)
        mine = self.rank() in ranks
        with self._lock:
            self._drain()
            part = self._communicator.split(min(ranks) if mine else None, ranks.index(self.rank()) if mine else 0)
        return FastAllreduceBackend(part, opts) if mine else None

    def perform_nocolor_split(self, _device):
        with self._lock:
            self._drain()
            self._communicator.split(None)

    def _end(self, end):
        self._closed = True
        self._woken.set()
        end()

    def shutdown(self):
        if not self._closed:
            with self._lock:
                try:
                    self._drain()
                finally:
                    self._end(self._communicator.destroy)

    def abort(self):
        if not self._closed:
            self._end(self._communicator.abort)


class _Message(_Work):
    """A message, which goes with those beside it."""

    def __init__(self, backend, tensor, peer, tag, sends, tensors):
        super().__init__(backend, self._alone, tensors)
        self._tensor, self._peer, self._tag, self._sends = tensor, peer, tag, sends

    def is_completed(self):
        # Whoever asks again and again has put together what goes together.
        if not self._done:
            self._backend._carry_out(self)
        return self._done

    def _alone(self):
        self.put(self._backend._communicator)

    def put(self, communicator):
        call = communicator.send if self._sends else communicator.recv
        call(self._tensor, self._peer, tag=self._tag)

    def _source_rank(self):
        return self._peer

    source_rank = _source_rank


def _node():
    """Names the machine and its abstract sockets, which ranks meet by."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            machine = boot.read().strip()
        return f"{socket.gethostname()} {machine} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _create(dist_options, backend_options):
    rank, size = dist_options.group_rank, dist_options.group_size
    store, timeout = dist_options.store, dist_options.timeout
    if dist_options.split_from is not None:
        return dist_options.split_from.split(store, dist_options.global_ranks_in_group, backend_options)
    if size > MAX_RANKS:
        raise errors.InvalidArgument(
            f"{NAME} has at most {MAX_RANKS} ranks, and this group has {size}: use gloo, or nccl on GPUs, for it"
        )
    nodes = [f"node_{other}" for other in range(size)]
    store.set(nodes[rank], _node())
    if rank == 0:
        # The process group's first rank keeps the rendezvous.
        store.set("unique_id", bytes(get_unique_id()))
    store.wait(nodes + ["unique_id"], timeout)
    for other, key in enumerate(nodes):
        theirs = store.get(key).decode()
        if theirs != _node():
            raise errors.InvalidArgument(
                f"{NAME} is for the ranks of one machine: rank {rank} is on {_node()!r}, rank {other} on {theirs!r}; "
                "use gloo, or nccl on GPUs, between machines, and this for a group of each machine's ranks"
            )
    unique_id = UniqueId(store.get("unique_id"))
    communicator = Communicator.init(size, rank, unique_id, timeout=_seconds(timeout))
    options = backend_options if isinstance(backend_options, _Backend.Options) else None
    options = options or _Backend.Options(NAME, timeout=timeout)
    options._timeout = timeout
    return FastAllreduceBackend(communicator, options)


# What older versions of torch call these; they are not tested with them.
FastAllreduceBackend._allgather_base = FastAllreduceBackend.all_gather_single
FastAllreduceBackend._reduce_scatter_base = FastAllreduceBackend.reduce_scatter_single
FastAllreduceBackend.alltoall_base = FastAllreduceBackend.all_to_all_single
FastAllreduceBackend.allgather_into_tensor_coalesced = FastAllreduceBackend.all_gather_single_coalesced
FastAllreduceBackend.reduce_scatter_tensor_coalesced = FastAllreduceBackend.reduce_scatter_single_coalesced


def register():
    """Makes the backend known to torch.distributed, once."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
