"""The vLLM plugin's fused calls: the pass over graphs, and deferred sums in models that are not compiled."""

import itertools
import threading
import types

import pytest

torch = pytest.importorskip("torch")

import fast_allreduce as fa
import fast_allreduce.operators
from fast_allreduce.vllm import deferred, fusion
from ranks import on_ranks

HIDDEN, ROWS, EPSILON = 64, 5, 1e-5
SHAPES = [(ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(seed, *shape, dtype):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5).to(dtype)


def norm(data, residual, weight, offset=False, carry=False):
    """The arithmetic of vLLM's norms. With `carry` the residual stays in f32, as after Inductor's first passes."""
    dtype = data.dtype
    total = data.to(torch.float32) + residual.to(torch.float32)
    rows = total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
    if offset:
        weight = weight.float() + 1.0
    if weight is not None:
        rows = rows.to(weight.dtype) * weight
    return rows.to(dtype), total if carry else total.to(dtype)


def traced(function, *inputs):
    """Returns what a function returns in compiled code after the pass, and the number of fused calls. The number of
    rows is a symbol.

    The graph is the functional one that Inductor gets. It runs without Inductor, which would compile C++.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    fuse = fusion.Fusion()

    def compiler(module, _):
        fuse(module.graph)
        module.graph.lint()
        module.recompile()
        return torch._functorch.aot_autograd.make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler, inference_compiler=compiler, decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )  # fmt: skip
    try:
        with torch.no_grad():
            for rows in inputs[:2]:
                torch._dynamo.mark_dynamic(rows, 0)
            return torch.compile(function, backend=backend, fullgraph=True)(*inputs), fuse.count
    finally:
        torch._dynamo.reset()


def in_one_call(communicator, data, residual, weight, offset):
    rows, total = torch.empty_like(data), torch.empty_like(data)
    communicator.allreduce_fused(
        data, rows, residual=residual, residual_out=total, norm="rms", weight=weight, hidden=HIDDEN, epsilon=EPSILON,
        unit_offset=offset,
    )  # fmt: skip
    return rows, total


def check_layers(communicator, kind, dtype, carry):
    offset = kind == "offset"
    products = [values(10 * layer + communicator.rank, HIDDEN, HIDDEN, dtype=dtype) / 8 for layer in range(3)]
    weights = [None if kind == "none" else values(layer, HIDDEN, dtype=dtype) for layer in range(3)]

    def model(data, residual, fuse=None):
        for product, weight in zip(products, weights):
            part = data @ product
            if fuse is None:
                communicator.allreduce(part)
                data, residual = norm(part, residual, weight, offset, carry)
            else:
                data, residual = fuse(communicator, part, residual, weight, offset)
        return data, residual.to(dtype)

    inputs = values(5, ROWS, HIDDEN, dtype=dtype), values(6, ROWS, HIDDEN, dtype=dtype)
    found, count = traced(model, *inputs)
    assert count == 3
    assert all(torch.equal(one, other) for one, other in zip(found, model(*inputs, in_one_call)))
    # In 16 bits the sums are rounded at other places.
    near = 1e-5 if dtype == torch.float32 else 0.05
    for one, other in zip(found, model(*inputs)):
        assert torch.allclose(one.float(), other.float(), rtol=near, atol=near)


@on_ranks(2)
def test_layers_become_fused_calls(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)
    for case in itertools.product(("weight", "offset", "none"), TYPES, (False, True)):
        if case[1:] != (torch.float32, True):
            check_layers(communicator, *case)


@on_ranks(2)
def test_the_sum_itself_is_used_too(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)

    def model(data, residual, weight):
        part = data.clone()
        communicator.allreduce(part)
        return *norm(part, residual, weight), part * 2

    inputs = [values(seed, *shape, dtype=torch.float32) for seed, shape in zip((rank, 7, 8), SHAPES)]
    found, count = traced(model, *inputs)
    assert count == 1
    assert torch.equal(found[2], model(*inputs)[2])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, model(*inputs)))


@pytest.fixture
def communicator():
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as communicator:
        yield communicator


def other_operation(reduce, data, residual, weight):
    return norm(reduce(data, "max"), residual, weight)


def no_residual(reduce, data, residual, weight):
    total = reduce(data)
    return total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + EPSILON) * weight


def work_in_between(reduce, data, residual, weight):
    return norm(torch.relu(reduce(data)), residual, weight)


def residual_of_the_sum(reduce, data, residual, weight):
    total = reduce(data)
    return norm(total, total * 2, weight)


def another_axis(reduce, data, residual, weight):
    total = reduce(data) + residual
    return total * torch.rsqrt(total.pow(2).mean(dim=0, keepdim=True) + EPSILON) * weight


def another_power(reduce, data, residual, weight):
    total = reduce(data) + residual
    return total * torch.rsqrt(total.pow(4).mean(dim=-1, keepdim=True) + EPSILON) * weight


def part_of_the_row(reduce, data, residual, weight):
    total = reduce(data) + residual
    return total * torch.rsqrt(total[:, :32].pow(2).mean(dim=-1, keepdim=True) + EPSILON) * weight


def multiplied_epsilon(reduce, data, residual, weight):
    total = reduce(data) + residual
    return total * torch.rsqrt(torch.add(total.pow(2).mean(dim=-1, keepdim=True), 0.5, alpha=3)) * weight


def negative_epsilon(reduce, data, residual, weight):
    total = reduce(data) + residual
    return total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + -1e-5) * weight


def wider_weight(reduce, data, residual, weight):
    return norm(reduce(data.bfloat16()), residual.bfloat16(), weight.float())


def wider_residual(reduce, data, residual, weight):
    total = reduce(data.bfloat16()).float() + torch.relu(residual)
    return torch.relu(total), total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + EPSILON)


@pytest.mark.parametrize(
    "model",
    [
        other_operation, no_residual, work_in_between, residual_of_the_sum, another_axis, another_power,
        part_of_the_row, multiplied_epsilon, negative_epsilon, wider_weight, wider_residual,
    ],
)  # fmt: skip
def test_other_graphs_stay(communicator, model):
    def reduce(data, op="sum"):
        total = data.clone()
        communicator.allreduce(total, op=op)
        return total

    inputs = [values(seed, *shape, dtype=torch.float32) for seed, shape in enumerate(SHAPES)]
    calls = communicator.counters().calls
    found, count = traced(lambda *inputs: model(reduce, *inputs), *inputs)
    assert count == 0 and communicator.counters().calls == calls + 1
    expected = model(reduce, *inputs)
    for one, other in zip(found, expected) if isinstance(found, tuple) else [(found, expected)]:
        assert torch.allclose(one.float(), other.float(), atol=1e-6)


def define(namespace, name, schema, like, kernel=None):
    """Defines one of vLLM's operators by the shapes of its results, if this process does not have it."""
    if not hasattr(getattr(torch.ops, namespace), name):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(name + schema)
        torch.library.register_fake(f"{namespace}::{name}", like, lib=library)
        if kernel is not None:
            library.impl(name, kernel, "CPU")
        kept.append(library)
    return getattr(getattr(torch.ops, namespace), name)


kept = []


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("form", ["ir", "kernel"])
def test_graphs_of_vllm_on_gpus(form, offset):
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    reduce = define("vllm", "all_reduce", "(Tensor tensor, str group_name) -> Tensor", lambda t, _: torch.empty_like(t))
    add_norm = define(
        "vllm_ir", "fused_add_rms_norm",
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None) -> (Tensor, Tensor)",
        lambda x, r, *_: (torch.empty_like(x), torch.empty_like(x)),
    )  # fmt: skip
    kernel = define(
        "_C", "fused_add_rms_norm", "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        lambda *_: None,
    )  # fmt: skip

    def model(data, residual, weight):
        total = reduce(data, group_name="tp:0")
        factor = weight.float() + 1.0 if offset else weight
        if form == "ir":
            return add_norm(total, residual, factor, EPSILON)
        return auto_functionalized(
            kernel.default, input=total, residual=residual, weight=factor, epsilon=EPSILON
        )[1:]  # fmt: skip

    with FakeTensorMode(), torch.no_grad():
        data, residual = (torch.empty(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight = torch.empty(HIDDEN, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(model, decomposition_table=select_decomp_table())(data, residual, weight).graph
        graph.eliminate_dead_code()
        before = str(graph)
        fusion.Fusion()(graph)
        # The group has no communicator of this library.
        assert str(graph) == before
        fuse = fusion.Fusion({"tp:0": "ours"}.get)
        fuse(graph)
    graph.lint()
    assert fuse.count == 1
    calls = [node for node in graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    (call,) = calls
    assert call.target is torch.ops.fast_allreduce.allreduce_rms_norm.default
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    assert [str(node) for node in call.args[:3]] == names and call.args[3:] == ("ours", EPSILON, offset)


def by_rows(out, input, scale, _):
    scale.copy_(input.float().abs().amax(dim=-1, keepdim=True) / 127)
    out.copy_((input.float() * (1 / scale)).round().clamp(-128, 127))


def by_scale(out, input, scale, _):
    out.copy_((input.float() * (1 / scale)).round().clamp(-128, 127))


@on_ranks(2)
def test_quantised_rows(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)
    arguments = "(Tensor! out, Tensor input, Tensor{} scale, Tensor{}? azp) -> ()"
    dynamic, static = (
        define("_C", f"{name}_scaled_int8_quant", arguments.format(mark, mark), lambda *_: None, kernel)
        for name, mark, kernel in (("dynamic", "!", by_rows), ("static", "", by_scale))
    )
    weight, scale = values(3, HIDDEN, dtype=torch.bfloat16), torch.full((1,), 0.02)

    def model(data, residual, given, keep, azp=None):
        part = data.clone()
        communicator.allreduce(part)
        rows, total = norm(part, residual, weight)
        numbers = torch.empty_like(rows, dtype=torch.int8)
        scales = scale if given else torch.empty((rows.shape[0], 1))
        (static if given else dynamic)(numbers, rows.view(rows.numel() // HIDDEN, HIDDEN), scales, azp)
        return [numbers.float() * 0.5, total, *([] if given else [scales]), *([rows] if keep else [])]

    inputs = values(rank, ROWS, HIDDEN, dtype=torch.bfloat16), values(6, ROWS, HIDDEN, dtype=torch.bfloat16)
    rows, total = in_one_call(communicator, *inputs, weight, False)
    for given, keep in itertools.product((False, True), repeat=2):
        calls = communicator.counters().calls
        found, count = traced(lambda *inputs, given=given, keep=keep: model(*inputs, given, keep), *inputs)
        assert count == 1 and communicator.counters().calls == calls + 1
        numbers, scales = torch.empty_like(rows, dtype=torch.int8), scale if given else torch.empty(ROWS, 1)
        # The operator is called only where it is not part of the fused call.
        (by_scale if given else by_rows)(numbers, rows, scales, None)
        expected = [numbers.float() * 0.5, total, *([] if given else [scales]), *([rows] if keep else [])]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (given, keep)
    # With zero points the quantisation stays.
    azp = torch.zeros(1, dtype=torch.int32)
    found, count = traced(lambda *inputs: model(*inputs, True, False, azp), *inputs)
    assert count == 1


class Calls:
    """The part of the plugin's class that deferred sums use."""

    def __init__(self, communicator):
        self._ranks, self.pending, self.lock = communicator, None, threading.RLock()

    def defer(self, part):
        if self.pending is not None:
            self.pending.settle()
        self.pending = deferred.Pending.of(part, self)
        return self.pending


@on_ranks(2)
def test_deferred_sums(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)
    calls = Calls(communicator)
    total = values(0, ROWS, HIDDEN, dtype=torch.float32) + values(1, ROWS, HIDDEN, dtype=torch.float32)

    def made():
        return communicator.counters().calls

    def sum_of(part):
        with torch.no_grad():
            return calls.defer(part)

    def mine():
        return values(rank, ROWS, HIDDEN, dtype=torch.float32)

    before = made()
    pending = sum_of(mine())
    assert pending.shape == (ROWS, HIDDEN) and pending.dtype == torch.float32 and pending.is_contiguous()
    assert made() == before
    for use in (
        lambda value: value + 0, lambda value: torch.cat([value]), lambda value: value.view(-1).view(ROWS, HIDDEN),
        lambda value: torch.stack((value, value))[0], lambda value: torch.from_numpy(value.numpy()),
        lambda value: torch.add(input=value, other=0), lambda value: value.clone(),
        lambda value: torch.ops.aten.relu(value) - torch.ops.aten.relu(-value),
    ):  # fmt: skip
        pending = sum_of(mine())
        before = made()
        found = use(pending)
        assert type(found) is torch.Tensor and torch.equal(found, total)
        assert torch.equal(use(pending), total) and made() == before + 1
    # The next call computes a sum that nobody has used, and in order.
    first, second = sum_of(mine()), sum_of(2 * mine())
    assert made() == before + 2
    assert torch.equal(second + 0, 2 * total) and torch.equal(first + 0, total) and made() == before + 3


@on_ranks(2)
def test_a_deferred_sum_whose_call_fails(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)
    calls = Calls(communicator)
    pending = calls.defer(values(rank, ROWS, HIDDEN, dtype=torch.float32))
    communicator.barrier()
    communicator.destroy()
    with pytest.raises(fa.errors.Error):
        pending + 0
    # It never is this rank's part.
    for use in (
        lambda: pending + 0,
        pending.tolist,
        lambda: deferred._fused(pending, pending.part, None, 0, False, True),
    ):
        with pytest.raises(fa.errors.Unavailable, match="the call that computes this sum has failed"):
            use()


class RMSNorm(torch.nn.Module):
    """vLLM's class, as far as the plugin reads it."""

    def __init__(self, weight, size=None):
        super().__init__()
        self.weight, self.variance_epsilon, self.variance_size_override = torch.nn.Parameter(weight), EPSILON, size
        self.pass_weight_add = True

    def forward_native(self, x, residual=None):
        return norm(x, residual, self.weight) if residual is not None else x * self.weight


class GemmaRMSNorm(RMSNorm):
    def forward_native(self, x, residual=None):
        return norm(x, residual, self.weight, offset=True)


@on_ranks(2)
def test_norms_of_deferred_sums(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id)
    calls = Calls(communicator)
    for kind, replacement in ((RMSNorm, deferred._rms_norm), (GemmaRMSNorm, deferred._gemma_rms_norm)):
        forward = replacement(kind.forward_native)
        for dtype in TYPES:
            weight = values(3, HIDDEN, dtype=dtype)
            offset = kind is GemmaRMSNorm
            part, residual = values(rank, ROWS, HIDDEN, dtype=dtype), values(4, ROWS, HIDDEN, dtype=dtype)
            total = part.clone()
            communicator.allreduce(total)
            expected = in_one_call(communicator, part, residual, weight, offset)
            with torch.no_grad():
                before, pending = communicator.counters().calls, calls.defer(part)
                found = forward(kind(weight), pending, residual)
                assert communicator.counters().calls == before + 1 and calls.pending is None
                assert all(type(one) is torch.Tensor and torch.equal(one, other) for one, other in zip(found, expected))
                if offset:
                    # This norm leaves its input as it is: the sum can still be used.
                    assert torch.equal(pending + 0, total) and communicator.counters().calls == before + 2
        # What the call does not take: the sum, and then vLLM's own code.
        part, residual = values(rank, ROWS, HIDDEN, dtype=torch.bfloat16), values(4, ROWS, HIDDEN, dtype=torch.bfloat16)
        total = part.clone()
        communicator.allreduce(total)
        with torch.no_grad():
            for layer, other in (
                (kind(torch.ones(HIDDEN)), residual),
                (kind(torch.ones(HIDDEN, dtype=torch.bfloat16)), residual.float()),
                (kind(torch.ones(1, dtype=torch.bfloat16).expand(HIDDEN)), residual),
                (kind(torch.ones(HIDDEN, dtype=torch.bfloat16)), None),
                *([(kind(torch.ones(HIDDEN, dtype=torch.bfloat16), 32), residual)] if kind is RMSNorm else []),
            ):
                pending = calls.defer(part.clone())
                # Without a residual here: the sum itself is the residual.
                found = forward(layer, pending, pending if other is None else other)
                own = kind.forward_native(layer, total, total if other is None else other)
                assert all(torch.equal(one, two) for one, two in zip(found, own))
            assert torch.equal(forward(layer, total, residual)[1], kind.forward_native(layer, total, residual)[1])


def test_a_vllm_without_the_classes(monkeypatch):
    import sys

    layers = "vllm.model_executor.layers"
    for name in ("vllm", "vllm.model_executor", layers, f"{layers}.layernorm", f"{layers}.linear"):
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    layers = sys.modules["vllm.model_executor.layers.layernorm"]
    layers.RMSNorm, own = RMSNorm, RMSNorm.forward_native
    with pytest.raises(fa.errors.Unavailable, match="layernorm has no GemmaRMSNorm.forward_native: .* vLLM 0.32.0"):
        deferred.enable()
    # All or nothing.
    assert RMSNorm.forward_native is own
    with pytest.raises(fa.errors.Unavailable, match="passes of vLLM 0.32.0"):
        fusion.enable_in_vllm(lambda group: None, None)


def test_another_pass_keeps_its_place(monkeypatch):
    config = torch._inductor.config
    monkeypatch.setattr(config, "post_grad_custom_pre_pass", lambda graph: None)
    with pytest.raises(fa.errors.Unavailable, match="post_grad_custom_pre_pass is set by other code"):
        fusion.enable()
    monkeypatch.setattr(config, "post_grad_custom_pre_pass", None)
    fusion.enable()
    first = config.post_grad_custom_pre_pass
    fusion.enable()
    assert config.post_grad_custom_pre_pass is first and first.uuid() == fusion.identity()
