"""Every collective between processes, compared with results of numpy."""

import random

import numpy as np
import pytest
from ranks import on_ranks

import fast_allreduce as fa

TYPES = [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
SEED = random.randrange(1 << 30)


@pytest.fixture
def seed():
    return SEED


def values(rank, count, dtype, seed=SEED):
    """Returns small integers, whose sums are exact in every type."""
    generator = np.random.default_rng([seed, rank])
    return generator.integers(0, 8, count).astype(dtype)


def poisoned(count, dtype):
    return np.full(count, 99, dtype=dtype)


def of_all(nranks, count, dtype, seed):
    return [values(rank, count, dtype, seed) for rank in range(nranks)]


REDUCED = {
    "sum": lambda inputs: np.sum(inputs, axis=0),
    "prod": lambda inputs: np.prod(inputs, axis=0),
    "min": lambda inputs: np.min(inputs, axis=0),
    "max": lambda inputs: np.max(inputs, axis=0),
    "avg": lambda inputs: np.sum(inputs, axis=0) / len(inputs),
}


@on_ranks(1, 2, 3)
def test_reductions(rank, nranks, communicator, seed):
    for dtype in TYPES:
        for name, reduced in REDUCED.items():
            for count in (0, 1, 17, 5000):
                inputs = of_all(nranks, count, dtype, seed)
                with np.errstate(over="ignore"):
                    expected = reduced([one.astype(np.float64) for one in inputs])
                expected = np.trunc(expected) if np.issubdtype(dtype, np.integer) else expected
                expected = expected.astype(dtype)
                output = poisoned(count, dtype)
                communicator.allreduce(inputs[rank], output, fa.ReduceOp(name))
                np.testing.assert_array_equal(output, expected)
                communicator.allreduce(inputs[rank], op=name)
                np.testing.assert_array_equal(inputs[rank], expected)
    # Calls without elements count as well.
    assert communicator.counters().calls == len(TYPES) * len(REDUCED) * 4 * 2


@on_ranks(2)
def test_operations_of_some_types(rank, nranks, communicator, seed):
    bitwise = {fa.BAND: np.bitwise_and, fa.BOR: np.bitwise_or, fa.BXOR: np.bitwise_xor}
    for op, combined in bitwise.items():
        inputs = of_all(nranks, 1000, np.int32, seed)
        output = poisoned(1000, np.int32)
        communicator.allreduce(inputs[rank], output, op)
        np.testing.assert_array_equal(output, combined.reduce(inputs))
        with pytest.raises(ValueError, match="of f32"):
            communicator.allreduce(np.zeros(3, np.float32), op=op)
    data = np.full(5, 2.0, np.float32)
    communicator.allreduce(data, op=fa.premul_sum(0.5 * (rank + 1)))
    np.testing.assert_array_equal(data, np.full(5, nranks * (nranks + 1) / 2, np.float32))
    with pytest.raises(ValueError, match="of i8"):
        communicator.allreduce(np.zeros(3, np.int8), op=fa.premul_sum(1))
    with pytest.raises(ValueError, match="premul_sum"):
        communicator.allreduce(data, op="premul_sum")


@on_ranks(1, 2, 3)
def test_quantized(rank, nranks, communicator, seed):
    for dtype in (np.float16, np.float32):
        for count in (0, 1, 33, 1000):
            inputs = of_all(nranks, count, dtype, seed)
            exact = np.sum(inputs, axis=0, dtype=np.float64)
            for transport, tolerance in (("int8", 0.0085), ("f8e4m3", 0.074)):
                plain, out = inputs[rank].copy(), poisoned(count, dtype)
                communicator.allreduce_quantized(plain, out, tolerance=tolerance, transport=transport)
                np.testing.assert_array_equal(plain, inputs[rank])
                largest = sum(np.abs(each).max(initial=0).astype(np.float64) for each in inputs)
                assert np.abs(out - exact).max(initial=0) <= tolerance * largest
                communicator.allreduce_quantized(plain, tolerance=tolerance, transport=transport)
                np.testing.assert_array_equal(plain, out)
    one = np.ones(6, np.float32)
    for wrong, said in (
        ({"tolerance": 0.001}, "int8 guarantees 0.0079"),
        ({"transport": "int4"}, "one of int8, f8e4m3"),
        ({"sendbuf": np.ones(6)}, "f16, bf16 or f32"),
    ):
        arguments = {"sendbuf": one, "tolerance": 0.01} | wrong
        with pytest.raises(ValueError, match=said):
            communicator.allreduce_quantized(**arguments)
    communicator.barrier()


@on_ranks(2, 3)
def test_fused_shares(rank, nranks, communicator, seed):
    hidden = 48
    for of_ranks in ([2] * nranks, [(index + 1) % nranks * 2 for index in range(nranks)]):
        counts = [rows * hidden for rows in of_ranks]
        count, first = sum(counts), sum(counts[:rank])
        mine = slice(first, first + counts[rank])
        own, residual = of_all(nranks, count, np.float32, seed)[rank], values(99, count, np.float32, seed)
        norm = {"norm": "rms", "weight": values(98, hidden, np.float32, seed), "epsilon": 1e-3}
        rows, added = poisoned(count, np.float32), poisoned(count, np.float32)
        communicator.allreduce_fused(own, rows, residual=residual, residual_out=added, **norm)
        given = None if len(set(counts)) == 1 else counts
        out, summed = poisoned(counts[rank], np.float32), poisoned(counts[rank], np.float32)
        communicator.reduce_scatter_fused(own, out, given, residual=residual[mine], residual_out=summed, **norm)
        np.testing.assert_array_equal(summed, added[mine])
        np.testing.assert_array_equal(out, rows[mine])
        # The rows replace the own share of the input.
        data, summed = own.copy(), residual[mine].copy()
        communicator.reduce_scatter_fused(data, data[mine], given, residual=summed, **norm)
        np.testing.assert_array_equal(data[mine], rows[mine])
        np.testing.assert_array_equal(np.delete(data, mine), np.delete(own, mine))
        # Quantised rows are gathered: the bits of the allreduce.
        for scaling, bits, of_row, whole in (
            ("per_row", 8, 1, {}),
            ("nvfp4", 4, 3, {"global_scale": np.full(1, 300, np.float32)}),
        ):

            def room(length, bits=bits, of_row=of_row):
                numbers = np.zeros(length * bits // 8, np.int8 if bits == 8 else np.uint8)
                return numbers, np.zeros(length // hidden * of_row, np.float32 if bits == 8 else np.uint8)

            expected, alone, gathered = room(count), room(counts[rank]), room(count)
            how = {"scaling": scaling} | whole | norm
            communicator.allreduce_fused(own, residual=residual.copy(), numbers=expected[0], scales=expected[1], **how)
            communicator.reduce_scatter_fused(
                own, None, given, residual=residual[mine].copy(), numbers=alone[0], scales=alone[1], **how
            )
            lengths = None if given is None else [length * bits // 8 for length in counts]
            communicator.allgather_rows(*alone, *gathered, lengths, scaling=scaling, hidden=hidden)
            for one, other in zip(gathered, expected):
                np.testing.assert_array_equal(one, other)
        # Rows of both kinds. The memory of a rank without rows may be null, as that of torch's empty tensors.
        own_memory = [out, residual[mine].copy(), np.zeros(counts[rank], np.int8), np.zeros(of_ranks[rank], np.float32)]
        buffers = [array if array.size else fa.RawBuffer(0, 0, array.dtype) for array in own_memory]
        names = ["recvbuf", "residual", "numbers", "scales"]
        out.fill(0)
        communicator.reduce_scatter_fused(own, counts=given, **dict(zip(names, buffers)), scaling="per_row", **norm)
        np.testing.assert_array_equal(out, rows[mine])
    five = np.zeros(5, np.float32)
    for wrong, said in (({"counts": [hidden]}, "counts has 1 numbers"), ({"residual": five}, "residual has 5")):
        arguments = {"recvbuf": out, "counts": counts, "residual": residual[mine].copy()} | wrong
        with pytest.raises(ValueError, match=said):
            communicator.reduce_scatter_fused(own, **arguments, **norm)


@on_ranks(1, 2, 3)
def test_sharded_rms_norm(rank, nranks, communicator, seed):
    rows, width, columns = 5, 13, [(1, 8), (9, 12)]
    inputs = of_all(nranks, rows * width, np.float32, seed)
    weight = values(98, 7, np.float32, seed)
    totals = [7 * nranks, 3 * nranks]
    expected = inputs[rank].reshape(rows, width).astype(np.float64)
    for (first, end), factors in zip(columns, (weight.astype(np.float64), 1.0)):
        parts = [of_rank.reshape(rows, width)[:, first:end].astype(np.float64) for of_rank in inputs]
        scale = 1 / np.sqrt(np.mean(np.concatenate(parts, axis=1) ** 2, axis=1, keepdims=True) + 1e-3)
        expected[:, first:end] = parts[rank] * scale * factors
    arguments = {"width": width, "columns": columns, "totals": totals, "weights": [weight, None], "epsilon": 1e-3}
    data, out = inputs[rank].copy(), inputs[rank].copy()
    communicator.sharded_rms_norm(data, out, **arguments)
    np.testing.assert_array_equal(data, inputs[rank])
    communicator.sharded_rms_norm(data, **arguments)
    np.testing.assert_array_equal(data, out)
    np.testing.assert_allclose(out.reshape(rows, width), expected, rtol=1e-6)
    for wrong, said in (
        ({"width": 12}, "no whole rows of 12"),
        ({"columns": [(1, 8), (9, 14)]}, "columns are 9 to 14 of rows of 13"),
        ({"totals": [7]}, "one item for each part"),
        ({"totals": [1, 9]}, "where this rank has 7"),
        ({"weights": [None, weight]}, "one element for each column"),
    ):
        with pytest.raises(ValueError, match=said):
            communicator.sharded_rms_norm(data, **arguments | wrong)
    communicator.barrier()


@on_ranks(1, 2, 3)
def test_fused(rank, nranks, communicator, seed):
    for dtype in (np.float16, np.float32):
        for rows, hidden in ((1, 1), (3, 17), (5, 256)):
            inputs = of_all(nranks, rows * hidden, dtype, seed)
            residual = values(99, rows * hidden, dtype, seed)
            weight = values(98, hidden, dtype, seed)
            # Sums of small integers are exact.
            total = np.sum(inputs, axis=0, dtype=dtype)
            added = total + residual
            squares = np.mean(added.astype(np.float64).reshape(rows, hidden) ** 2, axis=1, keepdims=True)
            for offset in (False, True):
                normed = added.reshape(rows, hidden) / np.sqrt(squares + 1e-3) * (weight.astype(np.float64) + offset)
                tolerance = {"rtol": 4 * np.finfo(dtype).eps, "atol": 0}
                plain, out, summed = inputs[rank].copy(), poisoned(rows * hidden, dtype), poisoned(rows * hidden, dtype)
                norm = {"norm": "rms", "weight": weight, "epsilon": 1e-3, "unit_offset": offset}
                communicator.allreduce_fused(plain, out, residual=residual, residual_out=summed, **norm)
                np.testing.assert_array_equal(plain, inputs[rank])
                np.testing.assert_array_equal(summed, added)
                np.testing.assert_allclose(out.reshape(rows, hidden), normed, **tolerance)
                # In place, for the input and the residual.
                summed[:] = residual
                communicator.allreduce_fused(plain, residual=summed, **norm)
                np.testing.assert_array_equal(summed, added)
                np.testing.assert_array_equal(plain, out)
            # With the plain sum.
            alone, again = poisoned(rows * hidden, dtype), residual.copy()
            communicator.allreduce_fused(inputs[rank], plain, residual=again, sum_out=alone, **norm)
            np.testing.assert_array_equal(alone, total)
            np.testing.assert_array_equal(again, added)
            np.testing.assert_array_equal(plain, out)
            summed[:] = residual
            communicator.allreduce_fused(inputs[rank], residual=summed)
            np.testing.assert_array_equal(summed, added)
    rows, hidden = 3, 300
    plain, residual = np.ones(rows * hidden, np.float32), np.zeros(rows * hidden, np.float32)
    plain.reshape(rows, hidden)[:, 128:] = 2
    numbers = np.zeros(rows * hidden, np.int8)
    norm = {"norm": "rms", "hidden": hidden}
    for groups, scaling in ((1, "per_row"), (3, "per_group")):
        scales = np.zeros(rows * groups, np.float32)
        communicator.allreduce_fused(
            plain, residual=residual.copy(), scaling=scaling, numbers=numbers, scales=scales, **norm
        )
        normed = plain.copy()
        communicator.allreduce_fused(normed, residual=residual.copy(), **norm)
        parts = np.split(normed.reshape(rows, hidden), [128, 256] if groups == 3 else [], axis=1)
        greatest = np.stack([part.max(axis=1) for part in parts], axis=1).reshape(-1)
        np.testing.assert_array_equal(scales, greatest / np.float32(127))
        inverse = np.repeat(1 / scales.reshape(rows, groups), [len(part[0]) for part in parts], axis=1)
        expected = np.rint(normed.reshape(rows, hidden) * inverse).astype(np.int8)
        np.testing.assert_array_equal(numbers, expected.reshape(-1))
        assert numbers.max() == 127
    half = np.full(1, 0.5, np.float32)
    communicator.allreduce_fused(plain, residual=residual.copy(), scaling="given", numbers=numbers, scales=half, **norm)
    np.testing.assert_array_equal(numbers, np.rint(normed * 2).astype(np.int8))
    rows, hidden = 130, 32
    plain, residual = np.tile(np.array([1, -2], np.float32), rows * hidden // 2), np.zeros(rows * hidden, np.float32)
    whole = np.full(1, 3, np.float32)
    norm = {"norm": "rms", "hidden": hidden}
    for scaling, size in (("nvfp4_tiled", 1024), ("nvfp4", rows * 2)):
        numbers, scales = np.zeros(rows * hidden // 2, np.uint8), np.zeros(size, np.uint8)
        communicator.allreduce_fused(
            plain, residual=residual.copy(), scaling=scaling, numbers=numbers, scales=scales, global_scale=whole, **norm
        )
        # Rows are 0.63 and -1.26. A sixth of that times 3 is 0.63, as an e4m3 0.625: 3 and -6, at most 1 in 16 off.
        assert (numbers == 0xF5).all(), numbers
        assert np.count_nonzero(scales == 0x32) == rows * 2 and np.count_nonzero(scales) == rows * 2, scales
    # By a scale of 1/4 they are 2.53 and -5.06, which become 3 and -6.
    for scaling, size in (("mxfp4", rows), ("mxfp4_tiled", 1024)):
        numbers, scales = np.zeros(rows * hidden // 2, np.uint8), np.zeros(size, np.uint8)
        communicator.allreduce_fused(
            plain, residual=residual.copy(), scaling=scaling, numbers=numbers, scales=scales, **norm
        )
        assert (numbers == 0xF5).all(), numbers
        assert np.count_nonzero(scales == 125) == np.count_nonzero(scales) == rows, scales
    # A norm with a bias, and rows in the type as well as quantised ones.
    rows, hidden = 4, 48
    bias = values(96, hidden, np.float32, seed)
    added = np.sum(of_all(nranks, rows * hidden, np.float32, seed), axis=0).reshape(rows, hidden).astype(np.float64)
    out, numbers, scales = (
        poisoned(rows * hidden, np.float32),
        np.zeros(rows * hidden, np.int8),
        np.zeros(rows, np.float32),
    )
    mine = of_all(nranks, rows * hidden, np.float32, seed)[rank]
    communicator.allreduce_fused(
        mine, out, residual=np.zeros(rows * hidden, np.float32), norm="layer", bias=bias, epsilon=1e-3,
        scaling="per_row", numbers=numbers, scales=scales,
    )  # fmt: skip
    centred = added - added.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-3) + bias
    np.testing.assert_allclose(out.reshape(rows, hidden), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scales, np.abs(out.reshape(rows, hidden)).max(axis=1) / np.float32(127))
    np.testing.assert_array_equal(numbers, np.rint(out * np.repeat(1 / scales, hidden)).astype(np.int8))
    one, small, bytes_ = np.ones(6, np.float32), np.zeros(6, np.int8), np.zeros(6, np.uint8)
    per_row = {"scaling": "per_row", "numbers": small, "scales": one[:2].copy()}
    nvfp4 = {"scaling": "nvfp4", "numbers": bytes_[:3].copy(), "scales": bytes_[:2].copy(), "global_scale": whole}
    for wrong, said in (
        ({"recvbuf": small}, "recvbuf has elements of type i8"),
        ({"scaling": "per_row", "scales": one[:2].copy()}, "come together"),
        ({"numbers": small, "scales": one[:2].copy()}, "come together"),
        (per_row | {"scales": one[:3].copy()}, "scales has 3 elements, and the call needs 2"),
        (per_row | {"scaling": "given"}, "scales has 2 elements, and the call needs 1"),
        (per_row | {"scales": np.ones(2)}, "scales has elements of type f64"),
        (per_row | {"numbers": one.copy()}, "numbers has elements of type f32"),
        (per_row | {"scaling": "column"}, "column"),
        (per_row | {"global_scale": whole}, "has no global_scale"),
        (nvfp4 | {"numbers": small}, "numbers has elements of type i8, and the call needs u8"),
        (nvfp4 | {"numbers": bytes_}, "numbers has 6 elements, and the call needs 3"),
        (nvfp4 | {"scales": bytes_}, "scales has 6 elements"),
        (nvfp4 | {"global_scale": None}, "needs global_scale"),
        ({"norm": "batch"}, "batch"),
        ({"norm": None, "recvbuf": one.copy()}, "norm"),
        ({"bias": one[:3].copy()}, "bias"),
        ({"residual": one[:3].copy()}, "residual has 3 elements"),
        ({"residual": one.astype(np.float16)}, "residual has elements of type f16"),
        ({"sum_out": one[:3].copy()}, "3 elements"),
        ({"hidden": None}, "no weight gives"),
        ({"hidden": 4}, "whole rows"),
        ({"weight": one[:2].copy(), "hidden": 3}, "weight has 2 elements"),
        ({"epsilon": -1.0}, "epsilon"),
    ):
        arguments = {"residual": np.ones(6, np.float32), "norm": "rms", "hidden": 3} | wrong
        with pytest.raises(ValueError, match=said):
            communicator.allreduce_fused(one.copy(), **arguments)
    communicator.barrier()


def finalized(rows, table, weights=None, shared=None, scale=None):
    """Returns the input that a rank computes from experts' rows: each step in f32, then one rounding."""
    sums = np.zeros((len(table), rows.shape[1]), np.float32)
    for (token, place), number in np.ndenumerate(table):
        if number >= 0:
            weight = 1 if weights is None else weights[token, place]
            sums[token] += rows[number].astype(np.float32) * np.float32(weight)
    if scale is not None:
        sums *= np.float32(scale)
    if shared is not None:
        sums += shared.astype(np.float32)
    return sums.astype(rows.dtype)


@on_ranks(1, 2, 3)
def test_experts(rank, nranks, communicator, seed):
    generator, tokens, hidden = np.random.default_rng([seed, rank]), 5, 48
    for dtype in (np.float16, np.float32):
        residual, norm = values(99, tokens * hidden, dtype), {"norm": "rms", "hidden": hidden, "epsilon": 1e-3}
        # Ranks differ in the number of rows and of entries. In the second call one has no rows.
        for count, weights_type, shared, scale in (
            (4 + rank, np.float32, True, 2.5),
            (2 * rank, None, True, None),
            (9, dtype, False, None),
        ):
            rows, top_k = generator.standard_normal((count, hidden)).astype(dtype), rank + 1
            table = generator.integers(-2, count, (tokens, top_k)).astype(np.int32)
            given = {}
            if weights_type is not None:
                given["weights"] = generator.standard_normal((tokens, top_k)).astype(weights_type)
            if shared:
                given["shared"] = generator.standard_normal((tokens, hidden)).astype(dtype)
            expected, added = poisoned(tokens * hidden, dtype), poisoned(tokens * hidden, dtype)
            mine = finalized(rows, table, scale=scale, **given).reshape(-1)
            communicator.allreduce_fused(mine, expected, residual=residual, residual_out=added, **norm)
            names = {"weights": "expert_weights", "shared": "shared_expert"}
            given = {names[name]: value for name, value in given.items()} | {"expert_table": table}
            if scale is not None:
                given["routed_scale"] = scale
            kept = rows.copy()
            out, summed = poisoned(tokens * hidden, dtype), poisoned(tokens * hidden, dtype)
            communicator.allreduce_fused(rows, out, residual=residual, residual_out=summed, **given, **norm)
            np.testing.assert_array_equal(summed, added)
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(rows, kept)
            # Only quantised rows.
            numbers, tenth = poisoned(tokens * hidden, np.int8), np.full(1, 0.1, np.float32)
            summed[:] = residual
            quantized = {"scaling": "given", "numbers": numbers, "scales": tenth}
            communicator.allreduce_fused(rows, residual=summed, **quantized, **given, **norm)
            np.testing.assert_array_equal(summed, added)
            steps = np.rint(expected.astype(np.float32) * (1 / tenth)).clip(-127, 127)
            np.testing.assert_array_equal(numbers, steps.astype(np.int8))
    rows, table = np.ones((3, 2), np.float32), np.array([[0, -1], [2, 1]], np.int32)
    one, beyond = np.ones(4, np.float32), table.copy()
    beyond[1, 0] = 3
    out, residual = poisoned(4, np.float32), poisoned(4, np.float32)
    for wrong, said in (
        ({"expert_table": None, "expert_weights": one.copy()}, "need expert_table"),
        ({"expert_table": None, "shared_expert": one.copy()}, "need expert_table"),
        ({"expert_table": None, "routed_scale": 2.0}, "need expert_table"),
        ({"expert_table": table.astype(np.int64)}, "expert_table has elements of type i64, and the call needs i32"),
        ({"expert_table": table.reshape(-1)[:3].copy()}, "expert_table has 3 elements, and the call needs 2"),
        ({"expert_table": table[:0].copy()}, "top_k"),
        ({"expert_table": np.zeros((2, 65), np.int32)}, "top_k"),
        ({"expert_weights": one[:3].copy()}, "expert_weights has 3 elements, and the call needs 4"),
        ({"expert_weights": np.ones(4)}, "expert_weights has elements of type f64"),
        ({"shared_expert": one[:2].copy()}, "shared_expert has 2 elements, and the call needs 4"),
        ({"shared_expert": np.ones(4, np.float16)}, "shared_expert has elements of type f16"),
        ({"routed_scale": float("nan")}, "routed_scale"),
        ({"sendbuf": np.ones(5, np.float32)}, "sendbuf has 5 elements, and rows of 2"),
        ({"norm": None}, "norm"),
        ({"recvbuf": None}, "an output for normalised rows"),
        ({"recvbuf": rows.reshape(-1)[:4]}, "rows pointer .* has another use"),
        ({"expert_table": beyond}, "entry 2 is 3, of 3 rows"),
    ):
        arguments = {"sendbuf": rows, "recvbuf": out, "residual": residual, "norm": "rms", "hidden": 2}
        with pytest.raises(ValueError, match=said):
            communicator.allreduce_fused(**(arguments | {"expert_table": table} | wrong))
        assert (out == 99).all() and (residual == 99).all() and (rows == 1).all()
    communicator.barrier()


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@on_ranks(1, 2, 3)
def test_shares(rank, nranks, communicator, seed, dtype):
    root, count = nranks - 1, 37
    inputs = of_all(nranks, count * nranks, dtype, seed)
    mine, total = inputs[rank], np.sum(inputs, axis=0, dtype=dtype)

    output = poisoned(count * nranks * nranks, dtype)
    communicator.allgather(mine, output)
    np.testing.assert_array_equal(output, np.concatenate(inputs))

    output = poisoned(count, dtype)
    communicator.reduce_scatter(mine, output)
    np.testing.assert_array_equal(output, total[rank * count :][:count])

    counts = [3 * r for r in range(nranks)]
    output = poisoned(sum(counts), dtype)
    communicator.allgather_v(mine[: counts[rank]], output, counts)
    np.testing.assert_array_equal(output, np.concatenate([inputs[r][: counts[r]] for r in range(nranks)]))

    output = poisoned(counts[rank], dtype)
    communicator.reduce_scatter_v(mine[: sum(counts)], output, counts)
    start = sum(counts[:rank])
    np.testing.assert_array_equal(output, total[: sum(counts)][start : start + counts[rank]])

    data = mine.copy()
    communicator.broadcast(data, root=root)
    np.testing.assert_array_equal(data, inputs[root])
    output = poisoned(count * nranks, dtype)
    communicator.broadcast(mine if rank == root else None, output, root)
    np.testing.assert_array_equal(output, inputs[root])

    output = poisoned(count * nranks, dtype) if rank == root else None
    communicator.reduce(mine, output, "sum", root)
    if rank == root:
        np.testing.assert_array_equal(output, total)

    output = poisoned(count * nranks * nranks, dtype) if rank == root else None
    communicator.gather(mine, output, root)
    if rank == root:
        np.testing.assert_array_equal(output, np.concatenate(inputs))

    output = poisoned(count, dtype)
    communicator.scatter(mine if rank == root else None, output, root)
    np.testing.assert_array_equal(output, inputs[root][rank * count :][:count])

    output = poisoned(count * nranks, dtype)
    communicator.alltoall(mine, output)
    np.testing.assert_array_equal(output, np.concatenate([one[rank * count :][:count] for one in inputs]))

    send = [r + 1 for r in range(nranks)]
    receive = [rank + 1] * nranks
    output = poisoned(sum(receive), dtype)
    communicator.alltoall_v(mine[: sum(send)], send, output, receive)
    starts = sum(send[:rank])
    np.testing.assert_array_equal(output, np.concatenate([one[starts : starts + rank + 1] for one in inputs]))
    communicator.barrier()
    communicator.destroy()
    communicator.destroy()
    assert not communicator.is_valid


@on_ranks(2, 3)
def test_messages(rank, nranks, communicator):
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    mine, got, total = np.array([rank, 10 + rank]), np.zeros(2, int), np.array([rank])
    large, received = np.full(1 << 20, rank), np.zeros(1 << 20, int)
    with fa.group():
        communicator.send(mine, right, tag=5)
        communicator.send(large, left)
        communicator.allreduce(total)
        communicator.recv(received, right)
        communicator.recv(got, left, tag=5)
        assert got[1] == 0
    assert got.tolist() == [left, 10 + left] and (received == right).all()
    assert total[0] == nranks * (nranks - 1) // 2
    with pytest.raises(KeyError), fa.group():
        communicator.send(mine, right)
        raise KeyError("nothing of the group is carried out")
    if rank == 0:
        communicator.send(mine, 1)
    elif rank == 1:
        communicator.recv(got, 0)
        assert got.tolist() == [0, 10]
    communicator.barrier()


@on_ranks(3)
def test_parts_and_memory(rank, nranks, communicator):
    part = communicator.split(rank % 2, -rank)
    group = [r for r in range(nranks) if r % 2 == rank % 2]
    assert (part.rank, part.nranks) == (group[::-1].index(rank), len(group))
    data = np.array([rank])
    part.allreduce(data)
    assert data[0] == sum(group)
    assert (communicator.split(None) is None) and communicator.survivors == list(range(nranks))
    smaller = communicator.shrink([0]) if rank else None
    if rank:
        assert (smaller.rank, smaller.nranks) == (rank - 1, nranks - 1)
        smaller.barrier()
    communicator.barrier()
    memory = communicator.alloc(4000)
    shared = np.asarray(memory).view(np.float32)
    assert shared.size == 1000 and (shared == 0).all()
    shared[:] = rank
    communicator.allreduce(shared)
    assert (shared == sum(range(nranks))).all()
    assert communicator.register_buffer(memory) is memory
    communicator.barrier()
