"""A pass over graphs of torch.compile: an allreduce, the addition of the residual and an RMSNorm become one call.

The pass runs after functionalisation and before Inductor's own fusions. It looks for sums, by this library's operator
or by vLLM's `vllm::all_reduce`, that only reach an RMSNorm with a residual: vLLM's operator for it, or the arithmetic
that vLLM's Python code has on CPUs. What it does not recognise stays as it is. Docs: docs/python.md.
"""

import hashlib
import importlib
import logging
import operator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import errors
from ..operators import IDENTITY

logger = logging.getLogger("vllm.plugins.fast_allreduce")

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_with_effects = torch.ops.higher_order.with_effects
_SUM, _FUSED = torch.ops.fast_allreduce.allreduce.default, torch.ops.fast_allreduce.allreduce_fused.default
_HALVES = (torch.float16, torch.bfloat16)


def _overload(namespace, name):
    """Returns an operator, or None where this vLLM has none."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet and packet.default


def _is(node, *targets):
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _value(node):
    return node.meta.get("val") if isinstance(node, Node) else None


def _dtype(node):
    return getattr(_value(node), "dtype", None)


def _equal(shape, other):
    """Returns whether two shapes are equal whatever their symbols are."""
    return len(shape) == len(other) and all(statically_known_true(a == b) for a, b in zip(shape, other))


def _alike(one, other):
    """Returns whether two nodes are tensors of one shape and type."""
    one, other = _value(one), _value(other)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.dtype == other.dtype and one.device == other.device and _equal(one.shape, other.shape)


def _items(node):
    """Returns the parts of a tuple that are used, by index, or None if something uses the tuple as a whole."""
    if not all(_is(user, operator.getitem) for user in node.users):
        return None
    return {user.args[1]: user for user in node.users}


def _operands(node, *targets):
    """Returns the two operands of a call of one of the targets, or (None, None)."""
    return node.args[:2] if _is(node, *targets) and len(node.args) == 2 and not node.kwargs else (None, None)


def _other(node, operand, target):
    """Returns the operand of a commutative operator that is not `operand`."""
    one, two = _operands(node, target)
    return two if one is operand else one if two is operand else None


def _only(node, *targets):
    """Returns the only user of a node, if it calls one of the targets."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    return user if _is(user, *targets) else None


@dataclass
class _Sum:
    """An allreduce in a graph. `call` is the call, and `value` the sum."""

    call: Node
    value: Node
    input: Node
    communicator: str


@dataclass
class _Norm:
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
        if user is None or not _alike(user, value) or (user.target is _aten.copy.default and user.args[1:] != (value,)):
            return value
        value = user


def _sums(graph, name_of):
    for call in list(graph.nodes):
        if _is(call, _with_effects) and call.args[1] is _SUM:
            _, _, given, communicator, *op = call.args
            value = (_items(call) or {}).get(1)
            if op in ([], ["sum"]) and value is not None:
                yield _Sum(call, _unchanged(value), given, communicator)
        elif _is(call, _overload("vllm", "all_reduce")):
            group = call.kwargs.get("group_name", call.args[1] if len(call.args) > 1 else None)
            communicator = name_of(group)
            if communicator is not None:
                yield _Sum(call, call, call.args[0] if call.args else call.kwargs["tensor"], communicator)


def _weight(node, like):
    """Returns the weight and whether 1 is added to it, or None if it is not a vector of the row's length and type."""
    offset = False
    if _dtype(node) == torch.float32:
        plain, one = _operands(node, _aten.add.Tensor)
        if one == 1:
            node, offset = plain, True
    if offset and _is(node, _convert) and _dtype(node.args[0]) == _dtype(like):
        node = node.args[0]
    weight, rows = _value(node), _value(like)
    fits = isinstance(weight, torch.Tensor) and weight.dtype == rows.dtype and _equal(weight.shape, rows.shape[-1:])
    return (node, offset) if fits and weight.is_contiguous() else None


def _called_norm(value, entry):
    """Returns the norm if `entry` is vLLM's operator."""
    if _is(entry, _overload("vllm_ir", "fused_add_rms_norm")):
        given, residual, weight, epsilon, *size = entry.args
        first = 0
    elif _is(entry, auto_functionalized) and entry.args[0] is _overload("_C", "fused_add_rms_norm"):
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
    return _Norm(entry, residual, *found, epsilon, rows, totals)


def _written_norm(value, entry):
    """Returns the norm if `entry` begins the arithmetic of one, as vLLM's Python code has it:

    total = sum + residual; rows = total * rsqrt(mean(total ** 2) + epsilon) * weight.

    All of it is in f32, except the product with a weight of 16 bits, which is that of rounded factors.
    """
    dtype = _dtype(value)
    half = dtype in _HALVES

    def rounded(node):
        return [user for user in node.users if _is(user, _convert) and _dtype(user) == dtype] if half else [node]

    wide = entry if half else value
    total = entry
    if half:
        total = _only(entry, _aten.add.Tensor) if _is(entry, _convert) else None
    residual = total and _other(total, wide, _aten.add.Tensor)
    if not isinstance(residual, Node) or residual is wide or _dtype(total) != torch.float32:
        return None
    square = next((user for user in total.users if _is(user, _aten.pow.Tensor_Scalar) and user.args[1] == 2), None)
    mean = square and _only(square, _aten.mean.dim)
    shifted = mean and _only(mean, _aten.add.Tensor, _aten.add.Scalar)
    scale = shifted and _only(shifted, _aten.rsqrt.default)
    scaled = scale and _only(scale, _aten.mul.Tensor)
    if not scaled or _other(scaled, scale, _aten.mul.Tensor) is not total or not isinstance(shifted.args[1], float):
        return None
    if list(mean.args[1]) not in ([-1], [_value(total).dim() - 1]) or mean.args[2:] != (True,):
        return None
    rows = found = None
    for factor in {*rounded(scaled), scaled} if len(scaled.users) == 1 else ():
        product = _only(factor, _aten.mul.Tensor)
        weight = product and _other(product, factor, _aten.mul.Tensor)
        found = _weight(weight, value) if isinstance(weight, Node) else None
        if found is not None:
            rows = [product] if _dtype(product) == dtype else rounded(product)
            if rows != [product] and len(rows) != len(product.users):
                return None
            break
    if found is None:
        found, rows = (None, False), rounded(scaled)
        if rows != [scaled] and len(rows) != len(scaled.users):
            return None
    if not rows or any(not _alike(row, value) for row in rows):
        return None
    totals = rounded(total)
    if half and any(not _is(user, _aten.add.Tensor) for user in set(total.users) - {square, scaled, *totals}):
        return None
    return _Norm(entry, residual, *found, shifted.args[1], rows, totals, total if half else None)


# vLLM's operators that quantise rows to 8 bits: the arguments for the numbers and the scale, the operand that must be
# absent, and the format here.
_QUANTISING = {
    "static_scaled_int8_quant": ("out", "scale", "azp", "given"),
    "dynamic_scaled_int8_quant": ("out", "scale", "azp", "per_row"),
    "static_scaled_fp8_quant": ("result", "scale", "group_shape", "given"),
    "dynamic_per_token_scaled_fp8_quant": ("result", "scale", "scale_ub", "per_row"),
}


@dataclass
class _Quantised:
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


def _quantised(norm, found):
    """Returns the quantisation of the rows, or None if there is none or it is unknown."""
    value = _value(found.value)
    rows = [*norm.rows]
    rows += [one for row in rows for one in row.users if _is(one, _aten.view.default, _aten.reshape.default)]
    for call in dict.fromkeys(user for row in rows for user in row.users):
        if not _is(call, auto_functionalized, auto_functionalized_v2) or value.dim() != 2:
            continue
        known = _QUANTISING.get(call.args[0]._opname) if call.args[0].namespace == "_C" else None
        parts = known and _items(call)
        if not parts:
            continue
        out, scale, absent, scaling = known
        given = call.kwargs.get("input")
        if given not in rows or not _alike(given, found.value) or call.kwargs.get(absent) is not None:
            continue
        if call.kwargs.get(f"_{absent}_base_index") is not None:
            continue
        numbers, first = _base(call, out)
        scales, second = _base(call, scale) if scaling == "per_row" else (call.kwargs.get(scale), 0)
        made, by = _value(numbers), _value(scales)
        if not isinstance(made, torch.Tensor) or not isinstance(by, torch.Tensor):
            continue
        if not _equal(made.shape, value.shape) or by.dtype != torch.float32:
            continue
        if scaling == "given":
            if by.numel() == 1 and by.is_contiguous() and scales < found.call:
                return _Quantised(scaling, made.dtype, scales, parts.get(first), None)
        elif _equal(by.shape, (value.shape[0], 1)):
            return _Quantised(scaling, made.dtype, None, parts.get(first), parts.get(second))
    return None


def _norm_of(found):
    for entry in found.value.users:
        norm = _called_norm(found.value, entry) or _written_norm(found.value, entry)
        # Without a weight, the call needs the length of a row as a number.
        if norm is not None and (
            isinstance(_value(found.value).shape[-1], int) if norm.weight is None else norm.weight < found.call
        ):
            return norm
    return None


def _residual(graph, norm, found):
    """Returns the node of the residual in the type of the sum, or None if it is not known before the allreduce."""
    residual = norm.residual
    if norm.wide is not None and _dtype(residual) == torch.float32:
        # Inductor drops pairs of conversions, so a residual in f32 may follow from the one in 16 bits.
        if _is(residual, _convert) and _alike(residual.args[0], found.value):
            residual = residual.args[0]
        elif residual < found.call and _equal(_value(residual).shape, _value(found.value).shape):
            with graph.inserting_before(found.call):
                residual = _call(graph, _convert, residual, _dtype(found.value))
    return residual if residual < found.call and _alike(residual, found.value) else None


def _call(graph, target, *arguments, outputs=None):
    node = graph.call_function(target, arguments)
    if outputs is None:
        values = torch.fx.map_arg(arguments, _value)
        with _value(next(one for one in arguments if isinstance(one, Node))).fake_mode:
            outputs = target(*values)
    node.meta["val"] = outputs
    return node


def _replace(graph, found, norm, residual):
    """Replaces an allreduce and a norm by one call."""
    call, value = found.call, found.value
    others = [user for user in value.users if user is not norm.entry]
    quantised = _quantised(norm, found)
    with graph.inserting_before(call):
        scales = 0
        if quantised is not None and quantised.scaling == "per_row":
            scales = _value(value).shape[0]
            if not isinstance(scales, int):
                scales = _call(graph, _aten.sym_size.int, found.input, 0)
        arguments = (
            found.input, residual, norm.weight, None, found.communicator, "rms", norm.epsilon, norm.unit_offset,
            None if norm.weight is not None else _value(value).shape[-1], *(
                (None, None, None, None, 0, True) if quantised is None
                else (quantised.scaling, quantised.given, None, quantised.dtype, scales, _used(norm, quantised))
            ), bool(others),
        )  # fmt: skip
        if _is(call, _with_effects):
            with _value(value).fake_mode:
                outputs = _FUSED(*torch.fx.map_arg(arguments, _value))
            token, first = call.args[0], 1
            fused = _call(graph, _with_effects, token, _FUSED, *arguments, outputs=(_value(call)[0], *outputs))
        else:
            first = 0
            fused = _call(graph, _FUSED, *arguments)

        def item(index):
            return _call(graph, operator.getitem, fused, index, outputs=_value(fused)[index])

        if first:
            for token in [user for user in call.users if user.args[1] == 0]:
                token.replace_all_uses_with(item(0))
        for nodes, index in ((norm.rows, 0), (norm.totals, 1)):
            if nodes:
                result = item(first + index)
                for node in nodes:
                    node.replace_all_uses_with(result)
        if quantised is not None:
            if quantised.numbers is not None:
                quantised.numbers.replace_all_uses_with(item(first + 2))
            if quantised.scales is not None:
                column = _call(graph, _aten.unsqueeze.default, item(first + 3), -1)
                quantised.scales.replace_all_uses_with(column)
        if norm.wide is not None:
            norm.wide.replace_all_uses_with(_call(graph, _convert, item(first + 1), torch.float32))
        if others:
            plain = item(first + 4)
            value.replace_all_uses_with(plain, lambda user: user in others)
    _erase([
        *norm.rows, *norm.totals, norm.wide, norm.entry, value, *list(call.users),
        *([] if quantised is None else [quantised.numbers, quantised.scales]),
    ])  # fmt: skip


def _used(norm, quantised):
    """Returns whether anything but the quantisation uses the rows."""
    results = {quantised.numbers, quantised.scales} - {None}
    (call,) = {result.args[0] for result in results} or {None}
    views = [one for row in norm.rows for one in row.users if set(one.users) == {call}]
    return any(user is not call and user not in views for row in norm.rows for user in row.users)


def _erase(nodes):
    """Erases nodes without users, and those that only they used."""
    while nodes:
        node = nodes.pop()
        if isinstance(node, Node) and node.op == "call_function" and not node.users and not node._erased:
            nodes += node.all_input_nodes
            node.graph.erase_node(node)


class Fusion(CustomGraphPass):
    """The pass. `name_of` returns the name of this library's communicator for a group of vLLM, or None.

    vLLM applies it to graphs for up to `most_rows` rows.
    """

    def __init__(self, name_of=lambda group: None, most_rows=None):
        self._name_of, self._most_rows = name_of, most_rows
        self.count = 0

    def is_applicable_for_range(self, compile_range):
        """Returns whether the pass applies to graphs for these numbers of rows."""
        return self._most_rows is None or compile_range.end <= self._most_rows

    def __call__(self, graph):
        """Changes a graph, and adds the number of allreduces that became fused calls to `count`."""
        before = self.count
        for found in _sums(graph, self._name_of):
            norm = _norm_of(found)
            residual = norm and _residual(graph, norm, found)
            if residual is not None:
                _replace(graph, found, norm, residual)
                self.count += 1
        if self.count > before:
            logger.info("%d allreduces of a graph include the residual and the norm", self.count - before)

    def uuid(self):
        """Returns the pass's part of the keys of compiled code."""
        return identity()


def identity():
    """Returns text that identifies the operators and this pass, for the keys of compiled code."""
    return f"{IDENTITY}, fusion {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"


def enable():
    """Runs the pass on everything that Inductor compiles in this process.

    Raises `Unavailable` if another pass has taken its place.
    """
    config = torch._inductor.config
    if not isinstance(config.post_grad_custom_pre_pass, Fusion):
        if config.post_grad_custom_pre_pass is not None:
            raise errors.Unavailable(
                "torch._inductor.config.post_grad_custom_pre_pass is set by other code",
                what="a pass over graphs", reason="taken",
            )  # fmt: skip
        config.post_grad_custom_pre_pass = Fusion()


_PASSES = "vllm.compilation.passes"


def enable_in_vllm(name_of, limit):
    """Adds the pass to vLLM's own, which run where vLLM compiles for GPUs. A second call does nothing.

    `limit` is the size in bytes of the longest sum that the pass takes, or None. Raises `Unavailable` if this vLLM has
    other passes.
    """
    try:
        manager = importlib.import_module(f"{_PASSES}.pass_manager").PostGradPassManager
        base = importlib.import_module(f"{_PASSES}.inductor_pass").InductorPass
        own = manager.configure
    except (ImportError, AttributeError) as error:
        raise errors.Unavailable(
            f"this plugin was written for the passes of vLLM 0.32.0: {error}", what="vLLM's passes", reason="not found"
        ) from None
    if own.__module__ == __name__:
        return
    kind = type("Fusion", (Fusion, base), {"__module__": __name__})

    def configure(self, config):
        own(self, config)
        model = config.model_config
        most_rows = limit and model and limit // (model.get_hidden_size() * model.dtype.itemsize)
        # After the first pass, which removes operations without effect, and before vLLM's fusions.
        first = [type(one).__name__ for one in self.passes[:1]] == ["NoOpEliminationPass"]
        self.passes.insert(int(first), kind(name_of, most_rows))

    manager.configure = configure
