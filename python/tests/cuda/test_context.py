"""Every call keeps the program's CUDA context current, on the stand-in driver."""

import ctypes
import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from stand_in import Driver  # noqa: E402
from test_streams import COUNT, ZEROS, calls  # noqa: E402

import fast_allreduce as fa  # noqa: E402


def unmade():
    with pytest.raises(fa.errors.Timeout):
        fa.Communicator.init(2, 0, fa.get_unique_id(), "cuda:0", timeout=0.3)
    with pytest.raises(fa.Error):
        fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:7")


def refused(call, *kinds):
    def refuses():
        with pytest.raises(kinds):
            call()

    return refuses


def actions(driver, elsewhere):
    """Returns all operations of a communicator on the first GPU by name, in a valid order."""
    made = {}

    def make(name, how):
        return lambda: made.update({name: how()})

    def drop(name):
        def drops():
            made.pop(name)
            gc.collect()

        return drops

    def init():
        return fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0", timeout=30, max_blocks=4)

    stream, foreign = driver.stream(), elsewhere.stream()
    array, wrong = driver.array(ZEROS), elsewhere.array(ZEROS)
    yield "init", make("it", init)
    of = lambda: made["it"]  # noqa: E731
    names = calls(None, lambda: array)
    for name in names:
        yield name, lambda name=name: calls(of(), lambda: driver.array(ZEROS))[name](stream)
        yield f"{name}, elsewhere", refused(lambda name=name: calls(of(), lambda: wrong)[name](stream), ValueError)
        yield f"{name}, no stream", refused(lambda name=name: calls(of(), lambda: array)[name](None), ValueError)
    yield "another GPU's stream", refused(lambda: of().allreduce(array, stream=foreign), fa.errors.InvalidStream)
    other = driver.array(ZEROS, version=3, stream=driver.stream().cuda_stream)
    yield "a stream that is waited for", lambda: of().allreduce(array, other)
    yield "barrier", lambda: of().barrier(stream=stream)
    yield "barrier of threads", lambda: of().barrier()
    yield "synchronize", lambda: of().synchronize(stream=stream)
    yield "synchronize elsewhere", refused(lambda: of().synchronize(stream=foreign), fa.errors.InvalidStream)
    yield "check", lambda: of().check()
    yield "alloc", make("buffer", lambda: of().alloc(4096))
    yield "a buffer that goes", drop("buffer")
    yield "too much", refused(lambda: of().alloc(1 << 60), MemoryError)
    yield "register_buffer", make("registered", lambda: of().register_buffer(array))
    yield "a registration that goes", drop("registered")
    yield "register_buffer elsewhere", refused(lambda: of().register_buffer(wrong), ValueError)
    yield "split", make("part", lambda: of().split(0))
    yield "a part that goes", drop("part")
    yield "shrink", make("part", lambda: of().shrink([]))
    yield "destroy", lambda: made["part"].destroy()
    for fact in ("rank", "nranks", "device", "is_valid", "survivors", "plan_source", "binding", "nvls_refused"):
        yield fact, lambda fact=fact: getattr(of(), fact)
    yield "counters", lambda: of().counters()
    yield "plan", lambda: of().plan(COUNT, "f32")
    yield "abort", lambda: of().abort()
    yield "after it", refused(lambda: of().allreduce(array, stream=stream), fa.errors.Aborted)
    yield "one that goes", drop("it")
    yield "with work on its stream", make("it", init)
    yield "a call", lambda: of().allreduce(array, stream=stream)
    yield "it goes", drop("it")
    yield "what cannot be made", unmade


@pytest.mark.parametrize("current", ["none", "first", "second"])
def test_the_programs_context_stays_current(current):
    driver, elsewhere = Driver(0), Driver(1)
    context = {"none": None, "first": driver.context.value, "second": elsewhere.context.value}[current]
    done = 0
    for name, action in actions(driver, elsewhere):
        driver.call("cuCtxSetCurrent", ctypes.c_void_p(context))
        action()
        now = driver.current()
        # In a thread without a context, making a communicator makes the GPU's current.
        if current == "none" and name in ("init", "with work on its stream", "what cannot be made"):
            assert now in (None, driver.context.value)
        else:
            assert now == context, f"{name} has left {now} current, and not {context}"
        done += 1
    assert done > 70
    driver.call("cuCtxSetCurrent", driver.context)
