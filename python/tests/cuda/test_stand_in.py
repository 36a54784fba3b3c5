"""Buffers, streams and registrations of GPUs from Python, on the stand-in driver. It tests this library's side of the
driver.

`scripts/test-python.sh` runs it, with a wheel whose kernels are the stand-in's. torch's tensors cannot be on
such a GPU: the process group's calls are made with objects that are like tensors.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks  # noqa: E402
from stand_in import Driver  # noqa: E402

import fast_allreduce as fa  # noqa: E402

COUNT = 3000


def communicator_of(rank, nranks, unique_id):
    return fa.Communicator.init(nranks, rank, unique_id, f"cuda:{rank}", timeout=30), Driver(rank)


@on_ranks(2)
def test_calls(rank, nranks, unique_id):
    communicator, driver = communicator_of(rank, nranks, unique_id)
    assert communicator.device == f"cuda:{rank}" and communicator.binding is None
    inputs = [np.arange(COUNT * nranks, dtype=np.float32) % 7 + r for r in range(nranks)]
    total, stream = np.sum(inputs, axis=0), driver.stream()
    mine = driver.array(inputs[rank])
    # A stream as an object of either kind, as a handle, and the default streams.
    for way in (stream, stream.cuda_stream, type("Other", (), {"__cuda_stream__": stream.__cuda_stream__})(), 0, 1, 2):
        output = driver.array(np.zeros_like(total))
        communicator.allreduce(mine, output, stream=way)
        driver.call("cuCtxSynchronize")
        np.testing.assert_array_equal(output.numpy(), total)
    gathered, part = (
        driver.array(np.zeros((nranks, COUNT * nranks), np.float32)),
        driver.array(np.zeros(COUNT, np.float32)),
    )
    communicator.allgather(mine, gathered, stream=stream)
    communicator.reduce_scatter(mine, part, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(gathered.numpy(), inputs)
    np.testing.assert_array_equal(part.numpy(), total[rank * COUNT :][:COUNT])
    got = driver.array(np.zeros_like(total))
    with fa.group():
        communicator.send(mine, (rank + 1) % nranks, stream=stream)
        communicator.recv(got, (rank - 1) % nranks, stream=stream)
    communicator.broadcast(part, root=1, stream=stream)
    communicator.barrier(stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(got.numpy(), inputs[(rank - 1) % nranks])
    np.testing.assert_array_equal(part.numpy(), total[COUNT : 2 * COUNT])
    raw = fa.RawBuffer(mine.address, COUNT, "f32", device=f"cuda:{rank}")
    communicator.allreduce(raw, stream=stream)
    communicator.check()
    stream.synchronize()
    np.testing.assert_array_equal(mine.numpy()[:COUNT], total[:COUNT])


@on_ranks(2)
def test_registered_buffers(rank, nranks, unique_id):
    communicator, driver = communicator_of(rank, nranks, unique_id)
    mine = driver.array(np.full(COUNT, rank + 1.0, np.float32))
    buffer = communicator.register_buffer(mine)
    assert (buffer.address, buffer.nbytes, buffer.device) == (mine.address, COUNT * 4, f"cuda:{rank}")
    with pytest.raises(AttributeError):
        buffer.__array_interface__  # noqa: B018
    output = driver.array(np.zeros(COUNT, np.float32))
    communicator.allreduce(mine, output, stream=0)
    driver.call("cuCtxSynchronize")
    assert (output.numpy() == nranks * (nranks + 1) / 2).all()
    del buffer
    communicator.barrier()
    shared = communicator.alloc(COUNT * 4)
    assert shared.__cuda_array_interface__["data"] == (shared.address, False) and shared.device == f"cuda:{rank}"
    communicator.allreduce(fa.RawBuffer(shared.address, COUNT, "f32", device=f"cuda:{rank}"), output, stream=0)
    driver.call("cuCtxSynchronize")
    assert (output.numpy() == 0).all()
    # One rank's buffer is host memory: an error on all ranks, and no registration on any.
    with pytest.raises((ValueError, fa.errors.PeerFailed)):
        host = np.zeros(COUNT, np.float32)
        address = host.ctypes.data if rank == 0 else mine.address
        communicator.register_buffer(fa.RawBuffer(address, COUNT, "f32", device=f"cuda:{rank}"))
    # Different lengths on the ranks.
    with pytest.raises(fa.errors.Disagreement):
        communicator.register_buffer(fa.RawBuffer(mine.address, COUNT - rank, "f32", device=f"cuda:{rank}"))


@on_ranks(1)
def test_several_communicators_on_a_gpu():
    made = []
    # Each takes half of what the earlier ones have left, on GPUs of any size.
    with pytest.raises(fa.errors.Unavailable, match="blocks"):
        while len(made) < 32:
            made.append(fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0"))
    assert len(made) > 1
    with fa.Communicator.init(
        1, 0, fa.get_unique_id(), "cuda:0", one_at_a_time=True, programmatic_launch=True
    ) as another:
        another.barrier()
    for communicator in made:
        communicator.destroy()
    made = [fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0", max_blocks=1) for _ in range(len(made) + 1)]
    for communicator in made:
        communicator.barrier()
    any_order = fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0", order="any", max_blocks=1)
    assert "NVLS" in any_order.nvls_refused
    with pytest.raises(ValueError, match="order"):
        fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0", order="other")


@on_ranks(2)
def test_other_devices_and_streams(rank, nranks, unique_id):
    communicator, driver = communicator_of(rank, nranks, unique_id)
    elsewhere = Driver(1 - rank)
    foreign, foreign_stream = elsewhere.array(np.zeros(8, np.float32)), elsewhere.stream()
    driver.call("cuCtxSetCurrent", driver.context)
    mine = driver.array(np.zeros(8, np.float32))
    misaligned = fa.RawBuffer(mine.address + 2, 1, "f32", device=f"cuda:{rank}")
    for call, kind, said in (
        (
            lambda: communicator.allreduce(np.zeros(8)),
            ValueError,
            f"on cpu, the communicator's buffers are on cuda:{rank}",
        ),
        (lambda: communicator.allreduce(fa.RawBuffer(64, 1, "f32")), ValueError, "on cpu"),
        (lambda: communicator.allreduce(fa.RawBuffer(64, 1, "f32", device="cuda:7")), ValueError, "on cuda:7"),
        (lambda: communicator.allreduce(foreign, stream=0), fa.errors.InvalidPointer, "device"),
        (lambda: communicator.allreduce(mine, foreign, stream=0), fa.errors.InvalidPointer, "device"),
        (lambda: communicator.allreduce(mine, stream=foreign_stream), fa.errors.InvalidStream, "stream"),
        (lambda: communicator.allreduce(mine, stream="stream"), TypeError, "a stream is"),
        (lambda: communicator.allreduce(mine, stream=True), TypeError, "a stream is"),
        (lambda: communicator.allreduce(misaligned, stream=0), ValueError, "aligned"),
    ):
        with pytest.raises(kind, match=said):
            call()
    communicator.barrier()
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as host, pytest.raises(ValueError, match="on cuda:"):
        host.allreduce(mine)


@on_ranks(2)
def test_process_group(rank, nranks, store_path):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from fast_allreduce.distributed import devices, queue

    driver = Driver(rank)
    stream = driver.stream()
    stream.device = torch.device("cuda", rank)

    class Tensor:
        """The attributes of a tensor that the backend reads."""

        is_cpu, dtype, device = False, torch.float32, torch.device("cuda", rank)

        def __init__(self, values):
            self.array = driver.array(np.asarray(values, np.float32))

        __cuda_array_interface__ = property(lambda self: self.array.__cuda_array_interface__)

        def numpy(self):
            stream.synchronize()
            return self.array.numpy()

    from fast_allreduce.distributed import backend as calls

    with pytest.MonkeyPatch.context() as patch:
        for module in (devices, queue, calls):
            patch.setattr(module, "current_stream", lambda device: stream if device.type == "cuda" else None)
        dist.init_process_group("fast_allreduce", init_method=f"file://{store_path}", rank=rank, world_size=nranks)
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        for asynchronous in (False, True):
            options = dist.AllreduceOptions()
            options.asyncOp = asynchronous
            tensor = Tensor([rank + 1] * COUNT)
            work = backend.allreduce([tensor], options)
            assert work.wait() and work.is_completed() and work.is_success() and stream.waits > 0
            assert (tensor.numpy() == nranks * (nranks + 1) / 2).all()
        # Calls with tensors on the CPU keep their order among them.
        host = torch.full((3,), rank + 1.0)
        dist.all_reduce(host)
        assert torch.equal(host, torch.full((3,), nranks * (nranks + 1) / 2))
        sent, got = Tensor([rank] * 8), Tensor([9] * 8)
        works = [backend.send([sent], 1 - rank, 3), backend.recv([got], 1 - rank, 3)]
        assert all(work.wait() for work in works) and (got.numpy() == 1 - rank).all()
        backend.barrier(dist.BarrierOptions()).wait()
        tensor.device = torch.device("cuda", 1 - rank)
        with pytest.raises(ValueError, match="one GPU for each rank"):
            backend.allreduce([tensor], dist.AllreduceOptions())
        tensor.device = torch.device("meta")
        with pytest.raises(ValueError, match="cpu and cuda are supported"):
            backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        dist.destroy_process_group()
