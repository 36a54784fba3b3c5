"""Callbacks of the process group's futures may wait for anything: other calls, other futures, other threads."""

import datetime
import threading
import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from groups import full, in_group  # noqa: E402

from fast_allreduce import errors  # noqa: E402
from fast_allreduce.distributed import settling  # noqa: E402
from fast_allreduce.distributed.queue import Message  # noqa: E402


def future(tensor, group=None):
    return dist.all_reduce(tensor, group=group, async_op=True).get_future()


def callback_of(value):
    return future(value + 1).wait()[0]


@in_group(1, 2, 3)
def test_callbacks_that_wait_for_collectives(nranks):
    """Communication hooks of DDP do this, for example PowerSGD's."""

    def by_future(done):
        return future(done.value()[0] + 1).wait()[0]

    def by_work(done):
        tensor = done.value()[0] + 1
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor

    def at_once(done):
        tensor = done.value()[0] + 1
        dist.all_reduce(tensor)
        return tensor

    for callback in (by_future, by_work, at_once):
        expected = full(nranks * (nranks + 1))
        assert torch.equal(future(full(1.0)).then(callback).wait(), expected), callback
        # A chain of callbacks that wait.
        value = future(full(1.0)).then(callback).then(lambda done: callback_of(done.value())).wait()
        assert torch.equal(value, full(nranks * (nranks * (nranks + 1) + 1))), callback
    # Nobody waits for the future, and its callback runs anyway.
    ran = threading.Event()
    future(full(1.0)).add_done_callback(lambda _: (dist.all_reduce(full(1.0)), ran.set()))
    assert ran.wait(30)


@in_group(2)
def test_nested_callbacks(nranks):
    def deeper(depth):
        def callback(done):
            value = done.value()[0]
            return value if depth == 0 else future(value.clone()).then(deeper(depth - 1)).wait()

        return callback

    # Deeper than the number of lanes.
    assert torch.equal(future(full(1.0)).then(deeper(9)).wait(), full(float(nranks**10)))


@in_group(2)
def test_many_callbacks(rank, nranks):
    order = []

    def callback(index):
        def call(done):
            # Callbacks' calls differ in size, so they must have the order of the futures on all ranks.
            order.append(index)
            return future(torch.full((index + 1,), 1.0)).wait()[0].sum()

        return call

    # No lane continues without a callback, however long a busy machine delays it.
    look, settling._Lane.check_progress = settling._Lane.check_progress, lambda lane: False
    # All calls are made before the first callback is attached, so that its calls come after them on all ranks.
    works = [dist.all_reduce(full(rank + index), async_op=True) for index in range(30)]
    futures = [work.get_future() for work in works]
    dist.barrier()
    sums = [one.then(callback(index)) for index, one in enumerate(futures)]
    assert [one.wait().item() for one in sums] == [nranks * (index + 1) for index in range(30)]
    assert order == list(range(30))
    settling._Lane.check_progress = look


@in_group(2)
def test_callbacks_that_wait_for_each_other(nranks):
    """Callbacks wait for other futures of their lane, and for later actions of the program."""
    later = threading.Event()
    first, second, third = (dist.all_reduce(full(1.0 + index), async_op=True) for index in range(3))
    futures = [work.get_future() for work in (first, second, third)]
    held = futures[0].then(lambda _: later.wait(60))
    # Waits for the second future, which is settled after the first.
    chained = futures[0].then(lambda _: futures[1].wait()[0] + futures[2].wait()[0])
    third.wait()
    assert futures[2].done()
    assert torch.equal(futures[1].wait()[0], full(2.0 * nranks))
    later.set()
    assert held.wait() and torch.equal(chained.wait(), full(5.0 * nranks))
    # Between groups.
    other = dist.new_group()
    got = future(full(1.0)).then(lambda done: future(done.value()[0].clone(), other).wait()[0])
    again = future(full(2.0), other).then(lambda done: future(done.value()[0].clone()).wait()[0])
    assert torch.equal(got.wait(), full(float(nranks**2))) and torch.equal(again.wait(), full(2.0 * nranks**2))


@in_group(2)
def test_callbacks_that_raise(nranks):
    def callback(_):
        raise KeyError("mine")

    chained = future(full(1.0)).then(callback)
    with pytest.raises(Exception, match="mine"):
        chained.wait()
    future(full(1.0)).add_done_callback(callback)
    # A future that the program settles itself.
    work = dist.all_reduce(full(1.0), async_op=True)
    work.get_future().set_result([full(7.0)])
    work.wait()
    tensor = full(1.0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, full(float(nranks)))
    assert future(full(1.0)).then(lambda done: 7).wait() == 7


@pytest.mark.parametrize("how", ["destroy", "abort", "group"])
@in_group(2)
def test_callbacks_that_end_or_make_groups(nranks, how):
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    backend = group._get_backend(torch.device("cpu"))
    dist.barrier()

    def callback(_):
        if how == "destroy":
            dist.destroy_process_group(group)
        elif how == "abort":
            backend.abort()
        else:
            made = dist.new_group()
            dist.all_reduce(full(1.0), group=made)
        return 7

    first = future(full(1.0), group)
    works = [dist.all_reduce(full(1.0), group=group, async_op=True) for _ in range(3)] if how != "group" else []
    rest = [work.get_future() for work in works]
    assert first.then(callback).wait() == 7
    # Remaining calls have ended, with either outcome.
    for one in rest:
        try:
            assert torch.equal(one.wait()[0], full(float(nranks)))
        except errors.Error:
            assert how == "abort"
        except RuntimeError:
            # torch passes on a future's error this way.
            assert how == "abort"
    dist.barrier()


@in_group(2)
def test_futures_of_a_group_that_ends(rank):
    """Futures of calls that never ran are settled when the group ends."""
    group = dist.new_group()
    dist.barrier()
    backend = group._get_backend(torch.device("cpu"))
    if rank == 0:
        # The first call waits for a missing rank.
        futures = [future(full(1.0), group) for _ in range(5)]
        deadline = time.monotonic() + 30
        while not backend._devices.behind() and time.monotonic() < deadline:
            time.sleep(0.002)
        started = time.monotonic()
        backend.abort()
        for one in futures:
            with pytest.raises(Exception, match="abort"):
                one.wait()
        assert time.monotonic() - started < 10
        with pytest.raises(Exception, match="abort"):
            future(full(1.0), group).wait()
    dist.barrier()


class Finalizer:
    """Makes a call when it is dropped, possibly during another call."""

    def __init__(self, call):
        self.call = call

    def __del__(self):
        self.call()


@in_group(2)
def test_finalizers_within_calls(nranks):
    raised = []

    def call():
        try:
            dist.all_reduce(full(1.0))
        except errors.Unavailable as error:
            raised.append(str(error))

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    # A call whose closure drops the last reference.
    held = [Finalizer(call)]
    backend._queue.make(False, held.clear)
    assert len(raised) == 1 and "within another" in raised[0]
    tensor = full(1.0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, full(float(nranks)))


@in_group(1)
def test_calls_queued_while_the_queue_is_searched(nranks):
    queue = dist.group.WORLD._get_backend(torch.device("cpu"))._queue
    call = object()

    class Queued:
        """A message for `isinstance`, which queues a call as another thread may do meanwhile."""

        @property
        def __class__(self):
            queue._works.append(call)
            return Message

    queue._works.extend([Queued(), call])
    assert queue._first_call() is call
    queue._works.clear()


@in_group(2)
def test_power_sgd(rank, nranks):
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 32, bias=False))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    column, row = torch.arange(1.0, 33), torch.ones(32)
    for step in range(4):
        model.zero_grad()
        # Gradients have matrix rank one, and so has their mean: the approximation is exact.
        inputs = (row * (rank + 1)).unsqueeze(0)
        (model(inputs) * column).sum().backward()
        expected = torch.outer(column, row) * (nranks + 1) / 2
        torch.testing.assert_close(model.module.weight.grad, expected, rtol=1e-4, atol=1e-4)
