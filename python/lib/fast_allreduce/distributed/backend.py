"""The methods that torch.distributed calls on a process group's backend, implemented by this library's calls."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from .. import errors, premul_sum
from .._catalogue import INTEGER_OPS, TORCH_OPS
from ..tensors import REDUCED, as_moved, check_dense
from .devices import Devices, current_stream, seconds
from .queue import Queue, Work

NAME = "fast_allreduce"

# By number: torch's own objects are slow to hash.
_OPERATIONS = {int(getattr(dist.ReduceOp, theirs)): ours.value for theirs, ours in TORCH_OPS.items()}
_PREMUL_SUM = int(dist.ReduceOp.PREMUL_SUM)
_BITWISE = tuple(op.value for op in INTEGER_OPS)
# Operations on bool, as bytes of 0 and 1.
_BOOLEAN = {"sum": "max", "prod": "min", "min": "min", "max": "max", **{name: name for name in _BITWISE}}


def _operation(opts, tensor):
    """Returns the tensor to reduce and the name of the operation.

    Raises `InvalidArgument` if the type does not have it.
    """
    given = opts.reduceOp
    op = int(getattr(given, "op", given))
    name = _OPERATIONS.get(op)
    if name is None and op == _PREMUL_SUM:
        name = _premul_sum(given)
    if name is None:
        raise errors.InvalidArgument(
            f"{opts.reduceOp} is not supported by {NAME}: {', '.join(TORCH_OPS)} and PREMUL_SUM are"
        )
    if tensor.dtype in REDUCED:
        if name in _BITWISE and tensor.dtype.is_floating_point:
            raise errors.InvalidArgument(f"{name} is an operation of integers, not of {tensor.dtype}")
        return tensor, name
    check_dense(tensor)
    if tensor.dtype == torch.bool and name in _BOOLEAN:
        return tensor.view(torch.uint8), _BOOLEAN[name]
    if tensor.is_complex() and (name in ("sum", "avg") or name.startswith("premul_sum")):
        return torch.view_as_real(tensor), name
    raise errors.InvalidArgument(f"{NAME} does not reduce elements of {tensor.dtype} by {name}")


def _premul_sum(op):
    """Returns the name of a premultiplied sum, whose scale is a number or a tensor of one element."""
    # torch exposes the scale in no other way.
    _, factor = op.__getstate__()
    if isinstance(factor, torch.Tensor):
        if factor.is_cuda:
            # While a copy to the CPU waits for a call, no other thread of the process can launch one.
            current_stream(factor.device).synchronize()
        factor = factor.item()
    return premul_sum(factor)


def _limit(opts):
    """Returns a call's own limit in seconds, or None."""
    limit = opts.timeout.total_seconds()
    return limit if limit > 0 else None


def _one(tensors):
    if len(tensors) != 1:
        raise errors.InvalidArgument(f"{NAME} takes one tensor for each rank, not {len(tensors)}")
    return tensors[0]


def _differs(output, like):
    return output.numel() != like.numel() or output.dtype != like.dtype or not output.is_contiguous()


def _rows(tensors):
    """Returns the elements of tensors of any shapes as one vector."""
    return torch.cat([one.reshape(-1) for one in tensors])


def _spread(flat, outputs):
    """Copies the parts of a vector into tensors of any shapes."""
    for output, part in zip(outputs, flat.split([as_moved(one).numel() for one in outputs])):
        as_moved(output).view(-1).copy_(part)


class FastAllreduceBackend(_Backend):
    """The backend of one process group. torch creates it; programs use torch.distributed.

    Methods have the names and semantics of torch's `Backend`.
    """

    def __init__(self, devices, options):
        super().__init__(devices.host.rank, devices.host.nranks)
        self._devices = devices
        self._options = options
        self._queue = Queue(devices)

    def _make(self, opts, tensor, call, tensors):
        """Runs or queues `call(communicator, stream)`, with the communicator of the tensor's device.

        Returns a `Work`, or None for a synchronous call on the CPU, which is done.
        """
        if tensor.is_cpu:
            host = self._devices.host
            return self._queue.make(opts.asyncOp, lambda: call(host, None), tensors, None, _limit(opts))
        devices, stream = self._devices, current_stream(tensor.device)
        return self._queue.make(opts.asyncOp, lambda: call(devices.of(tensor), stream), tensors, stream, _limit(opts))

    # --- collectives ---

    def allreduce(self, tensors, opts):
        tensor, op = _operation(opts, _one(tensors))
        return self._make(opts, tensor, lambda on, stream: on.allreduce(tensor, None, op, stream=stream), tensors)

    def allreduce_coalesced(self, tensors, opts):
        pairs = [_operation(opts, tensor) for tensor in tensors]

        def call(on, stream):
            for tensor, op in pairs:
                on.allreduce(tensor, None, op, stream=stream)

        return self._make(opts, tensors[0], call, tensors)

    def broadcast(self, tensors, opts):
        tensor, root = as_moved(_one(tensors)), opts.rootRank
        return self._make(opts, tensor, lambda on, stream: on.broadcast(tensor, None, root, stream=stream), tensors)

    def reduce(self, tensors, opts):
        tensor, op = _operation(opts, _one(tensors))
        root = opts.rootRank
        return self._make(opts, tensor, lambda on, stream: on.reduce(tensor, None, op, root, stream=stream), tensors)

    def all_gather_single(self, output, input, opts):
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        pairs = [(as_moved(one), as_moved(other)) for one, other in zip(inputs, outputs)]

        def call(on, stream):
            for one, other in pairs:
                on.allgather(one, other, stream=stream)

        return self._make(opts, outputs[0], call, outputs)

    def allgather(self, output_lists, inputs, opts):
        outputs, tensor = _one(output_lists), as_moved(_one(inputs))
        if len(outputs) != self.size():
            raise errors.InvalidArgument(f"{len(outputs)} outputs for {self.size()} ranks")
        if not all(output.is_contiguous() for output in outputs):
            raise errors.InvalidArgument("an output is not contiguous")
        counts = [as_moved(output).numel() for output in outputs]

        def call(on, stream):
            flat = tensor.new_empty(sum(counts))
            on.allgather_v(tensor, flat, counts, stream=stream)
            _spread(flat, outputs)

        return self._make(opts, tensor, call, outputs)

    def allgather_coalesced(self, output_lists, inputs, opts):
        # `output_lists` has a list for each rank, with an output for each input.
        if len(output_lists) != self.size() or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise errors.InvalidArgument(
                f"outputs are {len(output_lists)} lists of {list(map(len, output_lists))} tensors, for {len(inputs)} "
                f"inputs of each of {self.size()} ranks"
            )
        works = [self.allgather([outputs], [one], opts) for *outputs, one in zip(*output_lists, inputs)]
        return works[-1] if works else Work(self._queue)

    def gather(self, output_lists, inputs, opts):
        tensor, root = as_moved(_one(inputs)), opts.rootRank
        outputs = _one(output_lists) if self.rank() == root else []
        # The other ranks' sizes are unknown: each must send as much as this rank, of the same type.
        if outputs and (len(outputs) != self.size() or any(_differs(output, inputs[0]) for output in outputs)):
            raise errors.InvalidArgument(f"the outputs are not {self.size()} contiguous tensors like the input")

        def call(on, stream):
            flat = tensor.new_empty(tensor.numel() * self.size()) if outputs else None
            on.gather(tensor, flat, root, stream=stream)
            if outputs:
                _spread(flat, outputs)

        return self._make(opts, tensor, call, outputs)

    def scatter(self, outputs, input_lists, opts):
        target, root = as_moved(_one(outputs)), opts.rootRank
        inputs = _one(input_lists) if self.rank() == root else []

        def call(on, stream):
            flat = _rows(map(as_moved, inputs)) if inputs else None
            on.scatter(flat, target, root, stream=stream)

        return self._make(opts, target, call, outputs)

    def reduce_scatter_single(self, output, input, opts):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        parts = [(*_operation(opts, one), _operation(opts, other)[0]) for one, other in zip(inputs, outputs)]

        def call(on, stream):
            for source, op, target in parts:
                on.reduce_scatter(source, target, op, stream=stream)

        return self._make(opts, outputs[0], call, outputs)

    def reduce_scatter(self, outputs, input_lists, opts):
        inputs = _one(input_lists)
        target, op = _operation(opts, _one(outputs))
        sources = [_operation(opts, one)[0] for one in inputs]
        counts = [source.numel() for source in sources]

        def call(on, stream):
            on.reduce_scatter_v(_rows(sources), target, counts, op, stream=stream)

        return self._make(opts, target, call, outputs)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts):
        source, target = as_moved(input), as_moved(output)
        if not output_splits and not input_splits:
            return self._make(opts, target, lambda on, stream: on.alltoall(source, target, stream=stream), [output])
        send = self._elements("input", input, source, input_splits)
        receive = self._elements("output", output, target, output_splits)

        def call(on, stream):
            on.alltoall_v(source, send, target, receive, stream=stream)

        return self._make(opts, target, call, [output])

    def _elements(self, name, tensor, moved, splits):
        """Converts splits of the first dimension to numbers of elements of the moved tensor."""
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
        sources, targets = [as_moved(one) for one in inputs], [as_moved(one) for one in outputs]
        send, receive = [one.numel() for one in sources], [one.numel() for one in targets]

        def call(on, stream):
            flat = _rows(sources)
            received = flat.new_empty(sum(receive))
            on.alltoall_v(flat, send, received, receive, stream=stream)
            _spread(received, targets)

        return self._make(opts, targets[0], call, outputs)

    def barrier(self, opts):
        return self._queue.make(opts.asyncOp, self._devices.barrier, limit=_limit(opts))

    # --- messages ---

    def send(self, tensors, dst, tag=0):
        return self._queue.message(as_moved(_one(tensors)), dst, tag, True, tensors)

    def recv(self, tensors, src, tag=0):
        return self._queue.message(as_moved(_one(tensors)), src, tag, False, tensors)

    def recv_anysource(self, tensors, tag=0):
        raise errors.Unavailable(
            f"{NAME} cannot receive from any source: name the rank",
            what="recv from any source", reason="messages name the sender",
        )  # fmt: skip

    def start_coalescing(self):
        self._queue.start_coalescing()

    def end_coalescing(self):
        return self._queue.end_coalescing()

    # --- the group ---

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        # Without it, torch makes the new group through its store.
        return not self._devices.are_apart

    @property
    def supports_coalescing(self):
        return True

    def getBackendName(self):
        return NAME

    def set_timeout(self, timeout):
        self._devices.set_timeout(seconds(timeout))
        self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device=None):
        # The device that init_process_group was passed.
        if device is not None and device.type == "cuda":
            with self._queue.lock:
                self._queue.drain()
                self._devices.on(device)

    def split(self, store, ranks, opts):
        ranks = list(ranks)
        if opts is None:
            opts = _Backend.Options(NAME, timeout=self._options._timeout)
        mine = self.rank() in ranks
        with self._queue.lock:
            self._queue.drain()
            part = self._devices.host.split(min(ranks) if mine else None, ranks.index(self.rank()) if mine else 0)
        if not mine:
            return None
        return FastAllreduceBackend(Devices(part, seconds(opts._timeout), self._devices.globally(ranks)), opts)

    def perform_nocolor_split(self, _device):
        with self._queue.lock:
            self._queue.drain()
            self._devices.host.split(None)

    def shutdown(self):
        if not self._queue.closed:
            with self._queue.lock:
                try:
                    self._queue.drain()
                finally:
                    self._queue.close(self._devices.destroy)

    def flight_record(self):
        """Returns what all ranks did last: a list with the flight record of each device's communicator."""
        return self._devices.flight_record()

    def abort(self):
        if not self._queue.closed:
            self._queue.close(self._devices.abort)


# Names of these methods in older versions of torch, which are not tested.
FastAllreduceBackend._allgather_base = FastAllreduceBackend.all_gather_single
FastAllreduceBackend._reduce_scatter_base = FastAllreduceBackend.reduce_scatter_single
FastAllreduceBackend.alltoall_base = FastAllreduceBackend.all_to_all_single
FastAllreduceBackend.allgather_into_tensor_coalesced = FastAllreduceBackend.all_gather_single_coalesced
FastAllreduceBackend.reduce_scatter_tensor_coalesced = FastAllreduceBackend.reduce_scatter_single_coalesced
