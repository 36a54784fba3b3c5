"""What `torch.compile` traces in place of the methods of `Communicator`: the operators, and copies to where the results go.

The signatures are those of the methods. Reading `name`, `rank` and `nranks` has torch guard them by value: code that was compiled
for one communicator is compiled again for another.
"""

import torch

from .. import Communicator, ReduceOp, errors
from . import definitions

_operators = getattr(torch.ops, definitions.NAMESPACE)


def _in_graphs_of(method):
    return torch.compiler.substitute_in_graph(method, skip_signature_check=True)


def _text(op):
    return op.value if isinstance(op, ReduceOp) else op


def _put(target, value, stream):
    if stream is not None:
        raise errors.InvalidArgument("in compiled code a call is put on the current stream: leave out `stream`")
    if target.dtype != value.dtype or target.numel() != value.numel():
        raise errors.InvalidArgument(
            f"an output has {target.numel()} elements of {target.dtype}, and the call gives {value.numel()} of {value.dtype}"
        )
    target.copy_(value.reshape(target.shape))


@_in_graphs_of(Communicator.allreduce)
def allreduce(self, sendbuf, recvbuf=None, op="sum", *, stream=None):
    value = _operators.allreduce(sendbuf, self.name, _text(op))
    _put(sendbuf if recvbuf is None else recvbuf, value, stream)


@_in_graphs_of(Communicator.allreduce_quantized)
def allreduce_quantized(self, sendbuf, recvbuf=None, *, tolerance, transport="int8", stream=None):
    value = _operators.allreduce_quantized(sendbuf, self.name, tolerance, transport)
    _put(sendbuf if recvbuf is None else recvbuf, value, stream)


@_in_graphs_of(Communicator.allreduce_add)
def allreduce_add(self, sendbuf, residual, residual_out=None, *, stream=None):
    value = _operators.allreduce_add(sendbuf, residual, self.name)
    _put(residual if residual_out is None else residual_out, value, stream)


@_in_graphs_of(Communicator.allreduce_rms_norm)
def allreduce_rms_norm(
    self,
    sendbuf,
    residual,
    weight=None,
    recvbuf=None,
    residual_out=None,
    *,
    hidden=None,
    epsilon=1e-6,
    unit_offset=False,
    scale=None,
    scales=None,
    global_scale=None,
    scale_layout="tiled",
    sum_out=None,
    stream=None,
):
    normed = sendbuf if recvbuf is None else recvbuf
    rows, total, written, plain = _operators.allreduce_rms_norm_quantized(
        sendbuf, residual, weight, self.name, epsilon, unit_offset, hidden, scale, global_scale,
        normed.dtype, 0 if scales is None else scales.numel(), scale_layout, sum_out is not None,
    )  # fmt: skip
    _put(normed, rows, stream)
    _put(residual if residual_out is None else residual_out, total, stream)
    if scales is not None:
        _put(scales if global_scale is None else scales.view(torch.uint8), written, stream)
    if sum_out is not None:
        _put(sum_out, plain, stream)


@_in_graphs_of(Communicator.allgather)
def allgather(self, sendbuf, recvbuf, *, stream=None):
    _put(recvbuf, _operators.allgather(sendbuf, self.nranks, self.name), stream)


@_in_graphs_of(Communicator.allgather_v)
def allgather_v(self, sendbuf, recvbuf, counts, *, stream=None):
    _put(recvbuf, _operators.allgather_v(sendbuf, counts, self.name), stream)


@_in_graphs_of(Communicator.reduce_scatter)
def reduce_scatter(self, sendbuf, recvbuf, op="sum", *, stream=None):
    _put(recvbuf, _operators.reduce_scatter(sendbuf.reshape(-1), self.nranks, self.name, _text(op)), stream)


@_in_graphs_of(Communicator.reduce_scatter_v)
def reduce_scatter_v(self, sendbuf, recvbuf, counts, op="sum", *, stream=None):
    _put(recvbuf, _operators.reduce_scatter_v(sendbuf, counts, self.rank, self.name, _text(op)), stream)


@_in_graphs_of(Communicator.broadcast)
def broadcast(self, sendbuf, recvbuf=None, root=0, *, stream=None):
    target = sendbuf if recvbuf is None else recvbuf
    _put(target, _operators.broadcast(sendbuf if self.rank == root else target, root, self.name), stream)


@_in_graphs_of(Communicator.reduce)
def reduce(self, sendbuf, recvbuf=None, op="sum", root=0, *, stream=None):
    value = _operators.reduce(sendbuf, root, self.name, _text(op))
    if self.rank == root:
        _put(sendbuf if recvbuf is None else recvbuf, value, stream)


@_in_graphs_of(Communicator.gather)
def gather(self, sendbuf, recvbuf=None, root=0, *, stream=None):
    value = _operators.gather(sendbuf, self.nranks if self.rank == root else 0, root, self.name)
    if self.rank == root:
        _put(recvbuf, value, stream)


@_in_graphs_of(Communicator.scatter)
def scatter(self, sendbuf, recvbuf, root=0, *, stream=None):
    _put(recvbuf, _operators.scatter(recvbuf, sendbuf if self.rank == root else None, root, self.name), stream)


@_in_graphs_of(Communicator.alltoall)
def alltoall(self, sendbuf, recvbuf, *, stream=None):
    _put(recvbuf, _operators.alltoall(sendbuf, self.name), stream)


@_in_graphs_of(Communicator.alltoall_v)
def alltoall_v(self, sendbuf, sendcounts, recvbuf, recvcounts, *, stream=None):
    _put(recvbuf, _operators.alltoall_v(sendbuf, sendcounts, recvcounts, self.name), stream)


@_in_graphs_of(Communicator.barrier)
def barrier(self, *, stream=None):
    if stream is not None:
        raise errors.InvalidArgument("in compiled code a call is put on the current stream: leave out `stream`")
    _operators.barrier(self.name)
