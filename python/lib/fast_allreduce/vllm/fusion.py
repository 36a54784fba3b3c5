"""A pass over graphs of torch.compile: an allreduce, the addition of the residual and an RMSNorm become one call.

The pass runs after functionalisation and before Inductor's own fusions. It looks for sums, by this library's operator
or by vLLM's `vllm::all_reduce`, that reach an RMSNorm with a residual: vLLM's operator for it, or the arithmetic that
vLLM's Python code has on CPUs. What it does not recognise stays as it is.
"""

import hashlib
import importlib
import logging
import operator
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from .. import errors
from ..operators import IDENTITY
from .matching import alike, dtype_of, equal, is_call, norm_of, quantised_rows, sums, value_of

logger = logging.getLogger("vllm.plugins.fast_allreduce")

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_with_effects = torch.ops.higher_order.with_effects
_FUSED, _RMS_NORM = (
    getattr(torch.ops.fast_allreduce, name).default for name in ("allreduce_fused", "allreduce_rms_norm")
)


def _residual(graph, norm, found):
    """Returns the node of the residual in the type of the sum, or None if it is not known before the allreduce."""
    residual = norm.residual
    if norm.wide is not None and dtype_of(residual) == torch.float32:
        # Inductor drops pairs of conversions, so a residual in f32 may follow from the one in 16 bits.
        if is_call(residual, _convert) and alike(residual.args[0], found.value):
            residual = residual.args[0]
        elif residual < found.call and equal(value_of(residual).shape, value_of(found.value).shape):
            with graph.inserting_before(found.call):
                residual = _call(graph, _convert, residual, dtype_of(found.value))
    return residual if residual < found.call and alike(residual, found.value) else None


def _call(graph, target, *arguments, outputs=None):
    node = graph.call_function(target, arguments)
    if outputs is None:
        values = torch.fx.map_arg(arguments, value_of)
        with value_of(next(one for one in arguments if isinstance(one, Node))).fake_mode:
            outputs = target(*values)
    node.meta["val"] = outputs
    return node


def _replace(graph, found, norm, residual):
    """Replaces an allreduce and a norm by one call."""
    call, value = found.call, found.value
    others = [user for user in value.users if user is not norm.entry]
    quantised = quantised_rows(norm, found)
    with graph.inserting_before(call):
        scales = 0
        if quantised is not None and quantised.scaling == "per_row":
            scales = value_of(value).shape[0]
            if not isinstance(scales, int):
                scales = _call(graph, _aten.sym_size.int, found.input, 0)
        arguments = (found.input, residual, norm.weight, found.communicator, norm.epsilon, norm.unit_offset)
        target = _RMS_NORM
        if quantised is not None or others or norm.weight is None:
            target, (*operands, communicator, epsilon, unit_offset) = _FUSED, arguments
            hidden = None if norm.weight is not None else value_of(value).shape[-1]
            arguments = (*operands, None, communicator, "rms", epsilon, unit_offset, hidden)
            if quantised is not None:
                given, dtype, used = quantised.given, quantised.dtype, _used(norm, quantised)
                arguments = (*arguments, quantised.scaling, given, None, dtype, scales, used, bool(others))
            elif others:
                arguments = (*arguments, None, None, None, None, 0, True, True)
        if is_call(call, _with_effects):
            with value_of(value).fake_mode:
                outputs = target(*torch.fx.map_arg(arguments, value_of))
            token, first = call.args[0], 1
            fused = _call(graph, _with_effects, token, target, *arguments, outputs=(value_of(call)[0], *outputs))
        else:
            first = 0
            fused = _call(graph, target, *arguments)

        def item(index):
            return _call(graph, operator.getitem, fused, index, outputs=value_of(fused)[index])

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


def _call_directly():
    """Lets code that Inductor generates call the functions behind operators. On CPUs torch's dispatcher takes several
    times as long as a call.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    def lowering(name, target):
        def lowered(*arguments):
            first = len(V.graph.operations)
            result = ir.FallbackKernel.create(target, *arguments)
            for made in V.graph.operations[first:]:
                if isinstance(made, ir.FallbackKernel) and not V.graph.cpp_wrapper:
                    made.python_kernel_name = f"torch.ops.fast_allreduce.direct.{name}"
            return tree_map_only(ir.IRNode, lambda value: value.wrap_for_lowering(), result)

        return lowered

    for name in ("allreduce", "allreduce_fused", "allreduce_rms_norm"):
        target = getattr(torch.ops.fast_allreduce, name).default
        lowerings.setdefault(target, lowering(name, target))


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
        _call_directly()
        for found in sums(graph, self._name_of):
            norm = norm_of(found)
            residual = norm and _residual(graph, norm, found)
            if residual is not None:
                _replace(graph, found, norm, residual)
                self.count += 1
        if self.count > before:
            logger.info("%d allreduces of a graph include the residual and the norm", self.count - before)

    def uuid(self):
        """Returns the pass's part of the keys of compiled code."""
        return identity()


def _digest():
    here = Path(__file__)
    files = here, here.with_name("matching.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def identity():
    """Returns text that identifies the operators and this pass, for the keys of compiled code."""
    return f"{IDENTITY}, fusion {_digest()}"


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
