"""Functions that `torch.compile` traces instead of the methods of `Communicator`: operators, and copies of their
results.

Signatures equal those of the methods. torch guards `name`, `rank` and `nranks` by value where they are read, so code
that was compiled for one communicator is compiled again for another.
"""

import torch

from .. import Communicator, ReduceOp, errors
from .._catalogue import GIVEN_SCALINGS
from . import definitions

_operators = getattr(torch.ops, definitions.NAMESPACE)

_ON_CURRENT_STREAM = "in compiled code a call is enqueued on the current stream: leave out `stream`"


def _in_graphs_of(method):
    return torch.compiler.substitute_in_graph(method, skip_signature_check=True)


def _text(op):
    return op.value if isinstance(op, ReduceOp) else op


def _put(target, value, stream):
    if stream is not None:
        raise errors.InvalidArgument(_ON_CURRENT_STREAM)
    if target.dtype != value.dtype or target.numel() != value.numel():
        raise errors.InvalidArgument(
            f"an output has {target.numel()} elements of {target.dtype}, and the call returns {value.numel()} of "
            f"{value.dtype}"
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


@_in_graphs_of(Communicator.allreduce_fused)
def allreduce_fused(
    self,
    sendbuf,
    recvbuf=None,
    *,
    residual,
    residual_out=None,
    norm=None,
    weight=None,
    bias=None,
    hidden=None,
    epsilon=1e-6,
    unit_offset=False,
    sum_out=None,
    scaling=None,
    numbers=None,
    scales=None,
    global_scale=None,
    expert_table=None,
    expert_weights=None,
    shared_expert=None,
    routed_scale=None,
    stream=None,
):
    if expert_table is None and not (expert_weights is None and shared_expert is None and routed_scale is None):
        raise errors.InvalidArgument("expert_weights, shared_expert and routed_scale need expert_table")
    # The operator has no arguments for these, so it cannot check them.
    if norm is None and recvbuf is not None:
        raise errors.InvalidArgument("norm is None, and recvbuf would receive normalised rows")
    if scaling is None and not (numbers is None and scales is None):
        raise errors.InvalidArgument("scaling, numbers and scales come together")
    is_given = scaling in GIVEN_SCALINGS
    with_rows = recvbuf is not None or scaling is None
    rows, total, quantised, written, plain = _operators.allreduce_fused(
        sendbuf, residual, weight, bias, self.name, norm, epsilon, unit_offset, hidden, scaling,
        scales, global_scale, None if numbers is None else numbers.dtype,
        0 if is_given or scales is None else scales.numel(), with_rows, sum_out is not None, expert_table,
        expert_weights, shared_expert, routed_scale,
    )  # fmt: skip
    _put(residual if residual_out is None else residual_out, total, stream)
    if norm is not None and with_rows:
        _put(sendbuf if recvbuf is None else recvbuf, rows, stream)
    if scaling is not None:
        _put(numbers, quantised, stream)
        if not is_given:
            _put(scales, written, stream)
    if sum_out is not None:
        _put(sum_out, plain, stream)


@_in_graphs_of(Communicator.reduce_scatter_fused)
def reduce_scatter_fused(
    self,
    sendbuf,
    recvbuf=None,
    counts=None,
    *,
    residual,
    residual_out=None,
    norm=None,
    weight=None,
    bias=None,
    hidden=None,
    epsilon=1e-6,
    unit_offset=False,
    scaling=None,
    numbers=None,
    scales=None,
    global_scale=None,
    stream=None,
):
    # The operator has no arguments for these, so it cannot check them.
    if (norm is None) != (recvbuf is None and scaling is None):
        raise errors.InvalidArgument("rows go to recvbuf or to numbers if there is a norm, and only then")
    if scaling is None and not (numbers is None and scales is None):
        raise errors.InvalidArgument("scaling, numbers and scales come together")
    is_given = scaling in GIVEN_SCALINGS
    rows, total, quantised, written = _operators.reduce_scatter_fused(
        sendbuf, counts, residual, weight, bias, self.name, norm, epsilon, unit_offset, hidden, scaling,
        scales, global_scale, None if numbers is None else numbers.dtype,
        0 if is_given or scales is None else scales.numel(), recvbuf is not None,
    )  # fmt: skip
    _put(residual if residual_out is None else residual_out, total, stream)
    if recvbuf is not None:
        _put(recvbuf, rows, stream)
    if scaling is not None:
        _put(numbers, quantised, stream)
        if not is_given:
            _put(scales, written, stream)


@_in_graphs_of(Communicator.allgather_rows)
def allgather_rows(self, numbers, scales, all_numbers, all_scales, counts=None, *, scaling, hidden, stream=None):
    gathered, written = _operators.allgather_rows(
        numbers, scales, counts, self.nranks, all_scales, scaling, hidden, self.name
    )
    _put(all_numbers, gathered, stream)
    _put(all_scales, written, stream)


@_in_graphs_of(Communicator.sharded_rms_norm)
def sharded_rms_norm(
    self, sendbuf, recvbuf=None, *, width, columns, totals, weights=None, epsilon=1e-6, unit_offset=False, stream=None
):  # fmt: skip
    first, end = [first for first, _ in columns], [end for _, end in columns]
    value = _operators.sharded_rms_norm(
        sendbuf, self.name, width, first, end, totals, weights or [None] * len(first), epsilon, unit_offset
    )
    target = sendbuf if recvbuf is None else recvbuf
    for left, right in columns:
        of_rows = target.reshape(-1, width)[:, left:right]
        _put(of_rows, value.reshape(-1, width)[:, left:right], stream)


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
        raise errors.InvalidArgument(_ON_CURRENT_STREAM)
    _operators.barrier(self.name)
