"""The cases of torch's tests of gloo, with this backend: wrong arguments, no elements, many calls, waits, timeouts.

Docstrings name the corresponding tests of test_c10d_gloo.py. Results of each call are in test_distributed.py.
"""

import datetime
import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from groups import full, in_group  # noqa: E402
from torch._C._distributed_c10d import AllgatherOptions  # noqa: E402

import fast_allreduce as fa  # noqa: E402


def raises():
    raise ValueError("this rank makes no call that could be refused")


@in_group(2, 3)
def test_checks(rank, nranks):
    """test_allreduce_checks, test_broadcast_checks, test_gather_checks, ...: refused on this rank alone."""
    f32, f64, wide = full(rank), full(rank, dtype=torch.float64), full(rank, 9)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.AllreduceOptions()
    options.asyncOp = False
    for call, kind in (
        (lambda: backend.allreduce([], options), ValueError),
        (lambda: backend.allreduce([f32, f32], options), ValueError),
        (lambda: backend.allreduce([torch.eye(3).to_sparse()], options), ValueError),
        (lambda: dist.broadcast(f32, nranks), ValueError),
        (lambda: dist.broadcast(f32, -1), ValueError),
        (lambda: dist.reduce(f32, nranks), ValueError),
        (lambda: dist.all_gather([f32], f32), ValueError),
        (lambda: dist.all_gather([f64] * nranks, f32), (ValueError, RuntimeError)),
        (lambda: dist.all_gather([wide] * nranks, f32), ValueError),
        (lambda: dist.all_gather_into_tensor(wide, f32), ValueError),
        (
            lambda: dist.all_gather_into_tensor(full(0, 5 * nranks, dtype=torch.float64), f32),
            (ValueError, RuntimeError),
        ),
        (lambda: dist.reduce_scatter_tensor(f32, wide), ValueError),
        (lambda: dist.reduce_scatter(f32, [f32] * (nranks + 1)), ValueError),
        (lambda: dist.scatter(f32, [wide] * nranks if rank == 0 else None) if rank == 0 else raises(), ValueError),
        (lambda: dist.gather(f32, [wide] * nranks) if rank == 0 else raises(), ValueError),
        (lambda: dist.gather(f32, [f32] * (nranks + 1)) if rank == 0 else raises(), ValueError),
        (lambda: dist.all_to_all([f32] * (nranks - 1), [f32] * nranks), ValueError),
        (lambda: dist.all_to_all_single(wide, wide, [9] * nranks, [9] * nranks), ValueError),
        (lambda: dist.send(f32, nranks), ValueError),
        (lambda: dist.all_reduce(full(rank, 4, 4).t()), ValueError),
        (lambda: dist.all_reduce([f32]), TypeError),
        (lambda: dist.all_reduce(f32, "sum"), TypeError),
    ):
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"not refused: line {call.__code__.co_firstlineno}")
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).bool().to_sparse()):
        for call in (lambda: dist.all_reduce(sparse), lambda: backend.allgather([[f32] * nranks], [sparse], options)):
            with pytest.raises(ValueError, match="is sparse .*torch.sparse_coo"):
                call()
    dist.barrier()


@in_group(2, 3)
def test_no_elements(rank, nranks):
    """test_empty_tensors, test_gather_noncontiguous_input and the like, of no elements."""
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather([torch.empty(0) for _ in range(nranks)], nothing)
    dist.all_gather_into_tensor(torch.empty(0), nothing)
    dist.reduce_scatter_tensor(torch.empty(0), nothing)
    dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3))
    dist.all_reduce(torch.empty(2, 0, 3), async_op=True).wait()
    if rank == 0:
        dist.send(nothing, 1)
    elif rank == 1:
        dist.recv(nothing, 0)
    # One rank has no elements.
    counts = [0 if r == 0 else r for r in range(nranks)]
    outputs = [torch.empty(count) for count in counts]
    dist.all_gather(outputs, full(rank, counts[rank]) if counts[rank] else torch.empty(0))
    assert all(
        torch.equal(output, torch.full((count,), float(r))) for r, (output, count) in enumerate(zip(outputs, counts))
    )
    dist.barrier()


@in_group(2, 3)
def test_stress(rank, nranks):
    """test_allreduce_stress, test_broadcast_stress, test_allgather_stress, ...: a thousand calls before any is waited
    for.
    """
    total = sum(range(nranks))
    tensors = [full(rank + index) for index in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert all(torch.equal(tensor, full(total + nranks * index)) for index, tensor in enumerate(tensors))
    inputs = [full(rank + index) for index in range(200)]
    outputs = [[torch.empty(5) for _ in range(nranks)] for _ in inputs]
    works = [dist.all_gather(output, one, async_op=True) for output, one in zip(outputs, inputs)]
    works += [dist.broadcast(one, index % nranks, async_op=True) for index, one in enumerate(inputs)]
    # In another order than the calls.
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(outputs[index][r], full(r + index)) for index in range(200) for r in range(nranks))
    assert all(torch.equal(one, full(index % nranks + index)) for index, one in enumerate(inputs))
    # Interleaved collectives and messages. All are made before the first is waited for.
    right, left, kept = (rank + 1) % nranks, (rank - 1) % nranks, []
    for index in range(300):
        got, sum_ = torch.empty(3), full(rank, 3)
        kept.append((dist.isend(full(rank * 1000 + index, 3), right), dist.irecv(got, left), got))
        if index % 7 == 0:
            kept.append((dist.all_reduce(sum_, async_op=True), None, sum_))
    for first, second, tensor in kept:
        first.wait()
        if second is None:
            assert torch.equal(tensor, full(total, 3))
        else:
            second.wait()
    got = [tensor for _, second, tensor in kept if second is not None]
    assert all(torch.equal(tensor, full(left * 1000 + index, 3)) for index, tensor in enumerate(got))


@in_group(2, 3)
def test_waits(rank, nranks):
    """test_barrier_implies_wait, test_allreduce_basics_using_then, test_reduce_scatter_tensor_coalesced."""
    tensors = [full(rank + index) for index in range(50)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    total = sum(range(nranks))
    assert all(torch.equal(tensor, full(total + nranks * index)) for index, tensor in enumerate(tensors))
    done = []
    future = dist.all_reduce(full(rank), async_op=True).get_future()
    chained = future.then(lambda one: done.append(one.value()[0].sum().item()) or 7)
    assert chained.wait() == 7 and done == [5.0 * total]
    # Nobody waits: the group's thread runs it.
    tensor, before = full(rank), time.monotonic()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    while not future.done() and time.monotonic() - before < 10:
        time.sleep(0.002)
    assert torch.equal(tensor, full(total))
    with dist._coalescing_manager(async_ops=True) as manager:
        outputs = [torch.empty(2 * nranks) for _ in range(3)]
        for index, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, full(rank + index, 2))
    manager.wait()
    assert all(
        torch.equal(output, torch.cat([full(r + index, 2) for r in range(nranks)]))
        for index, output in enumerate(outputs)
    )
    with dist._coalescing_manager():
        outputs = [torch.empty(2) for _ in range(3)]
        for index, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, full(rank + index, 2 * nranks))
    assert all(torch.equal(output, full(total + nranks * index, 2)) for index, output in enumerate(outputs))


@in_group(3)
def test_groups_side_by_side(rank, nranks):
    """test_multi_device_constructor, round robin: several groups, whose calls do not mix."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=30)) for _ in range(4)]
    tensors = [full(rank + index) for index in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups)]
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(tensor, full(sum(range(nranks)) + nranks * index)) for index, tensor in enumerate(tensors))
    for group in groups:
        dist.destroy_process_group(group)
    dist.all_reduce(tensors[0])


@in_group(2, timeout=1)
def test_timeouts(rank):
    """test_allreduce_timeout, test_send_recv_timeout: a missing rank is named, and the group has failed."""
    if rank == 1:
        time.sleep(3)
        return
    for call in (
        lambda: dist.all_reduce(full(rank)),
        lambda: dist.recv(full(rank), 1),
        lambda: dist.broadcast(full(rank), 1),
    ):
        started = time.monotonic()
        with pytest.raises(fa.Error, match="rank 1|ranks \\[1\\]|timed out"):
            call()
        assert time.monotonic() - started < 3


_LIMITED = (
    "allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "barrier",
    "set_timeout", "message", "backend", "queued", "later",
)  # fmt: skip


@pytest.mark.parametrize("how", _LIMITED)
@in_group(2)
def test_limits_of_calls(rank, nranks, how):
    """A limit set after the start, or with a call, holds. The missing rank is named."""
    dist.barrier()
    limit, backend = datetime.timedelta(seconds=1), dist.group.WORLD._get_backend(torch.device("cpu"))

    def options(kind, **fields):
        made = kind()
        made.timeout = limit
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    group, tensor = dist.group.WORLD, full(1.0)
    calls = {
        "allreduce": lambda: group.allreduce([tensor], options(dist.AllreduceOptions)),
        "broadcast": lambda: group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)),
        "reduce": lambda: group.reduce([tensor], options(dist.ReduceOptions)),
        "allgather": lambda: group.allgather([[tensor] * nranks], [tensor], options(AllgatherOptions)),
        "gather": lambda: group.gather([[full(0.0)] * nranks], [tensor], options(dist.GatherOptions)),
        "scatter": lambda: group.scatter([tensor], [], options(dist.ScatterOptions, rootRank=1)),
        "reduce_scatter": lambda: group.reduce_scatter(
            [tensor], [[tensor] * nranks], options(dist.ReduceScatterOptions)
        ),
        "alltoall": lambda: group.alltoall([full(0.0)] * nranks, [tensor] * nranks, options(dist.AllToAllOptions)),
        "barrier": lambda: dist.barrier(timeout=limit),
        "set_timeout": lambda: dist.set_timeout(limit) or group.allreduce([tensor]),
        "message": lambda: dist.set_timeout(limit) or dist.recv(tensor, 1),
        "backend": lambda: backend._set_default_timeout(limit) or group.allreduce([tensor]),
        "queued": lambda: group.allreduce([tensor], options(dist.AllreduceOptions, asyncOp=True)),
    }
    if how == "later":
        # A call's limit does not apply to the next call.
        calls["allreduce"]().wait() if rank == 0 else group.allreduce([tensor]).wait()
        if rank == 1:
            time.sleep(2)
        group.allreduce([tensor]).wait()
        return
    if rank == 1:
        time.sleep(4)
        return
    with pytest.raises(fa.errors.Timeout) as caught:
        work = calls[how]()
        work is None or work.wait()
    # The time that the error states is compared, because the machine may be busy.
    assert caught.value.missing == [1] and 0.9 < caught.value.waited < 3


@in_group(4)
def test_errors_of_subgroups(rank):
    """Errors of a group also name global ranks."""
    group = dist.new_group([1, 3])
    dist.barrier()
    if rank == 1:
        dist.all_reduce(full(1.0), group=group)
        dist.set_timeout(datetime.timedelta(seconds=0.5), group)
        named = r"^rank 1 of the group \(global rank 3\): all_reduce .*waiting for rank 1"
        with pytest.raises(fa.errors.Timeout, match=named) as caught:
            dist.all_reduce(full(1.0), group=group)
        assert caught.value.missing == [1] and caught.value.global_ranks == [3]
        # Each later call raises it again, unchanged.
        with pytest.raises(fa.errors.Timeout) as again:
            dist.all_reduce(full(1.0), group=group, async_op=True).wait()
        assert str(again.value) == str(caught.value)
    elif rank == 3:
        dist.all_reduce(full(1.0), group=group)
    dist.barrier()
    if rank == 3:
        # The data that rank 1 sent before its timeout may complete the first call.
        with pytest.raises(fa.Error, match=r"^rank 0 of the group \(global rank 1\): ") as caught:
            for _ in range(2):
                dist.all_reduce(full(1.0), group=group)
        assert caught.value.global_ranks == [1]
    dist.barrier()


@in_group(2)
def test_a_rank_that_does_not_come_at_all(rank, store_path):
    """A rank that does not join is named within the group's limit."""
    if rank == 1:
        return
    limit = datetime.timedelta(seconds=1)
    options = {"init_method": f"file://{store_path}2", "rank": 0, "world_size": 2, "timeout": limit}
    dist.destroy_process_group()
    started = time.monotonic()
    with pytest.raises(fa.errors.Timeout, match=r"ranks \[1\] have not come within 1\.0 s") as caught:
        dist.init_process_group("fast_allreduce", **options)
    assert caught.value.missing == [1] and time.monotonic() - started < 10
    dist.init_process_group("fast_allreduce", store=dist.HashStore(), rank=0, world_size=1)
