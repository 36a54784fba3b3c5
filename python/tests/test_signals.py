"""Signal handlers run while the main thread waits in a call.

The call continues, or ends with the handler's exception.
"""

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fast_allreduce as fa

LIMIT = 60
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]


class Raised(Exception):
    pass


@pytest.fixture
def world():
    """Two ranks of this process. The second one calls in other threads."""
    unique_id, made = fa.get_unique_id(), []
    other = threading.Thread(target=lambda: made.append(fa.Communicator.init(2, 1, unique_id, timeout=LIMIT)))
    other.start()
    first = fa.Communicator.init(2, 0, unique_id, timeout=LIMIT)
    other.join()
    yield first, made[0]
    first.destroy()
    made[0].destroy()


@pytest.fixture
def on():
    """Sets a handler, and restores the previous one."""
    before = {}

    def set_handler(number, handler):
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield set_handler
    for number, handler in before.items():
        signal.signal(number, handler)


def soon(action):
    """Runs an action while the main thread waits, or is about to."""
    thread = threading.Timer(0.3, action)
    thread.start()
    return thread


def send(number):
    return soon(lambda: os.kill(os.getpid(), number))


def calls(first, second):
    """Returns calls of the first rank that wait for the second, with the second's part, by name."""
    data, other = np.ones(1000), np.ones(1000)
    yield "allreduce", lambda: first.allreduce(data), lambda: second.allreduce(other)
    yield "large", lambda: first.allreduce(np.ones(1 << 20)), lambda: second.allreduce(np.ones(1 << 20))
    yield "recv", lambda: first.recv(data, 1), lambda: second.send(other, 0)
    yield "barrier", lambda: first.barrier(), lambda: second.barrier()
    yield "alloc", lambda: first.alloc(64), lambda: second.alloc(64)
    yield "split", lambda: first.split(0), lambda: second.split(0)
    yield "shrink", lambda: first.shrink([]), lambda: second.shrink([])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_call_goes_on_when_handlers_have_run(world, on, number):
    handled = threading.Event()
    on(number, lambda *_: handled.set())
    for name, call, others in calls(*world):
        handled.clear()
        came = []

        def comes():
            came.append(handled.wait(LIMIT))  # noqa: B023
            others()  # noqa: B023

        peer = threading.Thread(target=comes)
        peer.start()
        sent = send(number)
        call()
        peer.join()
        sent.join()
        assert came == [True], f"{name}: the handler had not run"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("which", ["allreduce", "recv", "alloc", "split", "shrink"])
def test_a_handler_that_raises_ends_the_call(world, on, number, which):
    def raises(*_):
        raise Raised(number)

    on(number, raises)
    call = next(call for name, call, _ in calls(*world) if name == which)
    with pytest.raises(Raised):
        sent = send(number)
        call()
    sent.join()
    # The step may look complete to the other ranks: this rank has failed, and they are notified.
    with pytest.raises(fa.errors.Aborted):
        world[0].check()
    with pytest.raises(fa.Error):
        world[1].barrier()


def test_all_that_has_come_is_handled(world, on):
    handled = []
    for number in SIGNALS:
        on(number, lambda number, _: handled.append(number))

    def peer():
        while len(handled) < len(SIGNALS):
            time.sleep(0.01)
        world[1].barrier()

    thread = threading.Thread(target=peer)
    thread.start()
    sent = soon(lambda: [os.kill(os.getpid(), number) for number in SIGNALS])
    world[0].barrier()
    thread.join()
    sent.join()
    assert sorted(handled) == sorted(SIGNALS)


def test_an_interrupt_that_no_signal_brings(world, on):
    on(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        soon(_thread.interrupt_main)
        world[0].barrier()


def test_what_a_handler_cannot_call(world, on):
    said, data = [], np.ones(8)

    def handler(*_):
        first = world[0]
        for call in (
            lambda: first.allreduce(data),
            lambda: first.send(data, 1),
            lambda: first.recv(data, 1),
            lambda: first.barrier(),
            lambda: first.alloc(8),
            lambda: first.split(0),
            lambda: first.shrink([]),
        ):
            with pytest.raises(fa.errors.Unavailable, match="from within another"):
                call()
        first.check()
        # A handler may use another communicator.
        with fa.Communicator.init(1, 0, fa.get_unique_id()) as alone:
            alone.allreduce(data)
        said.append((first.rank, first.survivors, first.counters().calls))

    on(signal.SIGALRM, handler)

    def peer():
        while not said:
            time.sleep(0.01)
        world[1].allreduce(np.ones(8))

    thread = threading.Thread(target=peer)
    thread.start()
    send(signal.SIGALRM)
    mine = np.ones(8)
    world[0].allreduce(mine)
    thread.join()
    assert said == [(0, [0, 1], 1)] and (mine == 2).all()


def test_a_handler_that_does_not_catch_what_it_gets(world, on):
    on(signal.SIGALRM, lambda *_: world[0].barrier())
    with pytest.raises(fa.errors.Unavailable, match="from within another"):
        send(signal.SIGALRM)
        world[0].barrier()


def test_a_handler_may_abort_or_destroy(world, on):
    on(signal.SIGALRM, lambda *_: world[0].abort())
    send(signal.SIGALRM)
    with pytest.raises(fa.errors.Aborted):
        world[0].barrier()
    on(signal.SIGALRM, lambda *_: other.destroy())
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as other:
        pass


def test_a_buffer_that_goes_in_a_handler(world, on):
    kept = []
    thread = threading.Thread(target=lambda: kept.append(world[1].alloc(1 << 16)))
    thread.start()
    mine = [world[0].alloc(1 << 16)]
    thread.join()
    gone = threading.Event()

    def handler(*_):
        mine.clear()
        gone.set()

    on(signal.SIGALRM, handler)
    peer = threading.Thread(target=lambda: gone.wait(LIMIT) and world[1].barrier())
    peer.start()
    send(signal.SIGALRM)
    world[0].barrier()
    peer.join()
    # Memory is kept until the call has ended, and freed with the next allocation.
    thread = threading.Thread(target=lambda: kept.append(world[1].alloc(64)))
    kept.clear()
    thread.start()
    world[0].alloc(64)
    thread.join()


def test_a_wait_for_another_threads_call(world, on):
    def raises(*_):
        raise Raised

    on(signal.SIGALRM, raises)
    ended = []

    def waits():
        try:
            world[0].recv(np.ones(8), 1)
        except fa.Error as error:
            ended.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    while world[0].counters().calls == 0:
        time.sleep(0.01)
    with pytest.raises(Raised):
        send(signal.SIGALRM)
        world[0].recv(np.ones(8), 1, tag=1)
    thread.join()
    assert isinstance(ended[0], fa.errors.Aborted)


@pytest.mark.parametrize("number", SIGNALS)
def test_ranks_that_have_not_met(on, number):
    handled = []

    def handler(*_):
        handled.append(number)
        if len(handled) == 2:
            raise Raised

    on(number, handler)
    timer = threading.Event()

    def sends():
        while not timer.wait(0.3):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=sends)
    thread.start()
    try:
        with pytest.raises(Raised):
            fa.Communicator.init(2, 0, fa.get_unique_id(), timeout=LIMIT)
    finally:
        timer.set()
        thread.join()
    assert len(handled) >= 2


WHILE_A_THREAD_DROPS = """
import os, signal, sys, threading
import fast_allreduce as fa

unique_id, made = fa.get_unique_id(), []
other = threading.Thread(target=lambda: made.append(fa.Communicator.init(2, 1, unique_id)))
other.start()
first = fa.Communicator.init(2, 0, unique_id)
other.join()
other = threading.Thread(target=lambda: made.append(made[0].alloc(4096)))
other.start()
buffers = [first.alloc(4096)]
other.join()
handled = threading.Event()
signal.signal(signal.SIGALRM, lambda *_: handled.set())

def drops():
    # The drop waits for the main thread's call, which needs the GIL for its handlers.
    threading.Event().wait(0.3)
    buffers.clear()

def comes():
    handled.wait(60)
    made[0].barrier()

threads = [threading.Thread(target=drops), threading.Thread(target=comes)]
for thread in threads:
    thread.start()
signal.setitimer(signal.ITIMER_REAL, 0.6)
first.barrier()
for thread in threads:
    thread.join()
print("done")
"""


def test_a_thread_that_drops_a_buffer_leaves_the_interpreter_to_others():
    process = subprocess.run(
        [sys.executable, "-c", WHILE_A_THREAD_DROPS], stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    assert (process.returncode, process.stdout) == (0, "done\n")
