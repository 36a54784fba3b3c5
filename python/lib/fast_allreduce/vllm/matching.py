"""What the pass looks for in graphs: sums that only reach an RMSNorm with a residual, and the quantisation of its rows.

Graphs are functional. Nodes have their values' descriptions in `meta["val"]`.
"""

import operator
from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import operators  # noqa: F401
from ..tensors import LONGEST_ROW

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_with_effects = torch.ops.higher_order.with_effects
_SUM = torch.ops.fast_allreduce.allreduce.default
_HALVES = (torch.float16, torch.bfloat16)


def _overload(namespace, name):
    """Returns an operator, or None where this vLLM has none."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet and packet.default


def is_call(node, *targets):
    """Returns whether a node calls one of the targets."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def value_of(node):
    """Returns the description of a node's value, or None."""
    return node.meta.get("val") if isinstance(node, Node) else None


def dtype_of(node):
    """Returns the element type of a node, or None if it is no tensor."""
    return getattr(value_of(node), "dtype", None)


def equal(shape, other):
    """Returns whether two shapes are equal whatever their symbols are."""
    return len(shape) == len(other) and all(statically_known_true(a == b) for a, b in zip(shape, other))


def alike(one, other):
    """Returns whether two nodes are tensors of one shape and type."""
    one, other = value_of(one), value_of(other)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.dtype == other.dtype and one.device == other.device and equal(one.shape, other.shape)


def _items(node):
    """Returns the parts of a tuple that are used, by index, or None if something uses the tuple as a whole."""
    if not all(is_call(user, operator.getitem) for user in node.users):
        return None
    return {user.args[1]: user for user in node.users}


def _operands(node, *targets):
    """Returns the two operands of a call of one of the targets, or (None, None)."""
    return node.args[:2] if is_call(node, *targets) and len(node.args) == 2 and not node.kwargs else (None, None)


def _other(node, operand, target):
    """Returns the operand of a commutative operator that is not `operand`."""
    one, two = _operands(node, target)
    return two if one is operand else one if two is operand else None


def _only(node, *targets):
    """Returns the only user of a node, if it calls one of the targets."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    return user if is_call(user, *targets) and not user.kwargs else None


@dataclass
class Sum:
    """An allreduce in a graph. `call` is the call, and `value` the sum."""

    call: Node
    value: Node
    input: Node
    communicator: str


@dataclass
class Norm:
    """The addition of a residual and an RMSNorm. `entry` is the node that uses the sum. Uses of the nodes in `rows` and
    `totals` become uses of the results, and those of `wide` of the new residual in f32.
    """

    entry: Node
    residual: Node
    weight: Node | None
    unit_offset: bool
    epsilon: float
    rows: list
    totals: list
    wide: Node | None = None


def _unchanged(value):
    """Returns the last of the nodes that only pass a tensor on: views of its shape, and copies over another tensor."""
    while True:
        user = _only(value, _aten.view.default, _aten.reshape.default, _aten.copy.default)
        if user is None or not alike(user, value) or (user.target is _aten.copy.default and user.args[1:] != (value,)):
            return value
        value = user


def sums(graph, name_of):
    """Yields the sums over ranks in a graph. `name_of` returns the communicator's name for a group of vLLM, or None."""
    for call in list(graph.nodes):
        if is_call(call, _with_effects) and call.args[1] is _SUM:
            _, _, given, communicator, *op = call.args
            value = (_items(call) or {}).get(1)
            if op in ([], ["sum"]) and value is not None:
                yield Sum(call, _unchanged(value), given, communicator)
        elif is_call(call, _overload("vllm", "all_reduce")):
            group = call.kwargs.get("group_name", call.args[1] if len(call.args) > 1 else None)
            communicator = name_of(group)
            if communicator is not None:
                yield Sum(call, call, call.args[0] if call.args else call.kwargs["tensor"], communicator)


def _weight(node, like):
    """Returns the weight and whether 1 is added to it, or None if it is not a vector of the row's length and type."""
    offset = False
    if dtype_of(node) == torch.float32:
        plain, one = _operands(node, _aten.add.Tensor)
        if one == 1:
            node, offset = plain, True
    if offset and is_call(node, _convert) and dtype_of(node.args[0]) == dtype_of(like):
        node = node.args[0]
    weight, rows = value_of(node), value_of(like)
    fits = isinstance(weight, torch.Tensor) and weight.dtype == rows.dtype and equal(weight.shape, rows.shape[-1:])
    return (node, offset) if fits and weight.is_contiguous() else None


def _called_norm(value, entry):
    """Returns the norm if `entry` is vLLM's operator."""
    if is_call(entry, _overload("vllm_ir", "fused_add_rms_norm")):
        given, residual, weight, epsilon, *size = entry.args
        first = 0
    elif is_call(entry, auto_functionalized) and entry.args[0] is _overload("_C", "fused_add_rms_norm"):
        given, residual, weight, epsilon = (entry.kwargs[name] for name in ("input", "residual", "weight", "epsilon"))
        # Part 0 is what the operator returns: nothing.
        first, size = 1, []
    else:
        return None
    parts = _items(entry)
    found = (None, False) if weight is None else _weight(weight, value)
    if given is not value or residual is value or size not in ([], [None]) or None in (parts, found):
        return None
    rows, totals = ([parts[index]] if index in parts else [] for index in (first, first + 1))
    return Norm(entry, residual, *found, epsilon, rows, totals)


def _written_norm(value, entry):
    """Returns the norm if `entry` begins the arithmetic of one, as vLLM's Python code has it:

    total = sum + residual; rows = total * rsqrt(mean(total ** 2) + epsilon) * weight.

    All of it is in f32, except the product with a weight of 16 bits, which is that of rounded factors.
    """
    dtype = dtype_of(value)
    half = dtype in _HALVES

    def rounded(node):
        return [user for user in node.users if is_call(user, _convert) and dtype_of(user) == dtype] if half else [node]

    wide = entry if half else value
    total = entry
    if half:
        total = _only(entry, _aten.add.Tensor) if is_call(entry, _convert) else None
    residual = total and _other(total, wide, _aten.add.Tensor)
    if not isinstance(residual, Node) or residual is wide or dtype_of(total) != torch.float32:
        return None
    powers = [user for user in total.users if is_call(user, _aten.pow.Tensor_Scalar)]
    square = next((user for user in powers if user.args[1] == 2 and not user.kwargs), None)
    mean = square and _only(square, _aten.mean.dim)
    shifted = mean and _only(mean, _aten.add.Tensor, _aten.add.Scalar)
    scale = shifted and _only(shifted, _aten.rsqrt.default)
    scaled = scale and _only(scale, _aten.mul.Tensor)
    if not scaled or _other(scaled, scale, _aten.mul.Tensor) is not total or not isinstance(shifted.args[1], float):
        return None
    if list(mean.args[1]) not in ([-1], [value_of(total).dim() - 1]) or mean.args[2:] != (True,):
        return None
    rows = found = None
    for factor in {*rounded(scaled), scaled} if len(scaled.users) == 1 else ():
        product = _only(factor, _aten.mul.Tensor)
        weight = product and _other(product, factor, _aten.mul.Tensor)
        found = _weight(weight, value) if isinstance(weight, Node) else None
        if found is not None:
            rows = [product] if dtype_of(product) == dtype else rounded(product)
            if rows != [product] and len(rows) != len(product.users):
                return None
            break
    if found is None:
        found, rows = (None, False), rounded(scaled)
        if rows != [scaled] and len(rows) != len(scaled.users):
            return None
    if not rows or any(not alike(row, value) for row in rows):
        return None
    totals = rounded(total)
    if half and any(not is_call(user, _aten.add.Tensor) for user in set(total.users) - {square, scaled, *totals}):
        return None
    return Norm(entry, residual, *found, shifted.args[1], rows, totals, total if half else None)


# vLLM's operators that quantise rows to 8 bits: the arguments for the numbers and the scale, the operand that must be
# absent, and the format here.
_QUANTISING = {
    "static_scaled_int8_quant": ("out", "scale", "azp", "given"),
    "dynamic_scaled_int8_quant": ("out", "scale", "azp", "per_row"),
    "static_scaled_fp8_quant": ("result", "scale", "group_shape", "given"),
    "dynamic_per_token_scaled_fp8_quant": ("result", "scale", "scale_ub", "per_row"),
}


@dataclass
class Quantised:
    """The quantisation of the rows. `numbers` and `scales` are nodes of its results, or None where unused."""

    scaling: str
    dtype: torch.dtype
    given: Node | None
    numbers: Node | None
    scales: Node | None


def _base(call, name):
    """Returns the tensor that an operator writes as an argument, and the index of its new value in the results."""
    if call.target is auto_functionalized:
        schema = call.args[0]._schema.arguments
        written = [one.name for one in schema if one.alias_info is not None and one.alias_info.is_write]
        return call.kwargs.get(name), 1 + written.index(name)
    index = call.kwargs.get(f"_{name}_base_index")
    if index is None or call.kwargs.get(f"_{name}_size") is not None or f"_{name}_slice_dim" in call.kwargs:
        return None, 0
    return call.kwargs["_all_bases"][index], 1 + index


def quantised_rows(norm, found):
    """Returns the quantisation of the rows, or None if there is none or it is unknown."""
    value = value_of(found.value)
    rows = [*norm.rows]
    rows += [one for row in rows for one in row.users if is_call(one, _aten.view.default, _aten.reshape.default)]
    for call in dict.fromkeys(user for row in rows for user in row.users):
        if not is_call(call, auto_functionalized, auto_functionalized_v2) or value.dim() != 2:
            continue
        known = _QUANTISING.get(call.args[0]._opname) if call.args[0].namespace == "_C" else None
        parts = known and _items(call)
        if not parts:
            continue
        out, scale, absent, scaling = known
        given = call.kwargs.get("input")
        if given not in rows or not alike(given, found.value) or call.kwargs.get(absent) is not None:
            continue
        if call.kwargs.get(f"_{absent}_base_index") is not None:
            continue
        numbers, first = _base(call, out)
        scales, second = _base(call, scale) if scaling == "per_row" else (call.kwargs.get(scale), 0)
        made, by = value_of(numbers), value_of(scales)
        if not isinstance(made, torch.Tensor) or not isinstance(by, torch.Tensor):
            continue
        if not equal(made.shape, value.shape) or by.dtype != torch.float32:
            continue
        if scaling == "given":
            if by.numel() == 1 and by.is_contiguous() and scales < found.call:
                return Quantised(scaling, made.dtype, scales, parts.get(first), None)
        elif equal(by.shape, (value.shape[0], 1)):
            return Quantised(scaling, made.dtype, None, parts.get(first), parts.get(second))
    return None


def norm_of(found):
    """Returns the norm that a sum reaches, or None."""
    length = value_of(found.value).shape[-1]
    for entry in found.value.users:
        norm = _called_norm(found.value, entry) or _written_norm(found.value, entry)
        if norm is None or not (0 <= norm.epsilon < 1) or not statically_known_true(length <= LONGEST_ROW):
            continue
        # Without a weight, the call needs the length of a row as a number.
        if isinstance(length, int) if norm.weight is None else norm.weight < found.call:
            return norm
    return None
