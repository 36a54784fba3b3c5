"""The interpreter ends while daemon threads are in calls. The exit status is the program's."""

import subprocess
import sys

import pytest

# Loops of a daemon thread: calls that end, that wait, that fail, and that run Python code of a buffer.
CALLS = {
    "collectives": "communicator.allreduce(large)",
    "messages": """
with fa.group():
    communicator.send(bytearray(8), 0)
    communicator.recv(bytearray(8), 0)
""",
    "a group that stays open": """
group = fa.group()
group.__enter__()
communicator.send(large, 0)
communicator.allreduce(bytearray(8))
""",
    "ranks that do not come": "fa.Communicator.init(2, 0, fa.get_unique_id(), timeout=60)",
    "set-up": "fa.Communicator.init(1, 0, fa.get_unique_id()).alloc(100)",
    "split": "communicator.split(0)",
    "errors": """
for call in (lambda: communicator.allreduce(b"read-only"), lambda: communicator.send(large, 1)):
    try:
        call()
    except fa.errors.InvalidArgument:
        pass
""",
    "code of a buffer": """
try:
    communicator.allreduce(Exporter())
except fa.errors.InvalidArgument:
    pass
""",
    "tensors": "communicator.allreduce(tensor)",
}

PROGRAM = """
import sys, threading
import fast_allreduce as fa

communicator = fa.Communicator.init(1, 0, fa.get_unique_id(), timeout=60)
large = bytearray(400_000)
if {tensors}:
    import torch
    tensor = torch.ones(10)

class Exporter:
    def __dlpack__(self, **_):
        for _ in range(5000):
            pass
        raise RuntimeError("no array")

def call():
{call}

def calls(begun):
    begun.set()
    while True:
        call()

for begun in [threading.Event() for _ in range(3)]:
    threading.Thread(target=calls, args=(begun,), daemon=True).start()
    assert begun.wait(30)
# Each thread takes the GIL once more before the interpreter ends.
for _ in range(20):
    threading.Event().wait(0.001)
{end}
"""

ENDS = {"return": ("", 0), "sys.exit": ("sys.exit(3)", 3), "exception": ("raise KeyError('mine')", 1)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("calls", CALLS)
def test_daemon_threads_in_calls(calls, end):
    if calls == "tensors":
        pytest.importorskip("torch")
    last, status = ENDS[end]
    call = "\n".join("    " + line for line in CALLS[calls].strip().splitlines())
    program = PROGRAM.format(call=call, end=last, tensors=calls == "tensors")
    # Whether a faulty build aborts depends on where the threads are: it did in most runs.
    for _ in range(1 if calls == "tensors" else 3):
        process = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
        assert process.returncode == status, process.stderr
        assert "panicked" not in process.stderr and "Fatal" not in process.stderr and "FATAL" not in process.stderr


# Programs of two ranks that end without `destroy_process_group`, and the exit status of each rank.
GROUPS = {
    "asynchronous calls": (
        """
for _ in range(50):
    dist.all_reduce(torch.ones(1000), async_op=True)
""",
        (0, 0),
    ),
    "asynchronous calls that one rank waits for": (
        """
works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
if rank == 1:
    for work in works:
        work.wait()
    sys.exit(4)
""",
        (0, 4),
    ),
    "messages": (
        """
if rank == 0:
    dist.isend(torch.ones(100_000), 1)
else:
    got = torch.zeros(100_000)
    dist.recv(got, 0)
    assert got.eq(1).all()
""",
        (0, 0),
    ),
    "a call that the other rank does not make": (
        """
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    until_in_call()
    with open(store + ".pid", "w") as file:
        file.write(f"{os.getpid()} ")
    sys.exit(3)
pid = ""
while not pid.endswith(" "):
    time.sleep(0.01)
    if os.path.exists(store + ".pid"):
        pid = open(store + ".pid").read()
while os.path.exists(f"/proc/{int(pid)}"):
    time.sleep(0.01)
try:
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
except fa.Error as error:
    sys.exit(5 if error.rank == 0 else 6)
""",
        (3, 5),
    ),
    "an exception": (
        """
if rank == 0:
    work = dist.irecv(torch.ones(4), 1)
    dist.all_reduce(torch.ones(5), async_op=True)
    raise KeyError("mine")
""",
        (1, 0),
    ),
    "callbacks that never end": (
        """
import threading
begun = threading.Event()
# The lock keeps the call from being done before it has the callback, which would run in this thread then.
with dist.group.WORLD._get_backend(torch.device("cpu"))._queue.lock:
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    future.then(lambda _: begun.set() or threading.Event().wait())
assert begun.wait(60)
dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _: None)
""",
        (0, 0),
    ),
    "daemon threads": (
        """
import threading
def calls(begun):
    tensor = torch.ones(1000)
    while True:
        dist.all_reduce(tensor)
        begun.set()
begun = threading.Event()
threading.Thread(target=calls, args=(begun,), daemon=True).start()
assert begun.wait(60)
""",
        (0, 0),
    ),
    "handlers of the program": (
        """
def last():
    tensor = torch.ones(4)
    # An asynchronous call, and a future that only this settles.
    assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].eq(2).all()
    dist.all_reduce(tensor)
    assert tensor.eq(4).all()
    dist.destroy_process_group()
    print("the handler has ended")
    sys.stdout.flush()
before.append(last)
for _ in range(3):
    dist.all_reduce(torch.ones(1000), async_op=True)
""",
        (0, 0),
    ),
}

HEAD = """
import atexit, datetime, os, sys, time
# An exit handler that was registered first runs last.
before = []
atexit.register(lambda: [handler() for handler in before])
import torch
import torch.distributed as dist
import fast_allreduce as fa

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
limit = datetime.timedelta(seconds=300)
dist.init_process_group("fast_allreduce", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
dist.barrier()

def until_in_call():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    while backend._devices.behind() != [1]:
        time.sleep(0.002)
"""


@pytest.mark.parametrize("how", GROUPS)
def test_process_groups_that_are_not_destroyed(how, tmp_path):
    pytest.importorskip("torch")
    program, statuses = GROUPS[how]
    command = [sys.executable, "-c", HEAD + program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes) for rank in range(2)]
    outputs = []
    try:
        for process, status in zip(ranks, statuses):
            # Far below the group's limit.
            output, error = process.communicate(timeout=280)
            assert process.returncode == status, error
            assert "terminate called" not in error and "FATAL" not in error, error
            outputs.append(output)
    finally:
        for process in ranks:
            process.kill()
    if how == "handlers of the program":
        assert all("the handler has ended" in output for output in outputs)
