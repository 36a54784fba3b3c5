"""Calls with torch's tensors, streams and graphs on a GPU. Ranks are threads that share the GPU."""

import functools
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import test_operators  # noqa: E402
from worlds import DEVICE, Silent, World, captured, placed, same, total, values  # noqa: E402

import fast_allreduce as fa  # noqa: E402
from fast_allreduce import operators  # noqa: E402
from fast_allreduce.tensors import REDUCED  # noqa: E402

ops = torch.ops.fast_allreduce
COUNT = 5003


@pytest.fixture(params=[1, 2, 4])
def world(request):
    with World(request.param) as made:
        yield made


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def numbers(rank, steps):
    """Returns small integers of a rank for each step, on the GPU."""
    return placed((torch.arange(steps * COUNT) % 13 + rank).to(torch.float32).view(steps, COUNT))


def sums(world, steps):
    return sum(numbers(rank, steps) for rank in range(world.nranks))


@pytest.mark.parametrize("offset", [0, 1])
def test_allreduce_has_the_bits_of_the_sum_in_rank_order(world, offset):
    cases = [(dtype, count) for dtype in sorted(REDUCED, key=str) for count in (1, 17, COUNT, 100_003)]
    # More than one piece.
    cases += [(torch.bfloat16, 4_500_001), (torch.float32, 2_200_001)]

    def prepare(rank):
        made = [placed(values(rank, count, dtype), offset) for dtype, count in cases]
        return made, [placed(torch.full_like(one, 7, device="cpu"), offset) for one in made]

    def body(communicator, inputs, outputs):
        for x, y in zip(inputs, outputs):
            communicator.allreduce(x, y)
            communicator.allreduce(x)
        return inputs, outputs

    found = world.run(prepare, body)
    for index, (dtype, count) in enumerate(cases):
        expected = total([values(rank, count, dtype) for rank in range(world.nranks)])
        for rank, (inputs, outputs) in enumerate(found):
            assert same(outputs[index], expected), (rank, dtype, count)
            assert same(inputs[index], expected), (rank, dtype, count, "in place")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_other_collectives(world, dtype, offset):
    nranks, count, root = world.nranks, 1003, world.nranks - 1
    counts = [3 * rank + 1 for rank in range(nranks)]
    every = [values(rank, count * nranks, dtype) for rank in range(nranks)]

    def prepare(rank):
        sizes = [count * nranks**2, count, sum(counts), counts[rank], count * nranks, count * nranks, count * nranks]
        sizes += [count * nranks**2, count, count * nranks, nranks * (rank + 1), count * nranks]
        return (
            rank,
            placed(every[rank], offset),
            [placed(torch.full((size,), 7, dtype=dtype), offset) for size in sizes],
        )

    def body(communicator, rank, x, outputs):
        gathered, share, parts, part, sent, copy, reduced, collected, scattered, turned, taken, got = outputs
        communicator.allgather(x, gathered)
        communicator.reduce_scatter(x, share)
        communicator.allgather_v(x[: counts[rank]], parts, counts)
        communicator.reduce_scatter_v(x[: sum(counts)], part, counts)
        copy.copy_(x)
        communicator.broadcast(copy, root=root)
        communicator.broadcast(x if rank == root else None, sent, root)
        communicator.reduce(x, reduced if rank == root else None, "sum", root)
        communicator.gather(x, collected if rank == root else None, root)
        communicator.scatter(x if rank == root else None, scattered, root)
        communicator.alltoall(x, turned)
        communicator.alltoall_v(x[: sum(range(nranks + 1))], list(range(1, nranks + 1)), taken, [rank + 1] * nranks)
        with fa.group():
            communicator.send(x, (rank + 1) % nranks, tag=5)
            communicator.recv(got, (rank - 1) % nranks, tag=5)
        communicator.barrier(stream=torch.cuda.current_stream(DEVICE))
        return outputs

    whole, joined = total(every), torch.cat(every)
    for rank, outputs in enumerate(world.run(prepare, body)):
        begin, at = sum(counts[:rank]), sum(range(1, rank + 1))
        expected = {
            "allgather": joined,
            "reduce_scatter": whole[rank * count :][:count],
            "allgather_v": torch.cat([every[r][: counts[r]] for r in range(nranks)]),
            "reduce_scatter_v": whole[begin : begin + counts[rank]],
            "broadcast": every[root],
            "broadcast in place": every[root],
            "reduce": whole if rank == root else torch.full_like(whole, 7),
            "gather": joined if rank == root else torch.full_like(joined, 7),
            "scatter": every[root][rank * count :][:count],
            "alltoall": torch.cat([one[rank * count :][:count] for one in every]),
            "alltoall_v": torch.cat([one[at : at + rank + 1] for one in every]),
            "messages": every[rank - 1],
        }
        for output, (name, wanted) in zip(outputs, expected.items()):
            assert same(output, wanted), (rank, name)


def test_tensors_that_are_refused(world):
    communicator = world.communicators[0]
    for tensor, said in (
        (zeros(4, 4).t(), "not contiguous"),
        (zeros(4, 4)[:, 1], "not contiguous"),
        (zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3), "on cpu, the communicator's buffers are on cuda:0"),
        (torch.zeros(3).pin_memory(), "on cpu, the communicator's buffers are on cuda:0"),
    ):
        with pytest.raises(ValueError, match=said):
            communicator.allreduce(tensor)
    with pytest.raises(ValueError, match="on cpu"):
        communicator.allreduce(zeros(3), torch.zeros(3))


def test_calls_between_kernels_of_torch(world):
    steps = 30

    def prepare(rank):
        return numbers(rank, steps), zeros(COUNT), zeros(COUNT), zeros(steps, COUNT)

    def body(communicator, inputs, x, y, outputs):
        for step in range(steps):
            torch.cuda._sleep(100_000)
            torch.mul(inputs[step], 2, out=x)
            communicator.allreduce(x, y)
            torch.add(y, 1, out=outputs[step])
        return outputs

    for outputs in world.run(prepare, body):
        assert torch.equal(outputs, 2 * sums(world, steps) + 1)


def test_calls_on_several_streams(world):
    """A call follows the current stream, and `stream=` takes precedence."""
    steps = 30

    def prepare(rank):
        return world.sides[rank], numbers(rank, steps), zeros(steps, COUNT), zeros(steps, COUNT), zeros(steps, COUNT)

    def body(communicator, side, inputs, x, y, outputs):
        main = torch.cuda.current_stream(DEVICE)
        for step in range(steps):
            torch.cuda._sleep(50_000)
            torch.mul(inputs[step], 2, out=x[step])
            if step % 3:
                side.wait_stream(main)
            if step % 3 == 1:
                with torch.cuda.stream(side):
                    communicator.allreduce(x[step], y[step])
            else:
                communicator.allreduce(x[step], y[step], stream=side if step % 3 else None)
            main.wait_stream(side)
            torch.add(y[step], 1, out=outputs[step])
        return outputs

    for outputs in world.run(prepare, body):
        assert torch.equal(outputs, 2 * sums(world, steps) + 1)


def test_memory_that_the_allocator_reuses(world):
    steps = 40

    def prepare(rank):
        return world.sides[rank], numbers(rank, steps), zeros(steps, COUNT), zeros(steps, COUNT)

    def body(communicator, side, inputs, outputs, others):
        main = torch.cuda.current_stream(DEVICE)
        for step in range(steps):
            data = inputs[step] + 1
            communicator.allreduce(data)
            others[step].copy_(data)
            data = inputs[step] + 2
            side.wait_stream(main)
            communicator.allreduce(data, outputs[step], stream=side)
            data.record_stream(side)
            del data
            torch.full((COUNT,), -1.0, device=DEVICE)
        main.wait_stream(side)
        return outputs, others

    for outputs, others in world.run(prepare, body):
        assert torch.equal(others, sums(world, steps) + world.nranks)
        assert torch.equal(outputs, sums(world, steps) + 2 * world.nranks)


def graphs_of(world, function):
    """Returns a function for each rank that launches its graph of `function(rank)`."""
    made = [captured(world.streams[rank], functools.partial(function, rank)) for rank in range(world.nranks)]
    world.each(lambda rank: world.communicators[rank].barrier())
    return made


def test_graphs(world):
    steps, nranks = 50, world.nranks
    name = [communicator.name for communicator in world.communicators]
    kept = world.each(lambda rank: (zeros(COUNT), zeros(COUNT), zeros(COUNT)))

    def calls(communicator, rank):
        x, y, z = kept[rank]
        # In the graph's own pool.
        doubled = x * 2
        communicator.allreduce(doubled)
        communicator.allreduce(doubled, y)
        if not isinstance(communicator, Silent):
            y = ops.allreduce(y, name[rank])
        torch.add(y, 1, out=z)

    def captures(rank):
        calls(world.communicators[rank], rank)

    world.run(lambda rank: (rank,), calls)
    replays = [graphs_of(world, captures) for _ in range(2)]

    def prepare(rank):
        return rank, numbers(rank, steps), zeros(steps, COUNT), zeros(COUNT)

    def body(communicator, rank, inputs, outputs, between):
        for step in range(steps):
            kept[rank][0].copy_(inputs[step])
            if not isinstance(communicator, Silent):
                replays[step % 2][rank]()
            outputs[step].copy_(kept[rank][2])
            if step % 10 == 3:
                communicator.allreduce(inputs[step], between)
        return outputs, between

    for outputs, between in world.run(prepare, body):
        assert torch.equal(outputs, 2 * nranks**2 * sums(world, steps) + 1)
        assert torch.equal(between, sums(world, steps)[43])
    world.each(lambda rank: world.communicators[rank].barrier())


def test_registered_memory(world):
    """Calls from memory of `alloc` as torch's tensors, and from registered tensors, also in graphs."""

    def make(rank):
        communicator = world.communicators[rank]
        buffer = communicator.alloc(4 * COUNT)
        own = torch.as_tensor(buffer, device=DEVICE).view(torch.float32)
        assert own.data_ptr() == buffer.address and own.shape == (COUNT,) and not own.any()
        # One of several blocks of an allocation.
        tensor = [zeros(COUNT) for _ in range(3)][rank % 3]
        return own, tensor, communicator.register_buffer(tensor), zeros(COUNT), zeros(COUNT)

    made = world.each(make)

    def captures(rank):
        own, tensor, _, first, second = made[rank]
        world.communicators[rank].allreduce(own, first)
        world.communicators[rank].allreduce(tensor, second)

    replays = graphs_of(world, captures)

    def body(communicator, rank, inputs, outputs):
        own, tensor, _, first, second = made[rank]
        for step in range(8):
            own.copy_(inputs[step])
            torch.mul(inputs[step], 3, out=tensor)
            if step % 2 and not isinstance(communicator, Silent):
                replays[rank]()
            else:
                communicator.allreduce(own, first)
                communicator.allreduce(tensor, second)
            torch.add(first, second, out=outputs[step])
        communicator.allreduce(own)
        return outputs, own

    found = world.run(lambda rank: (rank, numbers(rank, 8), zeros(8, COUNT)), body)
    for outputs, own in found:
        assert torch.equal(outputs, 4 * sums(world, 8)) and torch.equal(own, sums(world, 8)[7])
    del replays, found, own
    made.clear()
    gc.collect()
    world.each(lambda rank: world.communicators[rank].barrier())


def test_every_method_as_on_the_cpu(world):
    """Fused and quantised calls too: bf16 and f32, int8, float8 and nvfp4."""
    inputs = [test_operators.values(seed, 4, 128) for seed in range(world.nranks)]
    shared = [test_operators.values(seed, *shape) for seed, shape in ((99, (4, 128)), (98, (128,)))]

    def every(world, device):
        def prepare(rank):
            return [tensor.to(device) for tensor in (inputs[rank], *shared)]

        def body(communicator, *tensors):
            with torch.device(device):
                return test_operators.every_call(communicator, *tensors)

        return world.run(prepare, body)

    with World(world.nranks, device="cpu") as host:
        expected = every(host, "cpu")
    for rank, (found, wanted) in enumerate(zip(every(world, DEVICE), expected)):
        assert len(found) == len(wanted)
        for index, (one, other) in enumerate(zip(found, wanted)):
            one = one.cpu()
            if one.dtype.is_floating_point:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda text: f"{rank} {index}: {text}")
            else:
                # The norm's sums are in another order: a few numbers are rounded to the next one.
                assert (one != other).float().mean() < 0.02, (rank, index)


def test_operators_without_compilation(world):
    """Operators take views that are not contiguous, and have direct functions for compiled code."""
    names = [communicator.name for communicator in world.communicators]

    def prepare(rank):
        return names[rank], numbers(rank, 4).view(4, -1)

    def body(communicator, name, data):
        if isinstance(communicator, Silent):
            return data.t().contiguous(), torch.empty_like(data)
        return ops.allreduce(data.t(), name), ops.direct.allreduce(data, name), ops.allgather(data, world.nranks, name)

    whole = torch.cat([numbers(rank, 4) for rank in range(world.nranks)])
    for transposed, direct, gathered in world.run(prepare, body):
        assert torch.equal(transposed, sums(world, 4).t()) and transposed.is_contiguous()
        assert torch.equal(direct, sums(world, 4)) and torch.equal(gathered, whole)


@pytest.fixture
def alone():
    with fa.Communicator.init(1, 0, fa.get_unique_id(), DEVICE, timeout=10, max_blocks=2) as communicator:
        yield communicator


def test_opcheck(alone):
    def on_gpu(argument):
        return argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument

    of_one = test_operators.examples(alone.name)
    for name in operators.SCHEMAS:
        arguments = tuple(map(on_gpu, of_one.get(name) or of_one[name.rstrip("_")]))
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=checks)


def test_default_streams_and_other_libraries(alone):
    x, y = numbers(1, 2)[1], zeros(COUNT)
    for stream in (None, 0, torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE)):
        y.zero_()
        torch.cuda.synchronize()
        alone.allreduce(x, y, stream=stream)
        alone.synchronize(stream=torch.cuda.current_stream(DEVICE) if stream is None else stream)
        assert torch.equal(x, y)

    class Dlpack:
        def __init__(self, of):
            self.of = of

        def __dlpack__(self, *, stream):
            return self.of.__dlpack__(stream=stream)

    for form in (Dlpack, lambda tensor: fa.RawBuffer(tensor.data_ptr(), COUNT, torch.float32, device=DEVICE)):
        y.zero_()
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        alone.allreduce(form(x), form(y), stream=side)
        alone.synchronize(stream=side)
        assert torch.equal(x, y)


def test_cupy(alone):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.arange(COUNT, dtype=cupy.float32)
        y = cupy.zeros_like(x)
        alone.allreduce(x, y)
        assert (x == y).all()
        tensor = zeros(COUNT)
        alone.allreduce(x, tensor)
        torch.cuda.synchronize()
        assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.float32, device=DEVICE))


def test_nothing_is_leaked():
    def once():
        with World(2) as world:
            kept = world.each(lambda rank: (world.communicators[rank].alloc(32 << 20), zeros(COUNT), zeros(1 << 20)))
            held = world.each(lambda rank: world.communicators[rank].register_buffer(kept[rank][2]))
            replays = graphs_of(world, lambda rank: world.communicators[rank].allreduce(kept[rank][1]))
            world.each(lambda rank: (replays[rank](), world.communicators[rank].allreduce(kept[rank][2])))
            torch.cuda.synchronize()
            del kept, held, replays
        del world
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(DEVICE)[0]

    once()
    free = [once() for _ in range(4)]
    assert free[0] - free[-1] < 4 << 20, free


def test_a_missing_rank():
    with World(2, timeout=1) as world:
        x, (communicator, other) = zeros(COUNT), world.communicators
        communicator.allreduce(x)
        with pytest.raises(fa.errors.Timeout) as late:
            communicator.synchronize(stream=torch.cuda.current_stream(DEVICE))
        assert late.value.missing == [1]
        # Rank 0 may have sent its part, so that the first call of rank 1 succeeds.
        with pytest.raises(fa.errors.PeerFailed) as failed:
            for _ in range(2):
                other.allreduce(x)
                other.synchronize(stream=torch.cuda.current_stream(DEVICE))
        assert failed.value.rank == 0


def test_abort():
    with World(2, timeout=20) as world:
        x, communicator = zeros(COUNT), world.communicators[0]
        communicator.allreduce(x)
        threading.Timer(0.5, communicator.abort).start()
        with pytest.raises(fa.errors.Aborted):
            communicator.synchronize(stream=torch.cuda.current_stream(DEVICE))
