"""Calls with torch's tensors on a GPU, between processes that share it: the GPU runs them in time slices."""

import contextlib
import importlib
import inspect
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import test_collectives  # noqa: E402
import test_distributed  # noqa: E402
import test_operators  # noqa: E402
from ranks import on_ranks, outcome, run, start  # noqa: E402
from worlds import DEVICE, captured, values  # noqa: E402

import fast_allreduce as fa  # noqa: E402
from fast_allreduce.process_group import communicator_of  # noqa: E402

ops = torch.ops.fast_allreduce
COUNT = 5003


def joined(rank, nranks, unique_id, timeout=20):
    return fa.Communicator.init(nranks, rank, unique_id, DEVICE, timeout=timeout)


def filled(value):
    return torch.full((COUNT,), float(value), device=DEVICE)


def finish(communicator):
    communicator.synchronize(stream=torch.cuda.current_stream(DEVICE))


class OfArrays:
    """A communicator on a GPU that takes numpy's arrays: it copies them to the GPU, and back after the call.

    The copies begin `offset` elements behind an aligned address.
    """

    def __init__(self, communicator, offset):
        self.communicator, self.offset = communicator, offset

    def __getattr__(self, name):
        value = getattr(self.communicator, name)
        return self.method(value) if callable(value) else value

    def method(self, call):
        def called(*arguments, **named):
            copies = []

            def moved(argument):
                if not isinstance(argument, np.ndarray):
                    return argument
                host = torch.from_numpy(argument)
                room = torch.empty(host.numel() + self.offset, dtype=host.dtype, device=DEVICE)
                copies.append((host, room[self.offset :].copy_(host)))
                return copies[-1][1]

            result = call(*map(moved, arguments), **{name: moved(value) for name, value in named.items()})
            torch.cuda.synchronize()
            if self.communicator.is_valid:
                self.communicator.check()
            for host, copy in copies:
                host.copy_(copy)
            return result

        return called


def with_arrays(rank, nranks, unique_id, function, offset, arguments):
    with joined(rank, nranks, unique_id) as communicator:
        given = {"rank": rank, "nranks": nranks, "communicator": OfArrays(communicator, offset), **arguments}
        function(**{name: given[name] for name in inspect.signature(function).parameters})


# The cases that show most come first: time slices make calls slow, and `reductions` has 360 of them.
@pytest.mark.parametrize(
    ("test", "nranks", "offset"),
    [
        ("shares", 2, 0),
        ("fused", 2, 0),
        ("quantized", 2, 1),
        ("operations_of_some_types", 2, 0),
        ("shares", 3, 1),
        ("reductions", 2, 0),
    ],
)
def test_the_suite_of_the_cpu(test, nranks, offset):
    function = getattr(test_collectives, f"test_{test}").as_rank
    run(with_arrays, nranks, function, offset, {"seed": test_collectives.SEED, "dtype": np.float32})


@on_ranks(2)
def test_messages(rank, nranks, unique_id):
    communicator = joined(rank, nranks, unique_id)
    other, got = 1 - rank, filled(9)
    large, received = torch.full((3 << 20,), float(rank), device=DEVICE), torch.zeros(3 << 20, device=DEVICE)
    with fa.group():
        communicator.send(large, other)
        communicator.send(filled(rank), other, tag=5)
        communicator.recv(received, other)
        communicator.recv(got, other, tag=5)
    finish(communicator)
    assert (got == other).all() and (received == other).all()
    if rank:
        communicator.recv(got, 0)
    else:
        communicator.send(filled(5), 1)
    finish(communicator)
    assert rank == 0 or (got == 5).all()
    communicator.barrier()


@on_ranks(2)
def test_graphs_and_registered_tensors(rank, nranks, unique_id):
    communicator = joined(rank, nranks, unique_id)
    own = torch.as_tensor(communicator.alloc(4 * COUNT), device=DEVICE).view(torch.float32)
    tensor, x, y, z = (filled(0) for _ in range(4))
    registered = communicator.register_buffer(tensor)

    def calls():
        doubled = x * 2
        communicator.allreduce(doubled)
        own.copy_(doubled)
        tensor.copy_(doubled)
        communicator.allreduce(own, y)
        communicator.allreduce(tensor, z)

    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        calls()
    finish(communicator)
    communicator.barrier()
    replay = captured(stream, calls)
    communicator.barrier()
    with torch.cuda.stream(stream):
        for step in range(10):
            x.fill_(rank + step)
            replay()
            total = 2 * sum(r + step for r in range(nranks))
            communicator.synchronize(stream=stream)
            assert (own == total).all() and (y == nranks * total).all() and (z == nranks * total).all(), step
    communicator.barrier()
    assert registered.nbytes == 4 * COUNT
    del registered, own, replay
    communicator.barrier()


@on_ranks(2, limit=120)
def test_compiled_code(rank, nranks, unique_id, inductor):
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    communicator = joined(rank, nranks, unique_id, 90)
    name = communicator.name
    weight, scale = (test_operators.values(97 + len(shape), *shape).to(DEVICE) for shape in ((128, 128), (128,)))

    def layer(data):
        product = data @ weight
        ops.allreduce_(product, name)
        rows, residual = ops.allreduce_rms_norm(torch.relu(product), data, scale, name)
        return ops.allgather(rows + 1, nranks, name), residual

    with torch.no_grad():
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(layer, fullgraph=True, mode=mode)
            for step in range(5):
                data = test_operators.values(step, 4, 128).to(DEVICE)
                torch.compiler.cudagraph_mark_step_begin()
                found = [tensor.clone() for tensor in compiled(data)]
                for one, other in zip(found, layer(data)):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        finish(communicator)
        if torch.__version__ >= "2.13":
            inputs = test_operators.values(rank, 4, 128).to(DEVICE), data + 0, scale
            with torch.device(DEVICE):
                expected = test_operators.every_call(communicator, *inputs)
                found = torch.compile(test_operators.every_call, fullgraph=True)(communicator, *inputs)
            assert all(torch.equal(one, other) for one, other in zip(found, expected))
    print(f"rank {rank}: CUDA graphs were skipped {counters['inductor']['cudagraph_skips']} times", flush=True)
    finish(communicator)
    torch._dynamo.reset()
    communicator.barrier()


@on_ranks(2)
def test_a_communicator_of_a_process_group(rank, nranks, store_path):
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=nranks)
    with communicator_of(dist.group.WORLD, DEVICE, timeout=20) as communicator:
        data = filled(rank + 1)
        communicator.allreduce(data)
        finish(communicator)
        assert (data == nranks * (nranks + 1) / 2).all()
        communicator.barrier()
    dist.destroy_process_group()


def in_group(rank, nranks, _, store_path):
    with test_distributed.group(rank, nranks, store_path), torch.device(DEVICE):
        test_distributed.test_collectives.as_rank(rank, nranks)


def test_the_backend_of_torch_distributed(store_path):
    if torch.__version__ < "2.15":
        with pytest.raises(ImportError, match="needs torch 2.15"):
            importlib.import_module("fast_allreduce.distributed")
    else:
        run(in_group, 2, store_path)


def illegal():
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void f(float *at) { at[1ull << 44] = 1; }', "f")
    kernel((1, 1, 1), (1, 1, 1), (filled(0),))


def out_of_range():
    filled(0)[torch.tensor([2 * COUNT], device=DEVICE)]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ends(rank, nranks, unique_id, how):
    communicator = joined(rank, nranks, unique_id)
    data = filled(1)
    communicator.allreduce(data)
    finish(communicator)
    communicator.barrier()

    def call_until_an_error():
        for _ in range(100):
            communicator.allreduce(data)
            finish(communicator)

    started = time.monotonic()
    if rank == 1:
        how()
        with contextlib.suppress(fa.Error):
            call_until_an_error()
            os._exit(4)
        # The context is lost, so this process ends without its destructors; first the others are to notice.
        time.sleep(3)
        os._exit(3)
    with pytest.raises(fa.errors.PeerLost if how is killed else fa.errors.PeerFailed) as caught:
        call_until_an_error()
    took = time.monotonic() - started
    assert caught.value.rank == 1 and took < 10
    left = communicator.shrink()
    assert communicator.survivors == [0, 2] and left.nranks == 2
    data = filled(left.rank + 1)
    left.allreduce(data)
    finish(left)
    assert (data == 3).all()
    left.barrier()
    return f"{took:.2f} s: {caught.value}"


@pytest.mark.parametrize("how", [killed, illegal, out_of_range])
def test_a_rank_that_is_lost(how):
    first, lost, last = (outcome(*one) for one in start(ends, 3, how))
    print(first, lost, last)
    assert (first[0], last[0]) == ("returned", "returned"), (first, last)
    assert lost == ("ended", -signal.SIGKILL if how is killed else 3)


def of_allocator(rank, nranks, unique_id):
    communicator = joined(rank, nranks, unique_id)
    data, output = filled(rank + 1), filled(0)
    communicator.allreduce(data, output)
    finish(communicator)
    assert (output == 3).all()
    with pytest.raises(fa.Error, match="only memory from cuMemAlloc can be registered"):
        communicator.register_buffer(data)
    own = torch.as_tensor(communicator.alloc(4 * COUNT), device=DEVICE).view(torch.float32).copy_(data)
    communicator.allreduce(own)
    finish(communicator)
    assert (own == 3).all()
    stream = torch.cuda.Stream(DEVICE)
    replay = captured(stream, lambda: communicator.allreduce(data + 1, output))
    communicator.barrier()
    with torch.cuda.stream(stream):
        replay()
        communicator.synchronize(stream=stream)
    assert (output == 5).all()
    communicator.barrier()


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(setting, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    for result in [outcome(*one) for one in start(of_allocator, 2)]:
        assert result[0] == "returned", result[-1]


@on_ranks(2)
def test_values_of_a_large_call(rank, nranks, unique_id):
    """Pieces of a message, beside calls that are queued behind it."""
    with joined(rank, nranks, unique_id) as communicator:
        every = [values(r, 4_500_001, torch.bfloat16) for r in range(nranks)]
        data, after = every[rank].to(DEVICE), filled(rank)
        for _ in range(3):
            output = torch.empty_like(data)
            communicator.allreduce(data, output)
            communicator.allreduce(after, op="max")
        finish(communicator)
        assert torch.equal(output.cpu(), (every[0].float() + every[1].float()).bfloat16()) and (after == 1).all()
        communicator.barrier()
