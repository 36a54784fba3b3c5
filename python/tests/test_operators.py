"""torch operators, and `torch.compile` of code that calls a communicator, on the CPU."""

import gc
import inspect
import os
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from ranks import on_ranks, run  # noqa: E402

import fast_allreduce as fa  # noqa: E402
import fast_allreduce.operators as operators  # noqa: E402
from fast_allreduce.operators import definitions  # noqa: E402

ops = torch.ops.fast_allreduce

# Inductor compiles C++: on a busy machine that takes minutes.
LIMIT = 900


def values(rank, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def every_call(communicator, data, residual, weight):
    """Returns the results of each collective method, in place and to separate buffers."""
    rank, nranks = communicator.rank, communicator.nranks
    results = []

    def keep(*tensors):
        results.extend(tensor.clone() for tensor in tensors)

    def copy():
        return data.clone()

    def room(count=None, dtype=None):
        return torch.zeros(data.numel() if count is None else count, dtype=dtype or data.dtype)

    total, apart = copy(), torch.zeros_like(data)
    communicator.allreduce(total)
    communicator.allreduce(data * 2, apart, fa.ReduceOp.MAX)
    keep(total, apart)
    total, apart = copy(), room()
    communicator.allreduce_quantized(total, tolerance=0.1)
    communicator.allreduce_quantized(data, apart, tolerance=0.5, transport="f8e4m3")
    keep(total, apart)
    added, apart = residual.clone(), room()
    communicator.allreduce_fused(data, residual=added)
    communicator.allreduce_fused(data, residual=residual, residual_out=apart)
    keep(added, apart)
    normed, added = copy(), residual.clone()
    communicator.allreduce_fused(normed, residual=added, norm="rms", weight=weight, epsilon=0.25)
    keep(normed, added)
    normed, added, plain = copy(), torch.zeros_like(data), torch.zeros_like(data)
    communicator.allreduce_fused(
        data, normed, residual=residual, residual_out=added, norm="rms", hidden=128, unit_offset=True, sum_out=plain
    )
    keep(normed, added, plain)
    rows, scales = room(dtype=torch.int8), room(data.shape[0], torch.float32)
    norm = {"norm": "rms", "weight": weight}
    communicator.allreduce_fused(
        data, residual=residual.clone(), scaling="per_row", numbers=rows, scales=scales, **norm
    )
    keep(rows, scales)
    rows = room(dtype=torch.float8_e4m3fn)
    quarter = torch.full((1,), 0.25)
    communicator.allreduce_fused(data, residual=residual.clone(), scaling="given", numbers=rows, scales=quarter, **norm)
    keep(rows.view(torch.uint8))
    rows, scales = room(data.numel() // 2, torch.uint8), room(data.numel() // 16, torch.float8_e4m3fn)
    communicator.allreduce_fused(
        data, residual=residual.clone(), scaling="nvfp4", numbers=rows, scales=scales,
        global_scale=torch.full((1,), 300.0), **norm,
    )  # fmt: skip
    keep(rows, scales.view(torch.uint8))
    for scaling, bits, scale_type, count in (
        ("mxfp8", 8, torch.uint8, data.numel() // 32), ("mxfp4_tiled", 4, torch.uint8, 512),
        ("per_group_ue8m0", 8, torch.int32, data.shape[0]), ("per_group_columns", 8, torch.float32, data.shape[0]),
    ):  # fmt: skip
        rows = room(data.numel() * bits // 8, torch.uint8 if bits == 4 else torch.float8_e4m3fn)
        # Bytes that are not written keep their values.
        scales = torch.full((count,), 7, dtype=scale_type)
        communicator.allreduce_fused(
            data, residual=residual.clone(), scaling=scaling, numbers=rows, scales=scales, **norm
        )
        keep(rows.view(torch.uint8), scales)
    table = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)[: data.shape[0]].repeat(data.shape[0] // 2 + 1, 1)
    experts, summed, apart = torch.cat([data, data])[:7], torch.zeros_like(data), torch.zeros_like(data)
    communicator.allreduce_fused(
        experts, apart, residual=residual, residual_out=summed, expert_table=table[: data.shape[0]].contiguous(),
        expert_weights=torch.full((data.shape[0], 2), 0.5), shared_expert=data, routed_scale=2.0, **norm,
    )  # fmt: skip
    keep(summed, apart)
    many, added = data.repeat(nranks, 1), residual.clone()
    normed = torch.zeros_like(data)
    communicator.reduce_scatter_fused(many, normed, residual=added, norm="rms", weight=weight)
    keep(normed, added)
    lengths = [data.numel() if index == 0 else 0 for index in range(nranks)]
    own = data if rank == 0 else data[:0]
    rows, scales = room(lengths[rank], torch.int8), room(len(own), torch.float32)
    communicator.reduce_scatter_fused(
        data, None, lengths, residual=own.clone(), scaling="per_row", numbers=rows, scales=scales, **norm
    )
    keep(rows, scales)
    all_rows, all_scales = room(dtype=torch.int8), room(data.shape[0], torch.float32)
    communicator.allgather_rows(rows, scales, all_rows, all_scales, lengths, scaling="per_row", hidden=data.shape[1])
    keep(all_rows, all_scales)
    scaled, apart = copy(), torch.zeros_like(data)
    parts = {"width": 128, "columns": [(0, 100), (104, 128)], "totals": [100 * nranks, 24 * nranks]}
    communicator.sharded_rms_norm(scaled, **parts)
    communicator.sharded_rms_norm(data, apart, weights=[None, weight[:24].clone()], unit_offset=True, **parts)
    keep(scaled, apart)
    gathered = torch.zeros(nranks, *data.shape)
    communicator.allgather(data, gathered)
    counts = [index + 1 for index in range(nranks)]
    parts = room(sum(counts))
    communicator.allgather_v(data.flatten()[: rank + 1].clone(), parts, counts)
    keep(gathered, parts)
    share, shares = room(data.numel()), room(rank + 1)
    communicator.reduce_scatter(data.expand(nranks, *data.shape).contiguous(), share, "min")
    communicator.reduce_scatter_v(data.flatten()[: sum(counts)].clone(), shares, counts, "prod")
    keep(share, shares)
    sent, got = copy(), room()
    communicator.broadcast(sent, root=nranks - 1)
    communicator.broadcast(data, got, root=0)
    keep(sent, got)
    reduced, apart = copy(), torch.zeros_like(data)
    communicator.reduce(reduced, root=nranks - 1)
    communicator.reduce(data, apart if rank == 0 else None, "max", 0)
    keep(reduced if rank == nranks - 1 else data, apart)
    gathered, part = torch.zeros(nranks, *data.shape), torch.zeros_like(data)
    communicator.gather(data, gathered if rank == 0 else None)
    communicator.scatter(gathered if rank == 0 else None, part, 0)
    keep(gathered, part)
    turned, taken = torch.zeros(nranks * 3), room(nranks * (rank + 1))
    communicator.alltoall(data.flatten()[: nranks * 3].clone(), turned)
    communicator.alltoall_v(data.flatten()[: sum(counts)].clone(), counts, taken, [rank + 1] * nranks)
    keep(turned, taken)
    communicator.barrier()
    return results


def joined(nranks, rank, unique_id, folder):
    """Returns a communicator, in a process whose Inductor uses the folder and whose compiled code has one thread."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.set_num_threads(1)
    return fa.Communicator.init(nranks, rank, unique_id, timeout=LIMIT)


@on_ranks(1, 2, limit=LIMIT)
def test_every_call_in_a_graph(rank, nranks, unique_id, inductor):
    communicator = joined(nranks, rank, unique_id, inductor)
    inputs = values(rank, 4, 128), values(99, 4, 128), values(98, 128)
    kept = [tensor.clone() for tensor in inputs]
    expected = every_call(communicator, *inputs)
    made = communicator.counters().calls
    found = torch.compile(every_call, fullgraph=True)(communicator, *inputs)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected)):
        assert torch.equal(one, other), index
    assert communicator.counters().calls == 2 * made
    assert all(torch.equal(one, other) for one, other in zip(inputs, kept))
    torch._dynamo.reset()


def test_traced_functions_have_the_signatures_of_the_methods():
    others = {
        "send",
        "recv",
        "split",
        "shrink",
        "alloc",
        "register_buffer",
        "abort",
        "destroy",
        "check",
        "counters",
        "plan",
    }
    others |= {"set_timeout", "synchronize", "flight_record", "metrics"}
    others |= {"suspend", "resume", "join", "join_id", "grow", "init_spare", "progress", "inherit", "inherited"}
    methods = {name for name, value in vars(fa.Communicator).items() if inspect.ismethoddescriptor(value)}
    methods = {name for name in methods if not name.startswith("__") and name not in ("init", "from_env")}
    for name in methods - others:
        own, traced = (
            [
                (given.name, given.kind == given.KEYWORD_ONLY)
                for given in inspect.signature(function).parameters.values()
            ]
            for function in (getattr(fa.Communicator, name), getattr(operators.tracing, name))
        )
        assert own == traced, name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2, limit=LIMIT)
def test_no_call_is_removed_or_moved(rank, nranks, unique_id, inductor, backend):
    first = joined(nranks, rank, unique_id, inductor)
    second = first.split(0, rank)
    first.name, second.name = "first", "second"
    order = []

    def noted(name):
        order.append(name)
        return find(name)

    # Compiled code calls it once vLLM's pass has run in this process. It does not look up names in Python.
    def noted_direct(data, name, *others):
        order.append(name)
        return direct(data, name, *others)

    def calls(data):
        long = ((data @ data).relu() @ data).sum(0)
        first.allreduce(long)
        second.allreduce(data[:2].clone())
        second.allreduce(data[:1].clone())
        # The first call twice, with equal arguments, and a result that only one rank reads.
        ops.allreduce(data, "first")
        again = ops.allreduce(data, "first")
        parts = torch.empty(nranks, 8, 8)
        second.gather(data, parts if rank == 0 else None)
        first.barrier()
        ops.broadcast_(data[:3].clone(), 0, "second")
        return parts.sum(0) + long if rank == 0 else again

    find, definitions.named = definitions.named, noted
    direct, ops.direct.allreduce = ops.direct.allreduce, noted_direct
    try:
        found = torch.compile(calls, fullgraph=True, backend=backend)(values(rank, 8, 8))
    finally:
        definitions.named, ops.direct.allreduce = find, direct
    assert order == ["first", "second", "second", "first", "first", "second", "first", "second"]
    expected = calls(values(rank, 8, 8))
    assert torch.allclose(found, expected, rtol=1e-4)
    torch._dynamo.reset()


def total(data, communicator):
    summed = data.clone()
    communicator.allreduce(summed)
    return summed + 1


@on_ranks(2)
def test_compiled_code_is_guarded_by_the_communicator(rank, nranks, unique_id):
    whole = fa.Communicator.init(nranks, rank, unique_id)
    alone = whole.split(rank)
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert compiled(torch.ones(3), whole).tolist() == [nranks + 1.0] * 3
        assert compiled(torch.ones(3), alone).tolist() == [2.0] * 3
    torch._dynamo.reset()


def gathered(rank, nranks, unique_id, folder):
    from torch._dynamo.utils import counters

    communicator = joined(nranks, rank, unique_id, folder)
    communicator.name = "kept"

    @torch.compile(fullgraph=True)
    def gather(data):
        parts = torch.empty(communicator.nranks, *data.shape)
        communicator.allgather(data * 2, parts)
        return parts + 1

    counters.clear()
    found = gather(values(rank, 5))
    assert torch.equal(found, torch.stack([values(r, 5) * 2 for r in range(nranks)]) + 1)
    torch._dynamo.reset()
    return counters["inductor"]["fxgraph_cache_hit"]


def test_cached_compiled_code(inductor):
    # The second world is larger, with a communicator of the same name.
    assert run(gathered, 1, inductor, limit=LIMIT) == [0]
    assert run(gathered, 2, inductor, limit=LIMIT)[0] == 0
    assert run(gathered, 1, inductor, limit=LIMIT) == [1]


@pytest.fixture
def communicator():
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as communicator:
        yield communicator


def test_names(communicator):
    assert communicator.name == communicator.name and operators.named(communicator.name) is communicator
    with pytest.raises(ValueError, match='"late" comes too late'):
        communicator.name = "late"
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as other:
        with pytest.raises(ValueError, match="another communicator of this process is named"):
            other.name = communicator.name
        other.name = "mine"
        assert torch.equal(ops.allreduce(torch.ones(3), "mine"), torch.ones(3))
    with pytest.raises(ValueError, match="destroyed"):
        ops.allreduce(torch.ones(3), "mine")
    # The name is free after its communicator is gone.
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as third:
        third.name = "mine"
        del other
        gc.collect()
        assert operators.named("mine") is third
    del third
    gc.collect()
    with pytest.raises(ValueError, match="no communicator of this process is named 'mine'") as refused:
        ops.allreduce_(torch.ones(3), "mine")
    assert repr(communicator.name) in str(refused.value)


@on_ranks(1, 2)
def test_direct_calls(communicator):
    """The functions that compiled code calls return what the operators return, and leave other arguments to them."""
    name, direct, left = communicator.name, ops.direct, []

    def noted(name, kernel):
        return lambda *arguments: left.append(name) or kernel(*arguments)

    def check(count, *shape, dtype=torch.float32, of=lambda tensor: tensor):
        data, residual = (of(values(communicator.rank + seed, *shape, dtype=dtype)) for seed in (0, 5))
        before, weight = (data.clone(), residual.clone()), torch.nn.Parameter(values(7, data.shape[-1], dtype=dtype))
        found = (
            direct.allreduce(data, name, "max"),
            *direct.allreduce_rms_norm(data, residual, weight, name, 0.25, True),
        )
        assert len(left) == count, left
        expected = ops.allreduce(data, name, "max"), *ops.allreduce_rms_norm(data, residual, weight, name, 0.25, True)
        for one, other in zip(found, expected):
            assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
        assert torch.equal(data, before[0]) and torch.equal(residual, before[1])
        left.clear()

    kernels = {name: noted(name, kernel) for name, kernel in definitions.KERNELS.items()}
    with torch.no_grad(), mock.patch.dict(definitions.KERNELS, kernels):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check(0, 3, 64, dtype=dtype)
        check(0, 2, 1, 3, 8)
        check(0, 0, 64)
        check(0, 4, 64, of=lambda tensor: tensor[1:3])
        check(2, 64, 3, of=lambda tensor: tensor.T)
        data, weight = values(1, 2, 64), torch.ones(64)
        with pytest.raises(ValueError, match="pending negation"):
            direct.allreduce(torch._neg_view(data), name)
        with pytest.raises(ValueError, match="pending negation"):
            direct.allreduce_rms_norm(data, torch._neg_view(data), weight, name)
        with pytest.raises(ValueError, match="weight"):
            direct.allreduce_rms_norm(data, data, weight.half(), name)
        with pytest.raises(ValueError, match="residual"):
            direct.allreduce_rms_norm(data, data[:1], weight, name)
        with pytest.raises(ValueError, match="no communicator of this process is named 'other'"):
            direct.allreduce(data, "other")
        with pytest.raises(ValueError, match="average of all"):
            direct.allreduce(data, name, "average of all")
        assert direct.allreduce(data, name).shape == data.shape
    with pytest.raises(fa.errors.Unavailable, match="gradient"):
        direct.allreduce(data.requires_grad_(), name)
    communicator.destroy()
    with torch.no_grad(), pytest.raises(ValueError, match="destroyed"):
        direct.allreduce(data, name)


def test_gradients_are_refused(communicator):
    weight = torch.ones(3, requires_grad=True)
    for call in (ops.allreduce, ops.allreduce_):
        with pytest.raises(fa.errors.Unavailable, match="no_grad"):
            call(weight, communicator.name)
        with torch.no_grad():
            call(weight, communicator.name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(data):
        product = data * weight
        communicator.allreduce(product)
        return product

    with pytest.raises(Exception, match="no_grad"):
        layer(torch.ones(3))
    with torch.inference_mode():
        assert torch.equal(layer(torch.ones(3)), torch.ones(3))
    torch._dynamo.reset()


def test_compiled_fused_calls(communicator):
    """Padding in tiled scales is not written, and errors are raised in compiled code as well."""
    (data, residual), weight = (values(seed, 5, 48) for seed in (0, 1)), values(2, 48)

    def tiled():
        numbers, scales = (torch.full((count,), 9, dtype=torch.uint8) for count in (120, 512))
        communicator.allreduce_fused(
            data.clone(), residual=residual.clone(), norm="rms", weight=weight, scaling="nvfp4_tiled",
            numbers=numbers, scales=scales, global_scale=torch.ones(1),
        )  # fmt: skip
        return numbers, scales

    expected = tiled()
    # Fills uninitialised memory with a pattern.
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.compile(tiled, fullgraph=True, backend="aot_eager")()
    finally:
        torch.use_deterministic_algorithms(False)
    assert int((expected[1] == 9).sum()) == 512 - 15
    assert all(torch.equal(one, other) for one, other in zip(found, expected))

    one = torch.zeros(5)
    for arguments in (
        {"recvbuf": torch.zeros_like(data)},
        {"norm": "rms", "weight": weight, "numbers": torch.zeros(240, dtype=torch.int8)},
        {"norm": "rms", "weight": weight, "scales": one},
    ):

        def refused(arguments=arguments):
            communicator.allreduce_fused(data.clone(), residual=residual.clone(), **arguments)

        for call in (refused, torch.compile(refused, backend="eager")):
            with pytest.raises(fa.Error):
                call()
    torch._dynamo.reset()


def examples(name):
    """Returns arguments of each operator, in a world of one rank."""
    data, weight = values(0, 4, 32), values(1, 32)
    return {
        "allreduce": (data, name, "max"),
        "allreduce_quantized": (data, name, 0.5, "f8e4m3"),
        "allreduce_fused": (
            data, data + 1, weight, None, name, "rms", 0.5, False, None, "per_row", None, None, torch.int8, 4, False,
        True,
        ),
        "allreduce_rms_norm": (data, data + 1, weight, name, 0.5, True),
        "reduce_scatter_fused": (
            data, [128], data + 1, weight, None, name, "rms", 0.5, False, None, "per_row", None, None, torch.int8, 4,
        ),
        "allreduce_fused_": (data, data + 1, weight, None, name, "rms", 0.5),
        "allgather_rows": (data.to(torch.int8), weight[:4], [128], 1, torch.zeros(4), "per_row", 32, name),
        "sharded_rms_norm": (data, name, 32, [0, 8], [8, 32], [8, 24], [None, weight[:24].clone()], 0.5, True),
        "allgather": (data, 1, name),
        "allgather_v": (weight, [32], name),
        "reduce_scatter": (data, 1, name),
        "reduce_scatter_v": (weight, [32], 0, name),
        "broadcast": (data.to(torch.complex64), 0, name),
        "reduce": (data, 0, name),
        "gather": (data > 0, 1, 0, name),
        "scatter": (data, data.clone(), 0, name),
        "alltoall": (data.to(torch.int16), name),
        "alltoall_v": (weight, [32], [32], name),
        "barrier": (name,),
    }  # fmt: skip


def test_opcheck(communicator):
    of_one = examples(communicator.name)
    assert {name.rstrip("_") for name in operators.SCHEMAS} == {name.rstrip("_") for name in of_one}
    for name in operators.SCHEMAS:
        arguments = of_one.get(name) or of_one[name.rstrip("_")]
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=checks)


def test_a_tensor_without_shares(communicator):
    for input, nranks in ((torch.tensor(1.0), 1), (torch.ones(4), 0), (torch.ones(4), -1)):
        with pytest.raises(fa.errors.InvalidArgument, match=f"no shares for {nranks} ranks"):
            ops.reduce_scatter(input, nranks, communicator.name)


def test_operators_of_tensors_on_a_gpu(communicator):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in operators.SCHEMAS:
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"fast_allreduce::{name}", "CUDA"), name
    with FakeTensorMode(), torch.no_grad():
        data = torch.empty(4, 32, device="cuda:1", dtype=torch.bfloat16)
        assert ops.allgather(data, 3, communicator.name).shape == (12, 32)
        fused = ops.allreduce_fused(data, data, None, None, communicator.name, "rms")[:2]
        for made in (*fused, ops.allreduce(data, "unknown")):
            assert (made.device, made.dtype, made.shape) == (data.device, data.dtype, data.shape)
