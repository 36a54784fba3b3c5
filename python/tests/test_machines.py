"""Process groups over several machines, in the test bed of lab/network. Needs root to make namespaces.

`FAST_ALLREDUCE_NETWORK` is the path of the program that makes the bed, which scripts/test-python.sh builds.
"""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "machines.md"
NETWORK = os.environ.get("FAST_ALLREDUCE_NETWORK")


def may_make_a_bed():
    required = "network" in os.environ.get("FAST_ALLREDUCE_REQUIRE", "").split(",")
    return NETWORK and (required or subprocess.run([NETWORK, "true"], capture_output=True).returncode == 0)


if not may_make_a_bed():
    pytest.skip(
        "no test bed: FAST_ALLREDUCE_NETWORK does not name its program, or namespaces are refused",
        allow_module_level=True,
    )

BEGIN = """
import datetime, os, sys, time, torch
import torch.distributed as dist
import fast_allreduce as fa
import fast_allreduce.distributed

torch.set_num_threads(1)
LIMIT = float(os.environ["LIMIT"])
rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
limit = datetime.timedelta(seconds=LIMIT)


def full(value, count=5):
    return torch.full((count,), float(value))

"""

END = """
print("right", flush=True)
os._exit(0)
"""

# Makes calls until one fails, and prints its error.
CALLS = """
count = 0
try:
    while True:
        tensor = full(rank, 2000)
        dist.all_reduce(tensor)
        assert tensor.eq(nranks * (nranks - 1) / 2).all()
        count += 1
        if count == 20:
            print("running", flush=True)
except fa.errors.Error as error:
    ranks = getattr(error, "missing", None) or [getattr(error, "rank", None)]
    print("error:", type(error).__name__, ranks, error, flush=True)
try:
    dist.all_reduce(full(0))
    print("another call is made after the failure", flush=True)
except fa.errors.Error:
    pass
os._exit(0)
"""


INIT = """
dist.init_process_group("fast_allreduce", timeout=limit)
"""


def run(tmp_path, program, nodes, meanwhile="", limit=60):
    """Runs a program as one rank for each entry of `nodes`, on that node; `meanwhile` is a shell command that starts
    when all ranks run. Returns what each rank printed."""
    environment = (
        "env GLOO_SOCKET_IFNAME=eth0 MASTER_ADDR=198.18.0.1 MASTER_PORT=29500 OMP_NUM_THREADS=1 "
        f"WORLD_SIZE={len(nodes)} LIMIT={limit}"
    )
    lines = ["folder=$(mktemp -d); trap 'rm -rf \"$folder\"' EXIT"]
    for rank, node in enumerate(nodes):
        lines.append(f'on node{node} {environment} RANK={rank} {sys.executable} "$0" >"$folder/{rank}" 2>&1 &')
    if meanwhile:
        files = " ".join(f'"$folder/{rank}"' for rank in range(len(nodes)))
        count = f'[ "$(grep -l running {files} | wc -l)" -ge {len(nodes)} ]'
        lines.append(f"for _ in $(seq 600); do ! {count} || break; sleep 0.1; done; {meanwhile}")
    lines.append("wait")
    lines.extend(f'echo "--- {rank}"; cat "$folder/{rank}"' for rank in range(len(nodes)))
    path = tmp_path / "program.py"
    path.write_text(BEGIN + program)
    command = [NETWORK, "--nodes", str(max(nodes) + 1), "bash", "-c", "\n".join(lines), path]
    output = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert output.returncode == 0, output.stdout + output.stderr
    return [part.partition("\n")[2] for part in output.stdout.split("--- ")[1:]]


def named(told):
    """Returns the kind of a rank's error, the ranks that it names, and its text."""
    assert "another call" not in told
    line = next(line for line in told.splitlines() if line.startswith("error: "))
    kind, _, rest = line.removeprefix("error: ").partition(" ")
    ranks, _, text = rest.partition("] ")
    return kind, ranks + "]", text


COLLECTIVES = (
    INIT
    + """for count in (0, 1, 5, 1000, 100003):
    tensor = torch.arange(count, dtype=torch.float32) * (rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(count, dtype=torch.float32) * (nranks * (nranks + 1) // 2))
# Small messages and large ones.
for count in (77, 7700):
    for dtype in (torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8):
        tensor = torch.ones(count).to(dtype)
        dist.all_reduce(tensor)
        assert (tensor.float() == nranks).all(), dtype
    tensor = torch.full((4, count), float(rank)).t()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert (tensor == nranks - 1).all()
    tensor = full(rank, count).requires_grad_()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert (tensor == (nranks - 1) / 2).all()
    tensor = torch.full((count,), 1.5).to(torch.float8_e4m3fn)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert (tensor.float() == 1.5).all()
# The sum overflows.
tensor = torch.full((77,), 40000.0, dtype=torch.float16)
dist.all_reduce(tensor, dist.ReduceOp.AVG)
assert (tensor == 40000.0).all()
for root in range(nranks):
    tensor = full(rank, 1001)
    dist.broadcast(tensor, root)
    assert (tensor == root).all()
ranks = [float(one) for one in range(nranks)]
outputs = [torch.zeros(2, 3) for _ in ranks]
dist.all_gather(outputs, torch.full((2, 3), float(rank)))
assert all((output == one).all() for one, output in enumerate(outputs))
output = torch.zeros(nranks * 5)
dist.all_gather_into_tensor(output, full(rank))
assert output.tolist() == [one for one in ranks for _ in range(5)]
output = torch.zeros(5)
dist.reduce_scatter_tensor(output, torch.arange(5.0 * nranks))
assert output.tolist() == [nranks * (5.0 * rank + one) for one in range(5)]
dist.reduce_scatter(output, [full(one) for one in ranks])
assert (output == rank * nranks).all()
output = torch.zeros(nranks)
dist.all_to_all_single(output, full(rank, nranks))
assert output.tolist() == ranks
outputs = [torch.zeros(2) for _ in ranks] if rank == 1 else None
dist.gather(full(rank, 2), outputs, dst=1)
assert rank != 1 or all((output == one).all() for one, output in enumerate(outputs))
output = torch.zeros(2)
dist.scatter(output, [full(one, 2) for one in ranks] if rank == 0 else None, src=0)
assert (output == rank).all()
tensor = full(rank)
dist.reduce(tensor, 0)
assert rank or (tensor == sum(ranks)).all()
peer, received = rank ^ (nranks // 2), torch.zeros(9)
works = dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, full(rank, 9), peer), dist.P2POp(dist.irecv, received, peer)]
)
for work in works:
    work.wait()
assert (received == peer).all()
for members in ([0, 1], [0, nranks - 1]):
    group = dist.new_group(members)
    if rank in members:
        tensor = full(1)
        dist.all_reduce(tensor, group=group)
        assert (tensor == len(members)).all()
tensor = full(1)
dist.all_reduce(tensor, async_op=True).wait()
assert (tensor == nranks).all()
objects = [None] * nranks
dist.all_gather_object(objects, {"rank": rank})
assert objects[-1] == {"rank": nranks - 1}
(record,) = dist.group.WORLD._get_backend(torch.device("cpu")).flight_record()
assert record["world_size"] == nranks // 2 and record["ranks"][rank % 2]["calls"]
dist.barrier()
"""
)


def test_collectives_and_a_killed_rank(tmp_path):
    dying = 'print("running", flush=True)\n        if count == 40 and rank == 3:\n            os._exit(1)'
    program = COLLECTIVES + CALLS.replace('print("running", flush=True)', dying)
    # Rank 0 has the store, which the other survivors ask who is missing.
    last = """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"survivor {rank}", "")
    if rank == 0:
        store.wait([f"survivor {one}" for one in (1, 2)], datetime.timedelta(seconds=60))
    os._exit(0)
    """
    program = program.removesuffix("os._exit(0)\n") + textwrap.dedent(last)
    told = run(tmp_path, program, [0, 0, 1, 1], limit=20)
    for rank in range(3):
        assert "running" in told[rank], told[rank]
        _, ranks, text = named(told[rank])
        assert ranks == "[3]", text


def test_a_lost_machine_is_named(tmp_path):
    told = run(tmp_path, INIT + CALLS, [0, 1], "on node1 ip link set eth0 down", limit=4)
    kind, ranks, text = named(told[0])
    assert kind in ("Timeout", "PeerLost") and ranks == "[1]", text
    # It has lost the store as well.
    assert "the store of the process group does not answer" in named(told[1])[2]


def test_machines_with_different_numbers_of_ranks(tmp_path):
    program = """
    try:
        dist.init_process_group("fast_allreduce", timeout=limit)
    except fa.errors.InvalidArgument as error:
        print("refused:", error, flush=True)
    """
    for told in run(tmp_path, textwrap.dedent(program) + END, [0, 1, 1]):
        assert "equally many ranks on each machine, and these have 1, 2" in told, told


def test_hierarchical_over_a_group(tmp_path):
    program = """
    from fast_allreduce.hierarchical import Hierarchical

    dist.init_process_group("gloo", timeout=limit)
    local = fa.Communicator.init(1, 0, fa.get_unique_id())
    world = Hierarchical(local, dist.group.WORLD, timeout=LIMIT)
    assert (world.rank, world.nranks, world.node, world.nodes) == (rank, 2, rank, 2)
    tensor, output = full(rank + 1), full(0)
    world.allreduce(tensor, output, fa.SUM)
    assert (output == 3).all() and (tensor == rank + 1).all()
    world.allreduce(full(rank, 8).view(1, 8)[:, 2], output[:1])
    assert output[0] == 1
    # Three pieces, of which the last is short.
    long = torch.arange(2 * (2 << 20) // 4 + 17, dtype=torch.float32)
    world.allreduce(long)
    assert torch.equal(long, 2 * torch.arange(long.numel(), dtype=torch.float32))
    # Also leaves that require gradients, contiguous or not.
    for leaf in (full(rank), torch.full((4, 6), float(rank)).t(), full(rank, 7700)):
        world.allreduce(leaf.requires_grad_(), op=fa.AVG)
        assert (leaf == 0.5).all()
    for wrong in (lambda: world.allreduce(tensor, full(0, 4)), lambda: world.allreduce(tensor, op="band"),
                  lambda: world.broadcast(tensor, root=2), lambda: world.allreduce([1.0]),
                  lambda: world.allreduce(long[:-1], long[1:])):
        try:
            wrong()
            raise SystemExit("not refused")
        except fa.errors.InvalidArgument:
            pass
    world.barrier()
    try:
        world.allreduce(full(1, 5 + 7700 * rank))
    except fa.errors.Disagreement as error:
        assert error.rank == 1 - rank, error
    try:
        world.barrier()
    except fa.errors.Disagreement:
        print("ended")
    """
    for told in run(tmp_path, textwrap.dedent(program) + END, [0, 1], limit=10):
        assert told.endswith("ended\nright\n"), told


def test_an_abort_reaches_the_other_machine(tmp_path):
    program = """
    from fast_allreduce.hierarchical import Hierarchical

    dist.init_process_group("gloo", timeout=limit)
    local = fa.Communicator.init(1, 0, fa.get_unique_id())
    both = dist.distributed_c10d._get_default_store()
    world = Hierarchical(local, dist.group.WORLD, timeout=LIMIT, store=dist.PrefixStore("failures", both))
    if rank == 0:
        world.abort()
        # Its end would close the connections. A wait would keep other threads from the store.
        while not both.check(["seen"]):
            time.sleep(0.1)
    else:
        begin = time.monotonic()
        try:
            world.barrier()
        except fa.errors.PeerFailed:
            assert time.monotonic() - begin < LIMIT / 2
            both.set("seen", "")
            print("ended", flush=True)
    """
    aborted, told = run(tmp_path, textwrap.dedent(program) + END, [0, 1])
    assert aborted.endswith("right\n") and told.endswith("ended\nright\n"), aborted + told


def test_the_document(tmp_path):
    """The program and the command of docs/machines.md, on two machines."""
    section = DOCUMENT.read_text().partition("## Python")[2].partition("\n## ")[0]
    (tmp_path / "train.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    command = section.partition("```sh\n")[2].partition("```")[0].strip()
    torchrun = f"{sys.executable} -m torch.distributed.run"
    lines = [f"on node{node} 'N={node}; {command.replace('torchrun', torchrun)}' &" for node in range(2)]
    shell = ["bash", "-c", "\n".join([*lines, "wait"])]
    output = subprocess.run([NETWORK, *shell], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    # Ranks that print at the same time may share a line.
    assert "".join(output.stdout.split()) == "4.0" * 4, output.stdout + output.stderr
