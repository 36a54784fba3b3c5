"""The plugins for SGLang and for vLLM on GPUs, with stand-ins for the classes that call them, on the CPU."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import stand_ins  # noqa: E402
from plugins import Said, in_gloo, in_rank_order, plugin, values  # noqa: E402

import fast_allreduce as fa  # noqa: E402


@in_gloo(2, 3, FAST_ALLREDUCE_VLLM="cuda")
def test_vllm_custom_allreduce(rank, nranks):
    stand_ins.vllm()
    plugin("vllm.general_plugins")()
    plugin("vllm.general_plugins")()
    communicator = stand_ins.CudaCommunicator(dist.group.WORLD, torch.device("cpu"))
    ours = communicator.ca_comm
    assert isinstance(ours, stand_ins.CustomAllreduce) and not ours.disabled
    assert ours.create_shared_buffer(8) == ["vLLM's own"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # 7 elements are no multiple of 16 bytes, which vLLM's kernels require.
        for shape in ((7,), (3, 4096), (1, 0), (512, 1024)):
            mine = values(rank, shape, dtype)
            kept = mine.clone()
            assert torch.equal(communicator.all_reduce(mine), in_rank_order(nranks, shape, dtype))
            assert torch.equal(mine, kept)
        with communicator.capture():
            mine = values(rank, (64, 32), dtype)
            assert torch.equal(communicator.all_reduce(mine), in_rank_order(nranks, (64, 32), dtype))
            # Dense in another order than C's, and a view into a larger tensor.
            transposed = communicator.all_reduce(mine.t())
            assert torch.equal(transposed, in_rank_order(nranks, (64, 32), dtype).t())
            assert torch.equal(communicator.all_reduce(mine[8:16]), in_rank_order(nranks, (64, 32), dtype)[8:16])
        # Overlapping rows, whose size equals that of their storage, are not dense.
        overlapping = values(rank, (4,), dtype).as_strided((2, 2), (1, 1))
        rows = [values(r, (4,), dtype).as_strided((2, 2), (1, 1)) for r in range(nranks)]
        total = rows[0].float()
        for row in rows[1:]:
            total = total + row.float()
        assert torch.equal(communicator.all_reduce(overlapping), total.to(dtype))
        other = torch.empty(32, 64, dtype=dtype).t()
        assert torch.equal(
            ours.all_reduce(values(rank, (64, 32), dtype), out=other), in_rank_order(nranks, (64, 32), dtype)
        )
        gathered = communicator.all_gather(values(rank, (3, 8), dtype))
        assert torch.equal(gathered, torch.cat([values(r, (3, 8), dtype) for r in range(nranks)]))
        scattered = communicator.reduce_scatter(values(rank, (2 * nranks, 8), dtype))
        assert torch.equal(scattered, in_rank_order(nranks, (2 * nranks, 8), dtype)[2 * rank :][:2])
    assert communicator.others == 0
    # vLLM's other paths take other types, parts of rows, sizes above the limit, and rows that ranks cannot share.
    for refused in (torch.zeros(16, dtype=torch.int64), torch.zeros(4, 8)[:, :3], torch.zeros((8 << 20) // 4 + 1)):
        assert not ours.should_custom_ar(refused) and ours.custom_all_reduce(refused) is None
    assert communicator.reduce_scatter(torch.zeros(nranks + 1, 4)) is None or nranks == 1
    # Sums do not depend on the number of tokens, also above that limit.
    ours.batch_invariant = True
    rows = values(rank, (4200, 512), torch.float32)
    batch = communicator.all_reduce(rows)
    assert torch.equal(batch[:3], communicator.all_reduce(rows[:3]))
    assert torch.equal(batch, in_rank_order(nranks, (4200, 512), torch.float32))
    ours.close()
    ours.close()
    assert ours.disabled and not ours.should_custom_ar(torch.zeros(16))


@in_gloo(2, FAST_ALLREDUCE_VLLM="cuda")
def test_vllm_without_a_gpu(rank):
    stand_ins.vllm()
    plugin("vllm.general_plugins")()
    communicator = stand_ins.CudaCommunicator(dist.group.WORLD, 0)
    # Without a GPU vLLM runs without the plugin, on all ranks.
    assert communicator.ca_comm.disabled and communicator.ca_comm.device == torch.device("cuda:0")
    assert torch.equal(communicator.all_reduce(torch.full((8,), rank + 1.0)), torch.full((8,), 3.0))
    assert communicator.others == 1


@in_gloo(2)
def test_limit_of_a_server(rank):
    import fast_allreduce.process_group as meeting
    from fast_allreduce.servers import server_communicator_of

    given = []

    class Noted:
        @staticmethod
        def init(size, *arguments, **settings):
            # A world of no ranks is refused: this only checks the settings.
            if size > 0:
                given.append(settings)
            return fa.Communicator.init(size, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "Communicator", Noted)
        patch.delenv("FAST_ALLREDUCE_TIMEOUT", raising=False)
        server_communicator_of(dist.group.WORLD).destroy()
        patch.setenv("FAST_ALLREDUCE_TIMEOUT", "0.5")
        communicator = server_communicator_of(dist.group.WORLD)
    # Longer than any compilation or prefill, unless the environment sets a limit, which the library reads itself.
    assert given == [{"timeout": 1800}, {}]
    if rank == 0:
        with pytest.raises(fa.errors.Timeout) as late:
            communicator.allreduce(torch.ones(3))
        assert late.value.missing == [1] and 0.5 <= late.value.waited < 30
    dist.barrier()


def test_nothing_is_replaced_by_default(monkeypatch):
    stand_ins.vllm()
    try:
        monkeypatch.delenv("FAST_ALLREDUCE_VLLM", raising=False)
        register = plugin("vllm.general_plugins")
        register()
        module = sys.modules[f"{stand_ins.VLLM}.custom_all_reduce"]
        assert module.CustomAllreduce is stand_ins.CustomAllreduce
        monkeypatch.setenv("FAST_ALLREDUCE_VLLM", "gpu")
        with pytest.raises(ValueError, match="'gpu' is not one of cpu, cuda"):
            register()
        # vLLM's own classes stay where one is missing or has another interface, and the log says why.
        own = module.CustomAllreduce
        for where, name, other, reason in (
            (own, "custom_all_reduce", lambda self, tensor: None, r"has the parameters \(self, tensor\)"),
            (own, "broadcast", lambda self: None, "broadcast is unknown: .* written for vLLM 0.33.0"),
            (module, "CustomAllreduce", None, "custom_all_reduce.CustomAllreduce is missing"),
        ):
            with monkeypatch.context() as patch, Said("vllm.plugins.fast_allreduce") as lines:
                patch.setenv("FAST_ALLREDUCE_VLLM", "cuda")
                patch.setattr(where, name, other, raising=False) if other else patch.delattr(where, name)
                register()
            (line,) = lines
            assert re.search(f"fast_allreduce is not used on cuda: .*{reason}", line), line
        assert module.CustomAllreduce is own
    finally:
        stand_ins.forget()
    monkeypatch.delenv("FAST_ALLREDUCE_SGLANG", raising=False)
    plugin("sglang.srt.plugins")()
    monkeypatch.setenv("FAST_ALLREDUCE_SGLANG", "1")
    with pytest.raises(ValueError, match="'1' is not one of cpu"):
        plugin("sglang.srt.plugins")()
    monkeypatch.setenv("FAST_ALLREDUCE_SGLANG", "cpu")
    with pytest.raises(fa.errors.Unavailable, match="SGLang 0.5.23"):
        plugin("sglang.srt.plugins")()


def test_a_process_without_plugins_does_not_change():
    program = """
import os, sys
from importlib.metadata import entry_points
os.environ.pop("FAST_ALLREDUCE_VLLM", None)
os.environ.pop("FAST_ALLREDUCE_SGLANG", None)
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (found,) = entry_points(group=group, name="fast_allreduce")
    found.load()()
# These change what torch traces and how it names compiled code.
assert "fast_allreduce.vllm" in sys.modules and "fast_allreduce.operators" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@in_gloo(2, 3, FAST_ALLREDUCE_SGLANG="cpu")
def test_sglang(rank, nranks):
    coordinator = stand_ins.sglang()
    plugin("sglang.srt.plugins")()
    plugin("sglang.srt.plugins")()
    with Said("fast_allreduce.sglang") as lines:
        group = coordinator(dist.group.WORLD)
    (line,) = lines
    assert f"is used for the group tp:0: rank {rank} of {nranks} on cpu" in line
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((3,), (16, 4096), (2, 0)):
            data = values(rank, shape, dtype)
            assert group.all_reduce(data) is data and torch.equal(data, in_rank_order(nranks, shape, dtype))
        columns = values(rank, (6, 4), dtype)
        group.all_reduce(columns[:, 1:3])
        assert torch.equal(columns[:, 1:3], in_rank_order(nranks, (6, 4), dtype)[:, 1:3])
        assert torch.equal(columns[:, 0], values(rank, (6, 4), dtype)[:, 0])
        for dim in (0, 1, -1):
            parts = [values(r, (2, 3, 5), dtype) for r in range(nranks)]
            assert torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim))

    def layer(hidden):
        hidden = hidden * 2
        group.all_reduce(hidden)
        return group.all_gather(hidden.relu(), -1)

    hidden = values(rank, (4, 8), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(hidden), layer(hidden))
    assert group.own == []
    # SGLang's own method takes lists of outputs.
    outputs = [torch.zeros(3) for _ in range(nranks)]
    group.all_gather(torch.full((3,), rank + 1.0), output_tensor_list=outputs)
    assert [output[0].item() for output in outputs] == [r + 1 for r in range(nranks)] and group.own == ["all_gather"]
    communicator = group.fast_allreduce
    group.destroy()
    assert not communicator.is_valid


@in_gloo(2, FAST_ALLREDUCE_SGLANG="cpu")
def test_sglang_between_machines(rank):
    import fast_allreduce.process_group as meeting

    coordinator = stand_ins.sglang()
    plugin("sglang.srt.plugins")()
    with pytest.MonkeyPatch.context() as patch, Said("fast_allreduce.sglang") as lines:
        patch.setattr(meeting, "node", lambda: f"machine-{rank} 4:1 -")
        group = coordinator(dist.group.WORLD)
    assert len(lines) == 1 and "is not used for the group tp:0" in lines[0]
    data = torch.full((3,), rank + 1.0)
    assert torch.equal(group.all_reduce(data), torch.full((3,), 3.0)) and group.own == ["all_reduce"]


@in_gloo(2, FAST_ALLREDUCE_SGLANG="cpu")
def test_another_sglang(rank):
    coordinator = stand_ins.sglang()
    own = coordinator.all_reduce
    coordinator.all_gather = lambda self, input_, dim: None
    with pytest.raises(
        fa.errors.Unavailable, match=r"0.5.23.*all_gather has the arguments \['self', 'input_', 'dim'\]"
    ):
        plugin("sglang.srt.plugins")()
    # Nothing is replaced, not even the other methods.
    assert coordinator.all_reduce is own
    coordinator(dist.group.WORLD)


@in_gloo(2)
def test_a_group_whose_ranks_cannot_all_join(rank):
    from fast_allreduce.process_group import communicator_of

    # Found before a rank waits for another: no limit is set.
    for wrong, raised in (({"max_bytes": "1?"}, fa.errors.InvalidSetting), ({"device": 3}, TypeError)):
        with pytest.raises(raised if rank == 1 else fa.errors.PeerFailed) as caught:
            communicator_of(dist.group.WORLD, **(wrong if rank == 1 else {}))
        assert rank == 1 or caught.value.rank == 1
    # Found while ranks join.
    with pytest.raises(fa.Error):
        communicator_of(dist.group.WORLD, timeout=3, **({"max_bytes": 1} if rank == 1 else {}))
    communicator = communicator_of(dist.new_group([0, 1]), timeout=20)
    data = torch.ones(3)
    communicator.allreduce(data)
    assert torch.equal(data, torch.full((3,), 2.0))


def test_vllm_metrics_of_killed_servers_are_removed(tmp_path, monkeypatch):
    from fast_allreduce.vllm import metrics

    monkeypatch.setattr(metrics, "_SHARED", str(tmp_path))
    monkeypatch.delenv("FAST_ALLREDUCE_FLIGHT_DIR", raising=False)

    # Where locks do not work there is a directory all the same.
    with monkeypatch.context() as unlocked:
        unlocked.setenv("FAST_ALLREDUCE_FLIGHT_DIR", "")
        unlocked.setattr(metrics.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
        metrics._make_directory()
        Path(os.environ["FAST_ALLREDUCE_FLIGHT_DIR"]).rmdir()

    processes = {}

    def directory():
        """Makes one, in a fork that waits, and returns its path."""
        receiver, sender = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                metrics._make_directory()
                os.write(sender, os.environ["FAST_ALLREDUCE_FLIGHT_DIR"].encode())
                signal.pause()
            finally:
                os._exit(1)
        os.close(sender)
        text = os.read(receiver, 4096).decode()
        os.close(receiver)
        path = Path(text)
        processes[path] = process
        assert text, "the fork has ended"
        (path / "0123-0-1.flight").write_bytes(b"")
        return path

    def kill(path):
        os.kill(processes[path], signal.SIGKILL)
        os.waitpid(processes.pop(path), 0)

    try:
        killed, living = directory(), directory()
        kill(killed)
        assert killed.exists() and living.exists()
        (tmp_path / "another program's").mkdir()
        newest = directory()
        assert not killed.exists()
        assert sorted(tmp_path.iterdir()) == sorted([living, newest, tmp_path / "another program's"])
    finally:
        for path in list(processes):
            kill(path)
