"""Ranks in containers of one machine, with different host names and networks. Needs root to make namespaces."""

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import datetime, socket, sys, torch
import torch.distributed as dist

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
limit = datetime.timedelta(seconds=60)
try:
    dist.init_process_group("fast_allreduce", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
except ValueError as error:
    print("refused:", error)
    sys.exit()
tensor = torch.full((5,), 1.0 + rank)
dist.all_reduce(tensor)
group = dist.new_group()
large = torch.full((1 << 20,), 1.0)
dist.all_reduce(large, group=group)
assert large.eq(2).all()
print(socket.gethostname(), tensor.tolist())
dist.destroy_process_group()
"""


def may_unshare():
    return (
        shutil.which("unshare")
        and subprocess.run(["unshare", "--uts", "--net", "true"], capture_output=True).returncode == 0
    )


if os.environ.get("FAST_ALLREDUCE_REQUIRE", "").find("root") < 0 and not may_unshare():
    pytest.skip("this user cannot make namespaces", allow_module_level=True)


def ranks(tmp_path, *namespaces, directories=(None, None)):
    started = []
    for rank in range(2):
        environment = {**os.environ, "FAST_ALLREDUCE_SOCKET_DIR": str(directories[rank] or "")}
        python = [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")]
        # The first word becomes $0.
        command = ["unshare", *namespaces, "sh", "-c", f'hostname host-{rank} && exec "$@"', "rank", *python]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    told = []
    for process in started:
        output, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        told.append(output.strip())
    return told


def test_different_host_names(tmp_path):
    assert ranks(tmp_path, "--uts") == [f"host-{rank} {[3.0] * 5}" for rank in range(2)]


def test_different_networks(tmp_path):
    for told in ranks(tmp_path, "--uts", "--net"):
        assert told.startswith("refused:") and "FAST_ALLREDUCE_SOCKET_DIR" in told and "network namespaces" in told


def test_different_networks_and_a_directory(tmp_path):
    # Two paths of one directory, as in containers.
    directory, other = tmp_path / "directory", tmp_path / "other"
    directory.mkdir()
    other.symlink_to(directory)
    told = ranks(tmp_path, "--uts", "--net", directories=(directory, other))
    assert told == [f"host-{rank} {[3.0] * 5}" for rank in range(2)]
    assert list(directory.iterdir()) == []


def test_two_directories(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    for told in ranks(tmp_path, "--uts", directories=(first, second)):
        assert told.startswith("refused: FAST_ALLREDUCE_SOCKET_DIR names another directory")
