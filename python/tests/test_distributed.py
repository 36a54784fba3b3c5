"""The backend of torch.distributed between processes, used by c10d, DTensor and torch.compile."""

import datetime
import functools
import operator
import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from groups import full, group, in_group  # noqa: E402
from ranks import outcome, start  # noqa: E402

from fast_allreduce import errors  # noqa: E402


_BITS = {dist.ReduceOp.BAND: operator.and_, dist.ReduceOp.BOR: operator.or_, dist.ReduceOp.BXOR: operator.xor}


@in_group(1, 2, 3)
def test_collectives(rank, nranks):
    total = sum(range(nranks))
    assert dist.get_backend() == "fast_allreduce"
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64):
        for shape in ((), (1,), (3, 7), (100003,)):
            tensor = full(rank, *shape, dtype=dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, full(total, *shape, dtype=dtype))
    for op, expected in ((dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, nranks), (dist.ReduceOp.AVG, (nranks + 1) / 2)):
        tensor = full(rank + 1.0)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, full(expected)), op
    truth = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truth, dist.ReduceOp.MIN)
    assert truth.tolist() == [nranks == 1, True, False]
    for op in _BITS:
        bits = torch.tensor([1, 1 | 2 * rank], dtype=torch.int32)
        dist.all_reduce(bits, op)
        of_ranks = functools.reduce(_BITS[op], (1 | 2 * other for other in range(nranks)))
        assert bits.tolist() == [functools.reduce(_BITS[op], [1] * nranks), of_ranks], op
        truth = torch.tensor([rank == 0, True, False])
        dist.all_reduce(truth, op)
        assert truth.tolist()[1:] == [op != dist.ReduceOp.BXOR or nranks % 2 == 1, False], op
    halves = full(2.0)
    dist.all_reduce(halves, dist._make_nccl_premul_sum(0.5 * (rank + 1)))
    assert torch.equal(halves, full(nranks * (nranks + 1) / 2.0))
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, full(3.0, nranks), dist._make_nccl_premul_sum(0.25))
    assert scattered.item() == 0.75 * nranks
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        eighths = full(1.5).to(dtype)
        dist.all_reduce(eighths)
        assert eighths.dtype == dtype and torch.equal(eighths.float(), full(1.5 * nranks).to(dtype).float())
    number = torch.tensor([1 + 2j * rank])
    dist.all_reduce(number)
    assert number[0] == nranks + 2j * total

    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64):
        mine = full(rank % 2, 2, 3, dtype=dtype)
        outputs = [torch.empty_like(mine) for _ in range(nranks)]
        dist.all_gather(outputs, mine)
        assert all(torch.equal(outputs[r], full(r % 2, 2, 3, dtype=dtype)) for r in range(nranks))
        output = torch.empty(2 * nranks, 3, dtype=dtype)
        dist.all_gather_into_tensor(output, mine)
        assert torch.equal(output, torch.cat(outputs))
        tensor = mine.clone()
        dist.broadcast(tensor, nranks - 1)
        assert torch.equal(tensor, outputs[-1])

    shares = torch.arange(nranks * 4.0) + rank
    output = torch.empty(4)
    dist.reduce_scatter_tensor(output, shares)
    expected = (torch.arange(nranks * 4.0) * nranks + total)[4 * rank :][:4]
    assert torch.equal(output, expected)
    output.zero_()
    dist.reduce_scatter(output, list(shares.split(4)))
    assert torch.equal(output, expected)

    tensor = full(rank)
    dist.reduce(tensor, nranks - 1)
    assert rank != nranks - 1 or torch.equal(tensor, full(total))
    outputs = [torch.empty(5) for _ in range(nranks)] if rank == 0 else None
    dist.gather(full(rank), outputs)
    assert rank or all(torch.equal(outputs[r], full(r)) for r in range(nranks))
    output = torch.empty(5)
    dist.scatter(output, [full(10 * r) for r in range(nranks)] if rank == 0 else None)
    assert torch.equal(output, full(10 * rank))

    output = torch.empty(nranks, 2)
    dist.all_to_all_single(output, torch.stack([full(10 * rank + r, 2) for r in range(nranks)]))
    assert torch.equal(output, torch.stack([full(10 * r + rank, 2) for r in range(nranks)]))
    rows = [r + 1 for r in range(nranks)]
    output = torch.empty(nranks * (rank + 1), 3)
    dist.all_to_all_single(output, full(rank, sum(rows), 3), [rank + 1] * nranks, rows)
    assert torch.equal(output, torch.cat([full(r, rank + 1, 3) for r in range(nranks)]))
    outputs = [torch.empty(rank + 1) for _ in range(nranks)]
    dist.all_to_all(outputs, [full(rank, r + 1) for r in range(nranks)])
    assert all(torch.equal(outputs[r], full(r, rank + 1)) for r in range(nranks))
    dist.barrier()

    objects = [None] * nranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(nranks)]
    objects = ["from the root"] if rank == 0 else [None]
    dist.broadcast_object_list(objects)
    assert objects == ["from the root"]


@in_group(2, 3)
def test_asynchronous(rank, nranks):
    total = sum(range(nranks))
    tensors = [full(rank, 1000) for _ in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    later = full(rank)
    dist.all_reduce(later)
    assert all(torch.equal(tensor, full(total, 1000)) for tensor in tensors), "a later call comes after them"
    for work in reversed(works):
        assert work.wait() and work.get_future().done()
    assert all(torch.equal(tensor, full(total, 1000)) for tensor in tensors) and torch.equal(later, full(total))
    # Nobody waits, and the call runs anyway.
    tensor = full(rank)
    kept = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20
    while not torch.equal(tensor, full(total)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(tensor, full(total)) and kept is not None
    tensor = full(rank)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] + 1)
    assert torch.equal(future.wait(), full(total + 1))
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert torch.equal(tensors[3], full(total * nranks, 1000))


@in_group(2, 3)
def test_messages(rank, nranks):
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    for count in (1, 1 << 20):
        got = torch.empty(count)
        works = [dist.isend(full(rank, count), right), dist.irecv(got, left)]
        for work in works:
            work.wait()
        assert torch.equal(got, full(left, count))
        got.zero_()
        operations = [dist.P2POp(dist.irecv, got, right), dist.P2POp(dist.isend, full(rank, count), left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(got, full(right, count))
    if rank == 0:
        dist.send(torch.tensor([True, False]), 1, tag=4)
        dist.send_object_list(["an object"], 1)
    elif rank == 1:
        got = torch.zeros(2, dtype=torch.bool)
        dist.recv(got, 0, tag=4)
        assert got.tolist() == [True, False]
        objects = [None]
        dist.recv_object_list(objects, 0)
        assert objects == ["an object"]
    dist.barrier()


@in_group(4)
def test_groups(rank, nranks):
    evens = dist.new_group([r for r in range(nranks) if r % 2 == 0])
    if rank % 2 == 0:
        tensor = full(rank)
        dist.all_reduce(tensor, group=evens)
        assert torch.equal(tensor, full(sum(range(0, nranks, 2))))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, nranks // 2), mesh_dim_names=("outer", "inner"))
    tensor = full(rank)
    dist.all_reduce(tensor, group=mesh.get_group("outer"))
    assert torch.equal(tensor, full(rank % (nranks // 2) * 2 + nranks // 2))
    dist.barrier()


@in_group(2, backend="cpu:fast_allreduce,meta:gloo")
def test_with_another_backend(rank):
    tensor = full(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, full(1))


@in_group(2)
def test_functional_and_compiled(rank, nranks):
    import torch.distributed._functional_collectives as functions

    total, group = sum(range(nranks)), dist.group.WORLD
    assert torch.equal(functions.all_reduce(full(rank), "sum", group) + 0, full(total))
    gathered = functions.all_gather_tensor(full(rank, 2), 0, group)
    assert torch.equal(gathered + 0, torch.cat([full(r, 2) for r in range(nranks)]))
    scattered = functions.reduce_scatter_tensor(full(rank, 2 * nranks), "sum", 0, group)
    assert torch.equal(scattered + 0, full(total, 2))

    def model(tensor):
        return functions.all_reduce(torch.relu(tensor) * 2, "sum", group).cos()

    tensor = torch.arange(-4.0, 4.0) + rank
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(tensor), model(tensor))

    class Module(torch.nn.Linear):
        def forward(self, inputs):
            output = super().forward(inputs)
            dist.all_reduce(output)
            return output.relu()

    torch.manual_seed(0)
    module = Module(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="aot_eager")(tensor), module(tensor))


@in_group(2)
def test_dtensor_tensor_parallelism(nranks):
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    inputs = torch.randn(4, 16)
    expected = model(inputs)
    expected.square().sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    mesh = dist.device_mesh.init_device_mesh("cpu", (nranks,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.to_local().shape == (32 // nranks, 16)
    output = model(inputs)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), gradient)


@in_group(2)
def test_distributed_data_parallel(rank, nranks):
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(10, 10))
    model(full(rank + 1, 2, 10)).sum().backward()
    assert torch.allclose(model.module.weight.grad, full(2 * (nranks + 1) / 2, 10, 10))


@in_group(2)
def test_refusals(nranks):
    for call, said in (
        (lambda: dist.all_reduce(torch.zeros(4, 4).t()), "not contiguous"),
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.int16)), "int16"),
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.float32), dist.ReduceOp.BXOR), "of integers"),
        (lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1] * nranks, [9] * nranks), "splits"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    dist.barrier()


def lost(rank, nranks, _, store_path):
    with group(rank, nranks, store_path):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Exception, match="rank 1 is gone"):
            dist.all_reduce(full(rank))
        with pytest.raises(Exception, match="rank 1 is gone"):
            dist.all_reduce(full(rank), async_op=True).wait()


def test_a_rank_that_is_killed(store_path):
    ranks = start(lost, 2, store_path)
    first, second = [outcome(*one) for one in ranks]
    assert first[0] == "returned", first
    assert second == ("ended", -signal.SIGKILL)


@pytest.mark.parametrize("in_thread", [False, True])
@in_group(2)
def test_a_limit_of_one_wait(rank, in_thread):
    dist.barrier()
    if rank == 1:
        time.sleep(4)
        return
    work = dist.all_reduce(full(rank), async_op=True)
    if in_thread:
        # Wait until the group's thread is in the call.
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        deadline = time.monotonic() + 30
        while backend._devices.behind() != [1] and time.monotonic() < deadline:
            time.sleep(0.002)
    started = time.monotonic()
    with pytest.raises(errors.Timeout, match="waiting for rank 1") as caught:
        work.wait(datetime.timedelta(seconds=0.5))
    assert caught.value.missing == [1] and 0.4 < caught.value.waited < 3
    assert 0.4 < time.monotonic() - started < 3


@in_group(2, timeout=2)
def test_limit_of_the_group(rank):
    if rank == 1:
        time.sleep(5)
        return
    with pytest.raises(Exception, match="timed out"):
        dist.barrier()


def test_errors_of_ranks_and_machines_name_the_alternative():
    from fast_allreduce.process_group import check_machines

    for machines, told in [
        ([0] * 17, "at most 16 ranks.*gloo"),
        ([0] * 17 + [1] * 17, "at most 16 ranks.*gloo"),
        ([0, 0, 1], "equally many ranks on each machine, and these have 2, 1.*gloo"),
        ([0, 1, 0, 1], "must be consecutive, and the machines of the ranks are .0, 1, 0, 1."),
    ]:
        with pytest.raises(ValueError, match=told):
            check_machines(machines)
    check_machines([0] * 16 + [1] * 16)
