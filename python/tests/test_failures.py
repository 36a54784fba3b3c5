"""Ranks that die, differ, leave, fork or are interrupted: an exception names it in time, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, outcome, run, start

import fast_allreduce as fa

from_errors = fa.errors


def killed(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=30)
    data = np.ones(1000)
    communicator.allreduce(data)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(from_errors.PeerLost) as caught:
        communicator.allreduce(data)
    assert caught.value.rank == 1 and time.monotonic() - started < 10
    with pytest.raises(ConnectionError):
        communicator.barrier()
    left = communicator.shrink()
    assert left.nranks == nranks - 1
    data = np.array([left.rank + 1])
    left.allreduce(data)
    return int(data[0])


def test_a_rank_that_is_killed():
    ranks = [outcome(*one) for one in start(killed, 3)]
    assert ranks == [("returned", 3), ("ended", -signal.SIGKILL), ("returned", 3)]


def replaced(rank, nranks, unique_id, store):
    communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=30)
    shared = np.asarray(communicator.alloc(8)).view(np.float64)
    assert communicator.suspend() > 0 and communicator.is_suspended
    with pytest.raises(from_errors.Unavailable):
        communicator.barrier()
    progress = communicator.resume()
    assert (progress.completed, progress.of_rank) == (0, [0, 0]) and not communicator.is_suspended
    shared[0] = rank + 1
    communicator.allreduce(shared)
    assert shared[0] == 3
    if rank == 1:
        communicator.destroy()
        while not (found := Path(store)).exists():
            time.sleep(0.01)
        communicator = fa.Communicator.init(nranks, 1, fa.UniqueId(found.read_text()), timeout=30)
        assert communicator.inherited() == [(0, 8)]
        shared = np.asarray(communicator.inherit(0)).view(np.float64)
    else:
        with pytest.raises(from_errors.PeerLost):
            communicator.barrier()
        Path(store + ".new").write_text(str(communicator.join_id()))
        Path(store + ".new").rename(store)
        progress = communicator.join([0])
        assert (progress.completed, progress.of_rank) == (1, [1, None])
    assert communicator.progress().completed == 1
    shared[0] = 2.0
    communicator.allreduce(shared)
    return float(shared[0])


def test_suspended_and_replaced(tmp_path):
    ranks = [outcome(*one) for one in start(replaced, 2, str(tmp_path / "id"))]
    assert ranks == [("returned", 4.0), ("returned", 4.0)]


def grown(rank, nranks, unique_id, store):
    if rank < 2:
        communicator = fa.Communicator.init(2, rank, unique_id, timeout=30)
        for size in (2, 17, -1):
            with pytest.raises(from_errors.InvalidArgument):
                communicator.grow(size)
        if rank == 0:
            Path(store + ".new").write_text(str(communicator.join_id()))
            Path(store + ".new").rename(store)
        communicator = communicator.grow(nranks)
    else:
        while not (found := Path(store)).exists():
            time.sleep(0.01)
        unique_id = fa.UniqueId(found.read_text())
        communicator = fa.Communicator.init_spare(unique_id, timeout=30)
    assert communicator.nranks == nranks and (communicator.rank == rank or rank >= 2 <= communicator.rank)
    data = np.array([communicator.rank + 1])
    communicator.allreduce(data)
    return int(data[0])


def test_a_larger_communicator(tmp_path):
    ranks = [outcome(*one) for one in start(grown, 4, str(tmp_path / "id"))]
    assert ranks == [("returned", 10)] * 4


@on_ranks(2)
def test_flight_record_and_metrics(rank, communicator):
    for _ in range(3):
        communicator.allreduce(np.zeros(100, np.float32))
    if rank == 0:
        record = communicator.flight_record()
        assert record["world_size"] == 2 and [one["rank"] for one in record["ranks"]] == [0, 1]
        last = record["ranks"][0]["calls"][-1]
        assert (last["number"], last["collective"], last["count"]) == (3, "all_reduce", 100)
        # From outside, as another process would.
        worlds = fa.inspect(os.getpid())
        assert record["world"] in [world["world"] for world in worlds]
        assert 'collective="all_reduce"' in fa.inspect_metrics(os.getpid())
    assert 'fast_allreduce_message_bytes_total{communicator="' in communicator.metrics()
    with pytest.raises(fa.Error):
        communicator.metrics("/nonexistent/ranks.prom")
    with pytest.raises(from_errors.Unavailable):
        fa.inspect("/nonexistent")
    communicator.barrier()


@on_ranks(2)
def test_ranks_whose_calls_differ(rank, communicator):
    with pytest.raises(from_errors.Disagreement) as caught:
        communicator.allreduce(np.zeros(10 + rank, np.float32))
    assert {caught.value.rank, caught.value.own_rank} == {0, 1} and caught.value.what == "the call"


@on_ranks(2)
def test_a_missing_rank(rank, nranks, unique_id):
    communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=1.0)
    if rank == 0:
        with pytest.raises(TimeoutError) as caught:
            communicator.barrier()
        assert caught.value.missing == [1] and 0.9 < caught.value.waited < 5
    else:
        time.sleep(2.5)


@on_ranks(2)
def test_abort_from_another_thread(rank, communicator):
    communicator.barrier()
    if rank == 0:
        # The interpreter runs other threads while this one waits.
        threading.Timer(0.5, communicator.abort).start()
        with pytest.raises(from_errors.Aborted):
            communicator.allreduce(np.zeros(3))
    else:
        time.sleep(2)


@pytest.mark.parametrize("handler", [False, True])
@on_ranks(2)
def test_ctrl_c_ends_a_wait(rank, communicator, handler):
    communicator.barrier()
    if rank == 1:
        time.sleep(6)
        return None

    def mine(*_):
        raise InterruptedError("mine")

    # Set after the communicator was made. In the background, tests run with SIGINT ignored unless it is set.
    signal.signal(signal.SIGINT, mine if handler else signal.default_int_handler)
    started = time.monotonic()
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(InterruptedError if handler else KeyboardInterrupt):
        communicator.allreduce(np.zeros(3))
    assert time.monotonic() - started < 4
    with pytest.raises(from_errors.Aborted):
        communicator.barrier()


def test_ctrl_c_ends_init():
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import fast_allreduce as fa; print('here', flush=True)\n"
        "fa.Communicator.init(2, 0, fa.get_unique_id(), timeout=60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in error and time.monotonic() - started < 5


@on_ranks(2)
def test_a_fork_cannot_call(communicator):
    communicator.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            communicator.allreduce(np.zeros(3))
        except from_errors.Forked:
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    communicator.barrier()


def left_open(rank, nranks, unique_id):
    # Stored in a module, so that it exists until the interpreter exits.
    fa.kept = fa.Communicator.init(nranks, rank, unique_id, timeout=30)
    fa.kept.barrier()


def test_exit_with_an_open_communicator_leaves_nothing():
    def ours():
        # memfds have no names. Named shared memory would be here.
        return [name for name in os.listdir("/dev/shm") if "fast" in name]

    before = ours()
    run(left_open, 2)
    assert ours() == before


def test_errors_are_pickled():
    import pickle

    error = from_errors.Timeout("text", missing=[1, 2], waited=3.0)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.missing, again.waited) == (from_errors.Timeout, "text", [1, 2], 3.0)
    assert isinstance(again, TimeoutError) and isinstance(again, fa.Error)


def test_the_stub_matches_the_module():
    import ast

    from fast_allreduce import _native

    stub = ast.parse((Path(fa.__file__).parent / "_native.pyi").read_text())
    defined = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in defined if not node.name.startswith("_")}
    assert set(classes) == {name for name, value in vars(_native).items() if isinstance(value, type)}
    for name, node in classes.items():
        told = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        there = {key for key in vars(getattr(_native, name)) if not key.startswith("__")}
        assert {key for key in told if not key.startswith("__")} == there, name
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
                assert ast.get_docstring(item), f"{name}.{item.name} is not documented"
