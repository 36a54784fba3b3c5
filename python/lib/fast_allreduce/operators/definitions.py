"""The operators of `torch.ops.fast_allreduce`: schemas, output shapes, and the calls that fill the outputs.

Semantics are those of the methods of `Communicator`.
"""

from operator import itemgetter
from types import SimpleNamespace

import torch

from .. import errors
from .._native import communicators, direct_allreduce, direct_allreduce_rms_norm
from ..tensors import as_moved

NAMESPACE = "fast_allreduce"

if not hasattr(torch.library, "_register_effectful_op"):
    raise errors.Unavailable(
        f"torch {torch.__version__} has no operators with an ordered effect: the oldest tested version is torch 2.13",
        what="fast_allreduce.operators", reason=f"torch {torch.__version__}",
    )  # fmt: skip

# Dropping the handle would remove the operators.
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Schemas by name. Cached compiled code depends on them.
SCHEMAS = {}

# Functions that compute operators, by name.
KERNELS = {}


def named(name):
    """Returns the communicator of this process with a name.

    Raises `InvalidArgument`, which lists the names, if there is none.
    """
    try:
        return communicators[name]
    except KeyError:
        known = ", ".join(map(repr, sorted(communicators))) or "none"
        raise errors.InvalidArgument(
            f"no communicator of this process is named {name!r}: never made here, or destroyed. There are: {known}"
        ) from None


def _stream(tensor):
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _refuse_gradients(arguments):
    if any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments):
        raise errors.Unavailable(
            "operators of fast_allreduce have no gradient: call them under torch.inference_mode() or torch.no_grad()",
            what="a gradient", reason="not implemented",
        )  # fmt: skip


def _define(name, schema):
    SCHEMAS[name] = schema
    LIBRARY.define(name + schema)


def _operator(schema, outputs):
    """Returns a decorator that defines an operator by the function that fills its outputs.

    `outputs` allocates them from the operator's arguments. No argument is keyword-only: Inductor drops keyword-only
    arguments of operators with effects.
    """

    def define(fill):
        name = fill.__name__
        qualified = f"{NAMESPACE}::{name}"

        def traced(*arguments):
            # torch would only warn, and leave the gradients out of the graph.
            if torch.is_grad_enabled():
                _refuse_gradients(arguments)
            return outputs(*arguments)

        def kernel(*arguments):
            if torch.is_grad_enabled():
                _refuse_gradients(arguments)
            made = outputs(*arguments)
            fill(made, *arguments)
            return made

        _define(name, schema)
        KERNELS[name] = kernel
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, traced, lib=LIBRARY)
        torch.library._register_effectful_op(qualified, torch.library.EffectType.ORDERED, lib=LIBRARY)
        return fill

    return define


def _in_place(fill, schema, written=(0,)):
    """Defines the in-place form of an operator, which writes its outputs to the inputs at the positions `written`.

    In graphs it becomes the functional operator and copies: torch has no effects for operators that write inputs, and
    would remove those whose results are unused.
    """
    name = f"{fill.__name__}_"
    operator = getattr(getattr(torch.ops, NAMESPACE), fill.__name__)
    targets = itemgetter(*written)

    def kernel(*arguments):
        if torch.is_grad_enabled():
            _refuse_gradients(arguments)
        fill(targets(arguments), *arguments)

    def in_graphs(*arguments):
        values = operator(*arguments)
        for position, value in zip(written, values if len(written) > 1 else [values]):
            arguments[position].copy_(value)

    _define(name, schema)
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, kernel, "CUDA")
    LIBRARY.impl(name, in_graphs, "CompositeImplicitAutograd")


def _like(input, *_):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@_operator("(Tensor input, str communicator, str op='sum') -> Tensor", _like)
def allreduce(output, input, communicator, op="sum"):
    named(communicator).allreduce(input.contiguous(), output, op, stream=_stream(input))


_in_place(allreduce, "(Tensor(a!) input, str communicator, str op='sum') -> ()")


@_operator("(Tensor input, str communicator, float tolerance, str transport='int8') -> Tensor", _like)
def allreduce_quantized(output, input, communicator, tolerance, transport="int8"):
    named(communicator).allreduce_quantized(
        input.contiguous(), output, tolerance=tolerance, transport=transport, stream=_stream(input)
    )


_in_place(allreduce_quantized, "(Tensor(a!) input, str communicator, float tolerance, str transport='int8') -> ()")


_NORM = (
    "Tensor? weight, Tensor? bias, str communicator, str{} norm, float epsilon=1e-6, bool unit_offset=False, "
    "int? hidden=None"
)


def _apart(residual, input):
    """Returns the residual outside of the input's memory, to which a compiler may have reduced a copy of the input."""
    residual = residual.contiguous()
    is_shared = residual.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    return residual.clone() if is_shared else residual


def _fused(
    input, residual, weight, bias, communicator, norm, epsilon=1e-6, unit_offset=False, hidden=None, scaling=None,
    scale=None, global_scale=None, dtype=None, scales=0, with_rows=True, with_sum=False, expert_table=None, *_,
):  # fmt: skip
    # The input may be experts' rows, which are any number.
    like = input if expert_table is None else residual
    columns = like.shape[-1] // 2 if dtype == torch.uint8 else like.shape[-1]
    return (
        like.new_empty(like.shape if norm and with_rows else 0),
        _like(like),
        like.new_empty(0 if scaling is None else (*like.shape[:-1], columns), dtype=dtype),
        # Padding belongs to no row, and is not written. Without scales before the call there is none: they are floats.
        like.new_empty(scales, dtype=torch.float32) if scale is None or not scales else scale.flatten().clone(),
        like.new_empty(like.shape if with_sum else 0),
    )


# The outputs are the normalised rows, the residual plus the sum, the quantised rows (of type `dtype`), the scales, and
# the sum. Outputs that are not requested are empty. `scale` is the given scale or, with their number in `scales`, the
# scales before the call, if they have padding.
@_operator(
    f"(Tensor input, Tensor residual, {_NORM.format('?')}, str? scaling=None, Tensor? scale=None, "
    "Tensor? global_scale=None, ScalarType? dtype=None, SymInt scales=0, bool with_rows=True, bool with_sum=False, "
    "Tensor? expert_table=None, Tensor? expert_weights=None, Tensor? shared_expert=None, float? routed_scale=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fused,
)
def allreduce_fused(
    outputs, input, residual, weight, bias, communicator, norm, epsilon=1e-6, unit_offset=False, hidden=None,
    scaling=None, scale=None, global_scale=None, dtype=None, scales=0, with_rows=True, with_sum=False,
    expert_table=None, expert_weights=None, shared_expert=None, routed_scale=None,
):  # fmt: skip
    rows, total, *others = outputs
    numbers, written, plain = others or (None, None, None)
    quantised = {}
    if scaling is not None:
        quantised = {"scaling": scaling, "numbers": numbers, "scales": written if scales else scale}
    experts = {}
    if expert_table is not None:
        experts = {
            "expert_table": expert_table.contiguous(), "routed_scale": routed_scale,
            "expert_weights": None if expert_weights is None else expert_weights.contiguous(),
            "shared_expert": None if shared_expert is None else shared_expert.contiguous(),
        }  # fmt: skip
    named(communicator).allreduce_fused(
        input.contiguous(), rows if norm and with_rows else None, residual=_apart(residual, input), residual_out=total,
        norm=norm, weight=weight, bias=bias, hidden=hidden, epsilon=epsilon, unit_offset=unit_offset,
        sum_out=plain if with_sum else None, global_scale=global_scale, stream=_stream(input), **quantised, **experts,
    )  # fmt: skip


_in_place(allreduce_fused, f"(Tensor(a!) input, Tensor(b!) residual, {_NORM.format('')}) -> ()", written=(0, 1))


# The most common form of `allreduce_fused`, which torch calls faster: fewer arguments and outputs.
@_operator(
    "(Tensor input, Tensor residual, Tensor weight, str communicator, float epsilon=1e-6, bool unit_offset=False) "
    "-> (Tensor, Tensor)",
    lambda input, *_: (_like(input), _like(input)),
)
def allreduce_rms_norm(outputs, input, residual, weight, communicator, epsilon=1e-6, unit_offset=False):
    named(communicator).allreduce_fused(
        input.contiguous(), outputs[0], residual=residual.contiguous(), residual_out=outputs[1], norm="rms",
        weight=weight, epsilon=epsilon, unit_offset=unit_offset, stream=_stream(input),
    )  # fmt: skip


def _share(input, nranks):
    """Returns the number of rows of a rank's share."""
    if input.dim() == 0 or nranks < 1:
        raise errors.InvalidArgument(f"a tensor of {input.dim()} dimensions has no shares for {nranks} ranks")
    return input.shape[0] // nranks


def _fused_share(
    input, counts, residual, weight, bias, communicator, norm, epsilon=1e-6, unit_offset=False, hidden=None,
    scaling=None, scale=None, global_scale=None, dtype=None, scales=0, with_rows=True,
):  # fmt: skip
    outputs = _fused(
        residual, residual, weight, bias, communicator, norm, epsilon, unit_offset, hidden, scaling, scale,
        global_scale, dtype, scales, with_rows,
    )  # fmt: skip
    return outputs[:4]


# The outputs are those of `allreduce_fused`, of the own rows. Without `counts` all ranks have the residual's elements.
@_operator(
    f"(Tensor input, SymInt[]? counts, Tensor residual, {_NORM.format('?')}, str? scaling=None, Tensor? scale=None, "
    "Tensor? global_scale=None, ScalarType? dtype=None, SymInt scales=0, bool with_rows=True) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fused_share,
)
def reduce_scatter_fused(
    outputs, input, counts, residual, weight, bias, communicator, norm, epsilon=1e-6, unit_offset=False, hidden=None,
    scaling=None, scale=None, global_scale=None, dtype=None, scales=0, with_rows=True,
):  # fmt: skip
    rows, total, numbers, written = outputs
    quantised = {}
    if scaling is not None:
        quantised = {"scaling": scaling, "numbers": numbers, "scales": written if scales else scale}
    named(communicator).reduce_scatter_fused(
        input.contiguous(), rows if norm and with_rows else None, counts, residual=_apart(residual, input),
        residual_out=total, norm=norm, weight=weight, bias=bias, hidden=hidden, epsilon=epsilon,
        unit_offset=unit_offset, global_scale=global_scale, stream=_stream(input), **quantised,
    )  # fmt: skip


# `scales_before` has the scales of all rows before the call: padding is not written.
@_operator(
    "(Tensor numbers, Tensor scales, SymInt[]? counts, int nranks, Tensor scales_before, str scaling, int hidden, "
    "str communicator) -> (Tensor, Tensor)",
    lambda numbers, scales, counts, nranks, scales_before, *_: (
        numbers.new_empty(numbers.numel() * nranks if counts is None else sum(counts)),
        scales_before.flatten().clone(),
    ),
)
def allgather_rows(outputs, numbers, scales, counts, nranks, scales_before, scaling, hidden, communicator):
    named(communicator).allgather_rows(
        numbers.contiguous(), scales.contiguous(), *outputs, counts, scaling=scaling, hidden=hidden,
        stream=_stream(numbers),
    )  # fmt: skip


_SHARDED = (
    "str communicator, int width, int[] first, int[] end, int[] totals, Tensor?[] weights, float epsilon=1e-6, "
    "bool unit_offset=False"
)


# Part i of each row is the columns from `first[i]` to `end[i]`; other columns are copied.
@_operator(f"(Tensor input, {_SHARDED}) -> Tensor", _like)
def sharded_rms_norm(
    output, input, communicator, width, first, end, totals, weights, epsilon=1e-6, unit_offset=False
):  # fmt: skip
    output.copy_(input)
    named(communicator).sharded_rms_norm(
        output, width=width, columns=list(zip(first, end)), totals=totals, weights=weights, epsilon=epsilon,
        unit_offset=unit_offset, stream=_stream(output),
    )  # fmt: skip


_in_place(sharded_rms_norm, f"(Tensor(a!) input, {_SHARDED}) -> ()")


def _move(call, input, output, *arguments):
    call(as_moved(input.contiguous()), as_moved(output), *arguments, stream=_stream(output))


def _stacked(input, count):
    return input.new_empty((count * input.shape[0], *input.shape[1:]) if input.dim() else (count,))


@_operator("(Tensor input, int nranks, str communicator) -> Tensor", lambda input, nranks, _: _stacked(input, nranks))
def allgather(output, input, nranks, communicator):
    _move(named(communicator).allgather, input, output)


@_operator(
    "(Tensor input, SymInt[] counts, str communicator) -> Tensor", lambda input, counts, _: input.new_empty(sum(counts))
)
def allgather_v(output, input, counts, communicator):
    named(communicator).allgather_v(input.contiguous(), output, counts, stream=_stream(input))


@_operator(
    "(Tensor input, int nranks, str communicator, str op='sum') -> Tensor",
    lambda input, nranks, *_: input.new_empty((_share(input, nranks), *input.shape[1:])),
)
def reduce_scatter(output, input, nranks, communicator, op="sum"):
    named(communicator).reduce_scatter(input.contiguous(), output, op, stream=_stream(input))


@_operator(
    "(Tensor input, SymInt[] counts, int rank, str communicator, str op='sum') -> Tensor",
    lambda input, counts, rank, *_: input.new_empty(counts[rank]),
)
def reduce_scatter_v(output, input, counts, rank, communicator, op="sum"):
    named(communicator).reduce_scatter_v(input.contiguous(), output, counts, op, stream=_stream(input))


@_operator("(Tensor input, int root, str communicator) -> Tensor", _like)
def broadcast(output, input, root, communicator):
    _move(named(communicator).broadcast, input, output, root)


_in_place(broadcast, "(Tensor(a!) input, int root, str communicator) -> ()")


# On ranks other than the root the output is a copy of the input.
@_operator("(Tensor input, int root, str communicator, str op='sum') -> Tensor", _like)
def reduce(output, input, root, communicator, op="sum"):
    found = named(communicator)
    found.reduce(input.contiguous(), output, op, root, stream=_stream(input))
    if found.rank != root:
        output.copy_(input)


# `parts` is the number of ranks on the root. On the others it is 0, and the output is empty.
@_operator(
    "(Tensor input, int parts, int root, str communicator) -> Tensor", lambda input, parts, *_: _stacked(input, parts)
)
def gather(output, input, parts, root, communicator):
    _move(named(communicator).gather, input, output, root)


# `like` has the shape and type of a share. Only the root passes `input`.
@_operator("(Tensor like, Tensor? input, int root, str communicator) -> Tensor", _like)
def scatter(output, like, input, root, communicator):
    _move(named(communicator).scatter, like if input is None else input, output, root)


@_operator("(Tensor input, str communicator) -> Tensor", _like)
def alltoall(output, input, communicator):
    _move(named(communicator).alltoall, input, output)


@_operator(
    "(Tensor input, SymInt[] sendcounts, SymInt[] recvcounts, str communicator) -> Tensor",
    lambda input, sendcounts, recvcounts, _: input.new_empty(sum(recvcounts)),
)
def alltoall_v(output, input, sendcounts, recvcounts, communicator):
    named(communicator).alltoall_v(input.contiguous(), sendcounts, output, recvcounts, stream=_stream(input))


@_operator("(str communicator) -> ()", lambda communicator: None)
def barrier(_, communicator):
    found = named(communicator)
    stream = None if found.device == "cpu" else torch.cuda.current_stream(found.device)
    found.barrier(stream=stream)


# The functions for code that Inductor generates, also if it comes from a cache (`fast_allreduce.vllm.fusion`).
getattr(torch.ops, NAMESPACE).direct = SimpleNamespace(
    **KERNELS | {"allreduce": direct_allreduce, "allreduce_rms_norm": direct_allreduce_rms_norm}
)
