"""Misuse raises an exception that names it, on this rank alone. Nothing crashes or hangs."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, outcome, start

import fast_allreduce as fa
from fast_allreduce._catalogue import Settings


@pytest.fixture
def alone():
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as communicator:
        yield communicator


class Interface:
    def __init__(self, **interface):
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "data": (64, False), "shape": (1,), **interface}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Capsule:
    """An exporter of DLPack with arbitrary fields."""

    def __init__(self, of=None, shape=(4,), strides=None, name=b"dltensor", **fields):
        self.of = of if of is not None else np.arange(16, dtype=np.float32)

        def as_list(numbers):
            return (ctypes.c_int64 * len(numbers))(*numbers) if numbers is not None else None

        self.lists = as_list(shape), as_list(strides)
        told = {
            "data": self.of.ctypes.data,
            "device_type": 1,
            "ndim": len(shape),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            **fields,
        }
        self.tensor = Tensor(shape=self.lists[0], strides=self.lists[1], **told)
        self.name = name

    def __dlpack__(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), self.name, None)


def test_dlpack_that_is_used(alone):
    source = np.arange(16, dtype=np.float32)
    for capsule, expected in (
        (Capsule(source), source[:4]),
        (Capsule(source, byte_offset=20), source[5:9]),
        (Capsule(source, shape=(2, 3), strides=(3, 1)), source[:6]),
        # The stride of a dimension of one element does not matter.
        (Capsule(source, shape=(1, 5), strides=(-7, 1)), source[:5]),
        (Capsule(source, shape=()), source[:1]),
        (Capsule(source, shape=(3, 0, 2), strides=(9, 9, 9)), source[:0]),
        (Capsule(source, shape=(0,), data=None), source[:0]),
        (Capsule(source, shape=(1 << 62, 1 << 62, 0)), source[:0]),
    ):
        output = np.full(len(expected), -1, np.float32)
        alone.allreduce(capsule, output)
        assert (output == expected).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": (2, 2), "strides": (1, 2)}, "not contiguous"),
        ({"shape": (4,), "strides": (-1,)}, "not contiguous"),
        ({"shape": (4,), "strides": (0,)}, "not contiguous"),
        ({"shape": (-4,)}, "no memory can have"),
        ({"shape": (1 << 62, 1 << 62)}, "no memory can have"),
        ({"shape": (1 << 61,)}, "no memory can have"),
        ({"shape": (4,), "ndim": -1}, "no memory can have"),
        ({"byte_offset": (1 << 64) - 1}, "beyond the end"),
        ({"byte_offset": 2}, "not aligned"),
        ({"data": None}, "null"),
        ({"bits": 24}, "not supported"),
        ({"lanes": 2}, "not supported"),
        ({"code": 5, "bits": 64}, "not supported"),
        ({"device_type": 2}, "on cuda:0"),
        ({"device_type": 2, "device_id": -1}, "on cuda:"),
        ({"device_type": 99}, "type 99"),
        ({"name": b"used_dltensor"}, "no DLPack capsule"),
    ],
)
def test_dlpack_that_is_refused(alone, fields, said):
    with pytest.raises(ValueError, match=said):
        alone.allreduce(Capsule(**fields))
    alone.barrier()


def test_dlpack_that_is_read_only(alone):
    source = np.arange(4, dtype=np.float32)
    source.flags.writeable = False

    class Exported:
        def __dlpack__(self):
            return source.__dlpack__()

    # numpy refuses to export read-only memory, because DLPack cannot mark it.
    with pytest.raises(ValueError, match="cannot be exported by DLPack"):
        alone.allreduce(Exported())


@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ({"shape": (1 << 62, 1 << 3)}, "no memory can have"),
        ({"shape": (-1,)}, "no memory can have"),
        ({"shape": (2, 2), "strides": (4,)}, "not contiguous"),
        ({"shape": (2,), "strides": (8, 4)}, "not contiguous"),
        ({"typestr": ""}, "not supported"),
        ({"typestr": "\N{GREEK SMALL LETTER OMEGA}f4"}, "not supported"),
        ({"typestr": ">f4"}, "not supported"),
        ({"data": (0, False)}, "null"),
        ({"data": (66, False)}, "not aligned"),
    ],
)
def test_interfaces_that_are_refused(alone, interface, said):
    with pytest.raises(ValueError, match=said):
        alone.allreduce(Interface(**interface))
    incomplete = Interface()
    del incomplete.__array_interface__["shape"]
    with pytest.raises(ValueError, match="shape"):
        alone.allreduce(incomplete)


def test_sizes_that_overflow(alone):
    data = np.ones(4)
    for call in (
        lambda: alone.allreduce(fa.RawBuffer(data.ctypes.data, 1 << 61, "f64")),
        lambda: alone.allreduce(fa.RawBuffer(data.ctypes.data, (1 << 64) - 1, "u8")),
        lambda: alone.allreduce(fa.RawBuffer((1 << 64) - 8, 8, "f64")),
        lambda: alone.alloc((1 << 64) - 1),
        lambda: alone.allgather_v(data, data, [(1 << 64) - 1]),
        lambda: alone.alltoall_v(data, [(1 << 63)], data, [1]),
    ):
        with pytest.raises((ValueError, MemoryError)):
            call()
    residual = {"residual": np.ones(4), "norm": "rms"}
    for name, value, call in (
        ("address", 1 << 64, lambda: fa.RawBuffer(1 << 64, 1, "u8")),
        ("address", -1, lambda: fa.RawBuffer(-1, 1, "u8")),
        ("count", -1, lambda: fa.RawBuffer(64, -1, "u8")),
        ("counts", -1, lambda: alone.allgather_v(data, data, [-1])),
        ("counts", -2, lambda: alone.reduce_scatter_v(data, data, [-2])),
        ("recvcounts", -1, lambda: alone.alltoall_v(data, [4], data, [-1])),
        ("nbytes", 1 << 64, lambda: alone.alloc(1 << 64)),
        ("nbytes", (1 << 127) - 1, lambda: alone.alloc(1 << 200)),
        ("nbytes", -1, lambda: alone.alloc(np.int64(-1))),
        ("hidden", -1, lambda: alone.allreduce_fused(data, hidden=-1, **residual)),
        ("count", -1, lambda: alone.plan(-1, "f32")),
        ("color", -1, lambda: alone.split(-1)),
        ("key", 1 << 63, lambda: alone.split(0, 1 << 63)),
        ("a rank of exclude_ranks", -1, lambda: alone.shrink([-1])),
        ("nranks", -1, lambda: fa.Communicator.init(-1, 0, fa.get_unique_id())),
        ("rank", -1, lambda: fa.Communicator.init(1, -1, fa.get_unique_id())),
        ("root", -1, lambda: alone.broadcast(data, root=-1)),
        ("root", -2, lambda: alone.reduce(data, root=-2)),
        ("peer", -1, lambda: alone.send(data, -1)),
        ("tag", -1, lambda: alone.recv(data, 0, tag=-1)),
        ("tag", 1 << 32, lambda: alone.send(data, 0, tag=1 << 32)),
    ):
        with pytest.raises(fa.errors.InvalidArgument, match=f"{name} is {value}"):
            call()
    with pytest.raises(MemoryError):
        alone.alloc(1 << 50)
    alone.barrier()


def test_ids_and_settings():
    with pytest.raises(fa.Error):
        fa.Communicator.init(1, 0, fa.UniqueId(bytes(128)), timeout=1)
    with pytest.raises(fa.Error):
        fa.UniqueId("not hexadecimal")
    for settings, kind in (
        ({"unknown": 1}, ValueError),
        ({"unknown": None}, ValueError),
        ({"workers": "many"}, ValueError),
        ({"workers": [2]}, ValueError),
        ({"timeout": float("nan")}, ValueError),
        ({"timeout": float("inf")}, ValueError),
        ({"bind": "socket"}, ValueError),
        ({"order": "random"}, ValueError),
        ({"order": 1}, ValueError),
        ({"direct_reads": "sometimes"}, ValueError),
        ({"max_blocks": 0}, ValueError),
        ({"max_blocks": -1}, ValueError),
        ({"one_at_a_time": "yes"}, ValueError),
        ({"programmatic_launch": 3}, ValueError),
        ({"tuning": "/nowhere/plan.toml"}, fa.errors.Tuning),
        ({"max_bytes": 1 << 62}, fa.Error),
        ({"workers": 1 << 40}, fa.Error),
    ):
        with pytest.raises(kind):
            fa.Communicator.init(1, 0, fa.get_unique_id(), **settings)
    names = [name for name in Settings.__annotations__]
    with pytest.raises(fa.errors.InvalidSetting, match=", ".join(["one of device", *names])) as caught:
        fa.Communicator.init(1, 0, fa.get_unique_id(), colour="red")
    assert (caught.value.name, caught.value.value) == ("setting", "colour")
    # Every keyword of the TypedDict is a setting.
    fa.Communicator.init(1, 0, fa.get_unique_id(), **dict.fromkeys(names)).destroy()
    with fa.Communicator.init(
        1, 0, fa.get_unique_id(), max_bytes="64K", timeout=0, join_timeout=2.5, tuning=Path("built-in")
    ) as communicator:
        assert "the program asks for it" in communicator.plan_source
    with fa.Communicator.init(
        1, 0, fa.get_unique_id(), bind="none", calibrate=np.False_, check=np.True_, tuning=None, wait=None
    ) as communicator:
        assert communicator.plan_source.startswith("built-in") and communicator.binding.startswith("none")
    for settings in ({"max_blocks": 4}, {"one_at_a_time": True}, {"programmatic_launch": True}):
        with pytest.raises(ValueError, match="a setting of GPUs"):
            fa.Communicator.init(1, 0, fa.get_unique_id(), **settings)
    for order in ("fixed", "any", None):
        with fa.Communicator.init(
            1, 0, fa.get_unique_id(), order=order, direct_reads=False, max_blocks=None, one_at_a_time=False
        ) as communicator:
            assert "NVLS" in communicator.nvls_refused
            communicator.barrier()


def test_set_timeout(alone):
    """0 is no limit, as for the setting."""
    for timeout in (2.5, 0, 0.0, None, 1e-12):
        alone.set_timeout(timeout)
        alone.barrier()
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="or 0 for no limit"):
            alone.set_timeout(timeout)


def test_groups_that_do_not_match(alone):
    group = fa.group()
    with pytest.raises(ValueError, match="no group open"):
        group.__exit__(None, None, None)
    # One message more than a group takes. The communicator stays usable.
    data = np.zeros(1)
    with pytest.raises(fa.Error), fa.group():
        for _ in range(65):
            alone.send(data, 0)
    alone.barrier()
    # The communicator is destroyed, or dropped, within a group of its messages.
    with pytest.raises(fa.Error), fa.group():
        alone.send(data, 0)
        alone.destroy()
        alone.recv(np.zeros(1), 0)


@on_ranks(2)
def test_threads_that_call_at_once(nranks, communicator):
    wrong = []

    def calls():
        for _ in range(100):
            data = np.ones(7)
            communicator.allreduce(data)
            if (data != nranks).any():
                wrong.append(data)

    threads = [threading.Thread(target=calls) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and communicator.counters().calls == 600


@on_ranks(2)
def test_destroy_while_another_thread_calls(rank, communicator):
    communicator.barrier()
    if rank == 1:
        time.sleep(2)
        return
    threading.Timer(0.5, communicator.destroy).start()
    threading.Timer(0.8, lambda: None).start()
    # It is closed when the call has ended, which happens when the other rank leaves.
    with pytest.raises(fa.errors.PeerLost):
        communicator.allreduce(np.zeros(3))
    with pytest.raises(ValueError, match="destroyed"):
        communicator.barrier()


@on_ranks(2)
def test_signals_all_the_time(nranks, communicator):
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for count in [1, 1000, 100000] * 60:
        data = np.ones(count)
        communicator.allreduce(data)
        assert (data == nranks).all()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert seen


PROGRAMS = {
    "a thread waits": """
import threading
communicator = fa.Communicator.init(2, rank, unique_id, timeout=30)
communicator.barrier()
if rank == 0:
    threading.Thread(target=communicator.barrier, daemon=True).start()
    time.sleep(0.5)
""",
    "a group is open": """
communicator = fa.Communicator.init(2, rank, unique_id, timeout=30)
communicator.barrier()
group = fa.group()
group.__enter__()
communicator.send(bytearray(8), 1 - rank)
""",
    "in a cycle": """
class Cycle: pass
cycle = Cycle()
cycle.itself, cycle.communicator = cycle, fa.Communicator.init(2, rank, unique_id, timeout=30)
cycle.buffer = cycle.communicator.alloc(100)
cycle.communicator.barrier()
""",
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_exits(which):
    """The interpreter ends normally, and at once, during each of these."""
    unique_id = fa.get_unique_id()
    head = "import sys, time\nimport fast_allreduce as fa\nrank, unique_id = int(sys.argv[1]), fa.UniqueId(sys.argv[2])"
    program = head + PROGRAMS[which]
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(unique_id)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0 and "Fatal" not in error and "panicked" not in error, error


@on_ranks(2)
def test_tensors_of_other_layouts(rank, nranks, unique_id):
    torch = pytest.importorskip("torch")
    communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=30)
    for tensor, said in (
        (torch.eye(3).to_sparse(), r"sendbuf is sparse \(torch.sparse_coo\)"),
        (torch.eye(3).to_sparse_csr(), r"sendbuf is sparse \(torch.sparse_csr\)"),
        (torch.tensor([1 + 2j]).conj().imag, "pending"),
        (torch.zeros(3).expand(2, 3), "not contiguous"),
        (torch.zeros(3, dtype=torch.float8_e4m3fnuz), "not supported"),
        (torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "sendbuf"),
    ):
        with pytest.raises(ValueError, match=said):
            communicator.allreduce(tensor)
    data = torch.arange(10.0)[3:7]
    communicator.allreduce(data)
    assert torch.equal(data, torch.arange(3.0, 7.0) * nranks)


def test_wrong_version_of_torch():
    pytest.importorskip("torch")
    program = "import torch; torch.__version__ = '2.9.1'; import fast_allreduce.distributed"
    process = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.returncode == 1
    assert "distributed needs torch 2.15 or newer, and this is torch 2.9.1" in process.stderr


def torch_fork(rank, nranks, _, store):
    import torch
    import torch.distributed as dist

    dist.init_process_group("fast_allreduce", init_method=f"file://{store}", rank=rank, world_size=nranks)
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        dist.barrier()
        return
    # While the group's thread runs a call, and so holds its lock.
    threading.Thread(target=lambda: dist.barrier()).start()
    time.sleep(0.5)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.all_reduce(torch.ones(3))
        except Exception as error:
            status = 0 if "fork" in str(error) else 2
            print("in the child:", repr(error), file=sys.stderr, flush=True)
        os._exit(status)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)


def test_a_fork_of_a_process_group(tmp_path):
    pytest.importorskip("torch")
    for one in start(torch_fork, 2, str(tmp_path / "store")):
        result = outcome(*one)
        assert result[0] == "returned", result[-1]
