"""Ranks meet through torch's store, whatever an earlier incarnation left in it, and whichever ranks restart."""

import datetime
import os
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from groups import full  # noqa: E402
from ranks import on_ranks  # noqa: E402

from fast_allreduce import errors  # noqa: E402
from fast_allreduce.distributed import meeting  # noqa: E402
from fast_allreduce.process_group import check_nodes, node  # noqa: E402


def stored(kind, path, rank, nranks):
    if kind == "tcp":
        # Rank 0 hosts the store. The other ranks read its port.
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            with open(path + ".new", "w") as file:
                file.write(str(store.port))
            os.rename(path + ".new", path)
            return store
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path) as file:
            return dist.TCPStore("127.0.0.1", int(file.read()), None, False, wait_for_workers=False)
    store = dist.FileStore(path, nranks + 1)
    return dist.PrefixStore("prefix", store) if kind == "prefix" else store


@pytest.fixture
def ended_id():
    """Returns the id of a rendezvous whose process has ended."""
    program = "import fast_allreduce as fa; print(fa.get_unique_id())"
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def calls(communicator, nranks):
    tensor = full(1.0)
    communicator.allreduce(tensor)
    assert torch.equal(tensor, full(float(nranks)))
    communicator.destroy()


@pytest.mark.parametrize("how", ["whole", "unfinished", "early"])
@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
@on_ranks(3)
def test_a_used_store(rank, nranks, store_path, kind, how, ended_id):
    store = stored(kind, store_path, rank, nranks)
    if rank == 0:
        # Entries of an earlier incarnation: complete, or of one that ended early.
        store.set("incarnation", "before")
        for other in range(nranks if how != "early" else 1):
            store.set(f"rank_{other}", f"before|{node()}")
        if how == "whole":
            store.set("meeting", f"before|{ended_id}")
        store.set("rank_1", "")
        store.set("ready", "")
        # Rank 1 has answered the earlier incarnation, so it has seen no other.
        until(lambda: store.get("rank_1").decode().startswith("before|"))
    else:
        store.wait(["ready"])
    calls(meeting.meet(store, rank, nranks, 60, list(range(nranks))), nranks)


@pytest.mark.parametrize("kind", ["file", "tcp"])
@on_ranks(3)
def test_incarnations_of_one_process(rank, nranks, store_path, kind):
    store = stored(kind, store_path, rank, nranks)
    limit = datetime.timedelta(seconds=60)
    for incarnation in range(9):
        # Ranks take turns in arriving last.
        if incarnation % nranks == rank:
            time.sleep(0.2)
        dist.init_process_group("fast_allreduce", store=store, rank=rank, world_size=nranks, timeout=limit)
        tensor = full(1.0 + incarnation)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, full(nranks * (1.0 + incarnation)))
        dist.destroy_process_group()


@on_ranks(1)
def test_incarnations_of_one_rank(rank):
    store = dist.HashStore()
    for _ in range(3):
        dist.init_process_group("fast_allreduce", store=store, rank=0, world_size=1)
        dist.all_reduce(full(1.0))
        dist.destroy_process_group()


@on_ranks(3)
def test_a_replaced_incarnation(rank, nranks, store_path):
    """The first rank 0 still waits when the second incarnation begins."""
    store, ranks, raised = stored("file", store_path, rank, nranks), list(range(nranks)), []
    if rank == 0:

        def first():
            try:
                meeting.meet(stored("file", store_path, rank, nranks), 0, nranks, 60, ranks)
            except errors.Rendezvous as error:
                raised.append(str(error))

        thread = threading.Thread(target=first)
        thread.start()
        until(lambda: store.check(["incarnation", "rank_1"]))
        store.set("first", store.get("incarnation"))
        calls(meeting.meet(store, 0, nranks, 60, ranks), nranks)
        thread.join(30)
        assert len(raised) == 1 and "another process" in raised[0]
        return
    if rank == 2:
        # Missing in the first incarnation, which rank 1 has answered.
        store.wait(["first"])
        until(lambda: store.get("incarnation") != store.get("first"))
    calls(meeting.meet(store, rank, nranks, 60, ranks), nranks)


@on_ranks(3)
def test_a_rank_that_restarts(rank, nranks, store_path):
    """A rank dies after it has answered, before all ranks have, and restarts alone."""
    store = stored("file", store_path, rank, nranks)
    if rank == 2:
        # Acts as the first incarnation of rank 1.
        store.wait(["incarnation"])
        store.set("rank_1", f"{store.get('incarnation').decode()}|{node()}")
        store.set("died", "")
    store.wait(["died"] if rank > 0 else [])
    calls(meeting.meet(store, rank, nranks, 60, list(range(nranks))), nranks)


@pytest.mark.parametrize("which", [0, 1])
def test_an_incarnation_with_a_missing_rank(which, tmp_path, ended_id):
    """The other rank never arrives. Rank 0 names it, and rank 1 reports the stale rendezvous."""
    store = dist.FileStore(str(tmp_path / "store"), 3)
    if which:
        store.set("incarnation", "before")
        store.set("meeting", f"before|{ended_id}")
        with pytest.raises(errors.Rendezvous, match="nobody listens"):
            meeting.meet(store, 1, 2, 1.0, [4, 7])
        return
    named = r"ranks \[1\] have not come within 1\.0 s \(global ranks \[7\]\)"
    with pytest.raises(errors.Timeout, match=named) as caught:
        meeting.meet(store, 0, 2, 1.0, [4, 7])
    assert caught.value.missing == [1] and caught.value.global_ranks == [7]


def test_missing_ranks(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(errors.Timeout, match=r"ranks \[0\] have not come") as caught:
        meeting.meet(store, 1, 3, 0.5, [0, 1, 2])
    assert caught.value.missing == [0]
    store.set("incarnation", "this")
    store.set("rank_0", f"this|{node()}")
    with pytest.raises(errors.Timeout, match=r"ranks \[2\] have not come"):
        meeting.meet(store, 1, 3, 0.5, [0, 1, 2])


def test_locations_of_ranks():
    here = node()
    machine, network, directory = here.split(" ")
    assert directory == "-" and ":" in network and len(machine) == 36
    check_nodes(0, [here, here])
    with pytest.raises(ValueError, match="ranks of one machine: rank 1 is on .*rank 0 on 'another'.*gloo"):
        check_nodes(1, [f"another {network} -", here])
    with pytest.raises(ValueError, match="different network namespaces.*FAST_ALLREDUCE_SOCKET_DIR"):
        check_nodes(0, [here, f"{machine} 4:1 -"])
    check_nodes(0, [f"{machine} {network} 7:8", f"{machine} 4:1 7:8"])
    for other in ("-", "7:9"):
        with pytest.raises(ValueError, match="another directory on rank 1 than on rank 0"):
            check_nodes(0, [f"{machine} {network} 7:8", f"{machine} {network} {other}"])


@on_ranks(2)
def test_ranks_of_several_machines(rank, nranks, store_path):
    store, here = stored("file", store_path, rank, nranks), meeting.node
    meeting.node = lambda: f"machine-{rank} 4:1 -"
    try:
        for _ in range(2):
            world = meeting.meet(store, rank, nranks, 60, list(range(nranks)))
            tensor = torch.full((3,), 1.0 + rank)
            world.allreduce(tensor)
            assert (world.node, world.nodes, tensor.tolist()) == (rank, 2, [3.0] * 3)
            world.destroy()
    finally:
        meeting.node = here
