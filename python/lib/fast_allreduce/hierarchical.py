"""Collectives of ranks on several machines: this library inside each machine, gloo between them.

`Hierarchical` joins the communicator of a machine's ranks and a process group of the ranks with the same local rank on
all machines. Each byte of a large message crosses the network once for each machine, not once for each rank, and all
ranks of a machine send at the same time::

    local = fa.Communicator.from_env()            # the ranks of this machine
    world = Hierarchical(local, between)          # `between`: a gloo group, in the order of the machines
    world.allreduce(tensor)

`dist.init_process_group("fast_allreduce")` on several machines makes such a world of all ranks by itself.
docs/machines.md shows how to start one.
"""

import datetime
import functools
import threading
import time

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import ReduceOp, errors
from ._catalogue import TORCH_OPS
from .tensors import REDUCED

_THEIRS = {ours.value: getattr(dist.ReduceOp, name) for name, ours in TORCH_OPS.items()}

# Types that gloo reduces, and the types in which it reduces others.
_REDUCED_BY_GLOO = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
_WIDER = {torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32}

# How long ranks wait for each other after a failure, to learn who is missing, in seconds. A rank whose process has
# ended is named at once by the ranks of its machine; this is for a machine that is lost, and a rank that computes.
_ROLL_CALL = 5.0

# How often a rank that waits for gloo looks whether others have failed, in seconds: gloo closes its connections when a
# process ends, and not when it is aborted.
_LOOK = 1.0

_LINE_BYTES = 64

# Bytes of a rank's slice in a piece of a large allreduce: while a piece is between the machines, they work on the
# pieces before and after it.
_SLICE_BYTES = 2 << 20

# In the message by which machines compare calls: bytes of the call, and bytes of small calls' data of all machines.
_HEAD_BYTES, _DATA_BYTES = 128, 8192

# How the data of small calls are reduced, in the order of the machines.
_STEPS = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_ACCUMULATED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, **_WIDER}


def slices(count, element_size, ranks):
    """Returns the number of elements of each rank's slice. Slices begin at cache lines."""
    line = _LINE_BYTES // element_size
    lines = -(-count // line)
    ends = [min(count, line * (rank * (lines // ranks) + min(rank, lines % ranks))) for rank in range(ranks + 1)]
    return [end - begin for begin, end in zip(ends, ends[1:])]


class Hierarchical:
    """A rank of a world on several machines, for tensors on the CPU.

    `local` is the communicator of this machine's ranks, and `between` a process group, such as gloo's, of the ranks
    with the same local rank, in the order of the machines. Collective among all ranks, which are numbered machine by
    machine: `rank = node * local.nranks + local.rank`.

    `timeout` limits the waits of each call in seconds. With a `store` of torch.distributed that nothing else uses (a
    `PrefixStore`), errors name the ranks that are missing, and a failure ends the calls of all machines within seconds;
    gloo's own errors name none, and come when a process ends or at the limit. `checked` makes the machines compare
    their calls first, which takes one more message in each direction, except for small allreduces, whose data it
    carries.

    Raises `Unavailable` on all ranks if the machines have different numbers of ranks. An error of a call other than
    `InvalidArgument` ends this world: each later call raises it again.
    """

    def __init__(self, local, between, *, timeout=120.0, store=None, checked=True):
        self.local, self._between, self._store, self._checked = local, between, store, checked
        self.node, self.nodes = between.rank(), between.size()
        self.rank, self.nranks = self.node * local.nranks + local.rank, self.nodes * local.nranks
        self._failure, self._looking, self._told = None, None, threading.Event()
        self._calls = 0
        self.set_timeout(timeout)
        ranks, mine = local.nranks, local.rank
        shape = torch.tensor([ranks, -ranks, mine, -mine, self.nodes, -self.nodes])
        self._reduce_between(shape, dist.ReduceOp.MIN)
        # The local rank is the same on all machines, not on this one.
        shape[2:4] = torch.tensor([0, shape[2] + shape[3]])
        self._in_node(lambda: local.allreduce(shape, op="min"))
        least, most, _, crossed, fewest, many = shape.tolist()
        if least != -most or fewest != -many or crossed:
            raise errors.Unavailable(
                f"a world of machines with {least} to {-most} ranks is not available: start the same number of ranks "
                "on each machine, and let each group between them have the ranks with one local rank",
                what="a world of unequal machines", reason="the machines have different numbers of ranks",
            )  # fmt: skip

    def set_timeout(self, timeout):
        """Limits the waits of later calls, in seconds."""
        if not timeout > 0:
            raise errors.InvalidArgument(f"the timeout is {timeout} s, and must be positive")
        self._limit = timeout
        self.local.set_timeout(timeout)

    # --- calls ---

    def allreduce(self, sendbuf, recvbuf=None, op="sum", *, stream=None):
        """Reduces the tensors of all ranks element by element. Without `recvbuf`, the result replaces `sendbuf`.

        The machines' sums of large messages are added by gloo. Small messages are first added between the machines, in
        their order, and then between local ranks. All ranks get equal bits, which may differ from those of one machine.
        For small messages, that needs one order of additions on all machines: the communicators have equal settings,
        which choose equal algorithms. Sums between machines are rounded to the type once for each machine. Averages are
        those of floats; one of a large message overflows where a machine's sum does.
        """
        output = sendbuf if recvbuf is None else recvbuf
        op = _name(op)
        theirs = self._operation(op, sendbuf)
        source, target = self._flat(sendbuf), self._flat(output)
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise errors.InvalidArgument(
                f"the tensors have {source.numel()} and {target.numel()} elements of {source.dtype} and {target.dtype}"
            )
        _check_overlap(source, target)
        if self._checked and source.numel() * source.element_size() <= self._share():
            # In the order of the machines, so that ranks with the same local rank have equal bits.
            wide = _ACCUMULATED.get(source.dtype, source.dtype)
            parts = [part.to(wide) for part in self._begin("allreduce", source, op, carries=True)]
            whole = functools.reduce(_STEPS[op], parts)
            piece = (whole / self.nodes if op == "avg" else whole).to(source.dtype)
            self._in_node(lambda: self.local.allreduce(piece, target, op))
            self._back(target, output)
            return
        self._begin("allreduce", source, op)
        inside = "sum" if op == "avg" else op
        most = self.local.nranks * (_SLICE_BYTES // source.element_size())
        if self._checked and source.numel() > most:
            # The calls inside the machine compare pieces, whose lengths are equal in calls of different lengths.
            heads = self._head.new_empty(self.local.nranks, _HEAD_BYTES)
            self._in_node(lambda: self.local.allgather(self._head, heads))
            self._compare(heads, self.node * self.local.nranks, 1)
        earlier = []
        for begin in range(0, max(source.numel(), 1), most):
            data, result = source[begin : begin + most], target[begin : begin + most]
            counts = slices(data.numel(), data.element_size(), self.local.nranks)
            piece = result.split(counts)[self.local.rank]
            self._in_node(functools.partial(self.local.reduce_scatter_v, data, piece, counts, inside))
            finish = self._start_reduction(piece, theirs, self.nranks if op == "avg" else 1)
            earlier.append((finish, functools.partial(self.local.allgather_v, piece, result, counts)))
            # The machine's ranks gather a piece while the next one is between the machines.
            if begin:
                self._end_piece(*earlier.pop(0))
        self._end_piece(*earlier.pop())
        self._back(target, output)

    def _end_piece(self, finish, gather):
        finish()
        self._in_node(gather)

    def broadcast(self, sendbuf, recvbuf=None, root=0, *, stream=None):
        """Copies the tensor of rank `root` to all ranks: to `recvbuf`, or to `sendbuf` without it."""
        output = sendbuf if recvbuf is None else recvbuf
        if recvbuf is not None and self.rank == root:
            recvbuf.copy_(sendbuf)
        node, local_root = divmod(self._rank(root), self.local.nranks)
        target = self._flat(output)
        self._begin("broadcast", target, root)
        counts = slices(target.numel(), target.element_size(), self.local.nranks)
        start = sum(counts[: self.local.rank])
        if self.node == node:
            self._in_node(lambda: self.local.broadcast(target, None, local_root))
        piece = target[start : start + counts[self.local.rank]].clone()
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = node, 0
        if piece.numel():
            self._among_nodes(lambda: self._between.broadcast([_bytes(piece)], options))
        if self.node != node:
            self._in_node(lambda: self.local.allgather_v(piece, target, counts))
        self._back(target, output)

    def allgather(self, sendbuf, recvbuf, *, stream=None):
        """Gathers the tensors of all ranks, of n elements each, in `recvbuf` of `nranks * n` elements."""
        source, target = self._flat(sendbuf), self._flat(recvbuf)
        if target.numel() != self.nranks * source.numel() or target.dtype != source.dtype:
            raise errors.InvalidArgument(
                f"recvbuf has {target.numel()} elements of {target.dtype}, and {self.nranks} ranks have "
                f"{source.numel()} of {source.dtype} each"
            )
        self._begin("allgather", source, "")
        of_nodes = source.new_empty(self.nodes, source.numel())
        parts = [_bytes(part) for part in of_nodes]
        self._among_nodes(lambda: self._between.allgather([parts], [_bytes(source)], c10d.AllgatherOptions()))
        gathered = source.new_empty(self.local.nranks, self.nodes, source.numel())
        self._in_node(lambda: self.local.allgather(of_nodes, gathered))
        target.view(self.nodes, self.local.nranks, source.numel()).copy_(gathered.transpose(0, 1))
        self._back(target, recvbuf)

    def reduce_scatter(self, sendbuf, recvbuf, op="sum", *, stream=None):
        """Reduces the tensors of all ranks, of `nranks * n` elements, and gives each rank its n elements."""
        op = _name(op)
        theirs = self._operation(op, sendbuf)
        source, target = self._flat(sendbuf), self._flat(recvbuf)
        if source.numel() != self.nranks * target.numel() or target.dtype != source.dtype:
            raise errors.InvalidArgument(
                f"sendbuf has {source.numel()} elements of {source.dtype}, and {self.nranks} ranks get "
                f"{target.numel()} of {target.dtype} each"
            )
        self._begin("reduce_scatter", target, op)
        by_local = source.view(self.nodes, self.local.nranks, -1).transpose(0, 1).contiguous()
        piece = target.new_empty(self.nodes, target.numel())
        inside = "sum" if op == "avg" else op
        self._in_node(lambda: self.local.reduce_scatter(by_local, piece, inside))
        # gloo's own reduce-scatter is an allreduce as well.
        self._reduce_between(piece, theirs, self.nranks if op == "avg" else 1)
        target.copy_(piece[self.node])
        self._back(target, recvbuf)

    def barrier(self, *, stream=None):
        """Returns when all ranks have called it."""
        self._healthy()
        self._in_node(self.local.barrier)
        self._among_nodes(lambda: self._between.barrier(c10d.BarrierOptions()))
        self._in_node(self.local.barrier)

    def check(self):
        """Raises the error that has ended this world, if there is one."""
        self._healthy()
        self.local.check()

    def abort(self):
        """Ends the calls of all threads, and this world on all ranks: theirs fail, too. Without a store, those of other
        machines fail at their limit."""
        self._failure = self._failure or errors.Aborted("the communicator was aborted")
        self.local.abort()
        self._close()
        if self._store is not None:
            # Ranks that wait learn it by the roll call of this one.
            threading.Thread(target=self._roll_call, args=({},), daemon=True).start()

    def destroy(self):
        """Ends this rank. The other ranks get an error from calls that wait for it."""
        self._failure = self._failure or errors.Aborted("the communicator was destroyed")
        self.local.destroy()
        self._between = None

    # --- steps ---

    def _rank(self, rank):
        if not 0 <= rank < self.nranks:
            raise errors.RankOutOfRange(
                f"rank {rank} is out of range for a world of {self.nranks}", rank=rank, world_size=self.nranks
            )
        return rank

    def _flat(self, tensor):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
            raise errors.InvalidArgument("between machines, buffers are torch tensors on the CPU: use nccl on GPUs")
        if tensor.dtype not in REDUCED:
            raise errors.InvalidArgument(f"{tensor.dtype} is not supported")
        # Detached: results are written to parameters as well.
        flat = tensor.detach().contiguous().view(-1)
        # One element or none may have any stride, with which torch would not view its bytes.
        return flat.as_strided((flat.numel(),), (1,)) if flat.numel() < 2 else flat

    def _back(self, flat, tensor):
        """Copies a result to a tensor that is not contiguous."""
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _operation(self, name, tensor):
        """Returns torch's operation for one of this library. Raises `InvalidArgument` if gloo does not have it."""
        theirs = dist.ReduceOp.SUM if name == "avg" else _THEIRS.get(name)
        dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else None
        if theirs is None or dtype not in _REDUCED_BY_GLOO | set(_WIDER):
            raise errors.InvalidArgument(f"{name} of {dtype} is not available between machines")
        if name == "avg" and not dtype.is_floating_point:
            raise errors.InvalidArgument(f"an average of {dtype} is not available between machines: sum, then divide")
        if name in ("band", "bor", "bxor") and dtype.is_floating_point:
            raise errors.InvalidArgument(f"{name} is an operation of integers, not of {dtype}")
        return theirs

    def _share(self):
        """Returns how many bytes of data a machine can send with its call."""
        return _DATA_BYTES // self.nodes

    def _begin(self, call, tensor, argument, carries=False):
        """Begins a call: compares it with those of the other machines. Returns all machines' tensors if the message
        `carries` them. It has one length for all calls, so that any two can be compared."""
        self._healthy()
        self._calls += 1
        if not self._checked:
            return []
        text = f"{call} number {self._calls} of {tensor.numel()} {tensor.dtype} ({argument})"
        message = bytearray(_HEAD_BYTES + self._share())
        text = text.encode()[:_HEAD_BYTES]
        message[: len(text)] = text
        message = torch.frombuffer(message, dtype=torch.uint8)
        self._head = message[:_HEAD_BYTES]
        data = slice(_HEAD_BYTES, _HEAD_BYTES + tensor.numel() * tensor.element_size() if carries else _HEAD_BYTES)
        if carries:
            message[data] = tensor.view(torch.uint8)
        messages = [torch.empty_like(message) for _ in range(self.nodes)]
        self._among_nodes(lambda: self._between.allgather([messages], [message], c10d.AllgatherOptions()))
        self._compare([theirs[:_HEAD_BYTES] for theirs in messages], self.local.rank, self.local.nranks)
        return [message[data].view(tensor.dtype) for message in messages] if carries else []

    def _compare(self, heads, first, step):
        """Compares the calls of the ranks `first`, `first + step`, ..., one in each of `heads`, with this rank's."""
        for number, theirs in enumerate(heads):
            if not torch.equal(theirs, self._head):
                other = first + number * step
                theirs, mine = (
                    bytes(head.tolist()).rstrip(b"\0").decode(errors="replace") for head in (theirs, self._head)
                )
                raise self._fail(errors.Disagreement(
                    f"ranks disagree on the call: rank {other} has {theirs}, rank {self.rank} has {mine}",
                    what="the call", rank=other, theirs=theirs, own_rank=self.rank, ours=mine,
                ))  # fmt: skip

    def _healthy(self):
        if self._failure is not None:
            raise self._failure

    def _reduce_between(self, tensor, op, divisor=1):
        """Reduces a tensor among the machines, and divides the result."""
        self._start_reduction(tensor, op, divisor)()

    def _start_reduction(self, tensor, op, divisor=1):
        """Starts to reduce a tensor among the machines. The function that this returns completes it."""
        # torch has no arithmetic of the narrow types.
        wide = tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor
        work = None
        if self.nodes > 1 and tensor.numel() > 0:
            options = c10d.AllreduceOptions()
            options.reduceOp = op
            work = self._of_gloo(lambda: self._between.allreduce([wide], options))

        def finish():
            if work is not None:
                self._among_nodes(lambda: work)
            if divisor != 1:
                wide.div_(divisor)
            if wide is not tensor:
                tensor.copy_(wide)

        return finish

    def _in_node(self, step):
        """Runs a step inside the machine. Its errors name ranks of the machine, which become those of the world."""
        try:
            step()
        except errors.InvalidArgument:
            raise
        except errors.Error as error:
            first = self.node * self.local.nranks
            if getattr(error, "missing", None):
                error.missing = [first + rank for rank in error.missing]
            if getattr(error, "rank", None) is not None:
                error.rank = first + error.rank
            if first:
                error.args = (f"on machine {self.node}, whose first rank is {first}: {error}",)
            raise self._fail(self._named(error)) from None

    def _among_nodes(self, step):
        """Waits for a step between the machines, within the limit."""

        def wait():
            # Collectives of gloo return their work at once. It goes on after a wait that was too short.
            work, until, is_last = step(), time.monotonic() + self._limit, False
            while True:
                left = until - time.monotonic()
                try:
                    if not work.wait(datetime.timedelta(seconds=max(min(_LOOK, left), 0.001))):
                        raise RuntimeError("the call has failed")
                    return
                except RuntimeError:
                    if is_last or left <= _LOOK:
                        raise
                # It may have completed since.
                is_last = work.is_completed()
                if not is_last:
                    self._look()

        self._of_gloo(wait)

    def _look(self):
        """Raises `RuntimeError` if a rank of this machine has failed, or any that has made a roll call."""
        try:
            self.local.check()
        except errors.Error as error:
            raise RuntimeError(str(error)) from None
        if self._told.is_set():
            raise RuntimeError("another rank has failed")
        # In a thread, since the store's machine may have gone. One that waits for it is the last.
        if self._store is not None and not (self._looking and self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look_in_store, daemon=True)
            self._looking.start()

    def _look_in_store(self):
        try:
            if self._store.check(["failed"]):
                self._told.set()
        except RuntimeError:
            # The store's process has ended, or it cannot be reached.
            return

    def _of_gloo(self, step):
        """Runs a step of gloo, whose errors end this world."""
        try:
            return step()
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else "gloo failed"
            late = "imed out" in text or "imeout" in text
            kind = errors.Timeout if late else errors.PeerFailed
            fields = (
                {"operation": "between machines", "missing": [], "waited": self._limit, "last_seen": "", "epoch": 0}
                if late
                else {"rank": None, "reason": text}
            )
            raise self._fail(self._named(kind(f"the call between the machines failed: {text}", **fields))) from None

    def _fail(self, error):
        """Ends this world, so that no other rank waits for this one."""
        if self._failure is None:
            self._failure = error
            self.local.abort()
            self._close()
        return self._failure

    def _close(self):
        """Closes the connections between the machines, so that the other ends fail at once."""
        if self._between is not None and hasattr(self._between, "abort"):
            try:
                self._between.abort()
            except RuntimeError:
                # A backend that cannot abort: the others wait until their limit.
                pass

    def _named(self, error):
        """Names the ranks that do not answer after a failure, by a roll call through the store."""
        if self._store is None or self._failure is not None:
            return error
        # The others fail as well once their connections to this rank close.
        self._failure = error
        self.local.abort()
        self._close()
        told = {}
        # In a thread, since the store's machine may have gone, and its own limit is minutes.
        caller = threading.Thread(target=self._roll_call, args=(told,), daemon=True)
        caller.start()
        caller.join(2 * _ROLL_CALL)
        missing = told.get("missing")
        if missing is None:
            error.args = (f"{error}; the store of the process group does not answer either",)
            return error
        # After a disagreement, ranks that do not answer may be in the call, until their limit.
        if missing and not isinstance(error, errors.Disagreement):
            told = ", ".join(map(str, missing))
            kind, fields = errors.PeerLost, {"rank": missing[0], "reason": str(error)}
            if isinstance(error, errors.Timeout):
                kind, fields = errors.Timeout, {**error.__dict__, "missing": missing}
            ranks = "rank" if len(missing) == 1 else "ranks"
            error = kind(f"{ranks} {told} did not answer after a failure: {error}", **fields)
        self._failure = error
        return error

    def _roll_call(self, told):
        """Sets `told["missing"]` to the ranks that do not answer, if the store does."""
        try:
            self._store.set(f"failed_{self.rank}", "")
            self._store.set("failed", "")
            until = time.monotonic() + min(_ROLL_CALL, self._limit)
            first = self.node * self.local.nranks
            while True:
                is_last = time.monotonic() >= until
                for local in set(range(self.local.nranks)).difference(self.local.survivors):
                    self._store.set(f"gone_{first + local}", "")
                # In this order: a rank may end as soon as it has answered.
                gone = {rank for rank in range(self.nranks) if self._store.check([f"gone_{rank}"])}
                missing = [rank for rank in range(self.nranks) if not self._store.check([f"failed_{rank}"])]
                if is_last or gone.issuperset(missing):
                    told["missing"] = missing
                    return
                time.sleep(0.05)
        except (RuntimeError, errors.Error):
            # The store's process has ended, or it cannot be reached.
            return


def _check_overlap(source, target):
    """Raises `Overlap` if tensors of one size overlap without being the same: pieces are written while others are read.
    The calls inside the machine compare pieces alone."""
    size = source.numel() * source.element_size()
    first, second = source.data_ptr(), target.data_ptr()
    if 0 < abs(first - second) < size:
        raise errors.Overlap(
            f"the input at {first:#x} and the output at {second:#x}, of {size} bytes each, overlap, but are not equal",
            input=first, output=second, bytes=size,
        )  # fmt: skip


def _name(op):
    return op.value if isinstance(op, ReduceOp) else str(op)


def _bytes(tensor):
    """Returns a contiguous tensor in a type that gloo moves."""
    return tensor if tensor.dtype in _REDUCED_BY_GLOO else tensor.view(torch.uint8)
