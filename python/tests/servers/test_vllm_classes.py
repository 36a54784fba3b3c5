"""vLLM's own classes for CPUs with the plugin, in ranks with a gloo group (`scripts/test-vllm.sh`)."""

import contextlib
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import vllm.envs
from plugins import Said, in_gloo, in_rank_order, plugin, values
from vllm.distributed.device_communicators import cpu_communicator

import fast_allreduce as fa
import fast_allreduce.process_group as meeting
from fast_allreduce import operators
from fast_allreduce import vllm as ours

SAYS = "vllm.plugins.fast_allreduce"


@contextlib.contextmanager
def registered():
    """Returns a context in which the plugin has been registered, twice."""
    own = cpu_communicator._CPUSHMDistributed
    from vllm.platforms import current_platform

    # Without vLLM's operators its class for CPUs is not used.
    current_platform.import_kernels()
    os.environ["VLLM_DIST_IDENT"] = f"vllm_dist_test_{os.getppid()}"
    plugin("vllm.general_plugins")()
    plugin("vllm.general_plugins")()
    try:
        yield own
    finally:
        cpu_communicator._CPUSHMDistributed = own
        vllm.envs.environment_variables.pop("FAST_ALLREDUCE_VLLM", None)
        ours._groups.clear()
        # What vLLM's own class leaves behind.
        for left in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
            left.unlink(missing_ok=True)


def made(name="tp:0"):
    """Returns vLLM's communicator of the ranks."""
    group = dist.group.WORLD
    return cpu_communicator.CpuCommunicator(group, torch.device("cpu"), group, name)


# The first test of these ranks: they import vLLM, which takes minutes on a busy machine.
@in_gloo(2, 3, limit=900, FAST_ALLREDUCE_VLLM="cpu,cuda")
def test_each_call(rank, nranks):
    with registered() as own:
        communicator = made()
        assert isinstance(communicator.dist_module, own) and communicator.supports_tensor_dict
        assert communicator.dist_module._ranks.name == "vllm tp:0"
        for dtype in (torch.bfloat16, torch.float32):
            data = values(rank, (5, 33), dtype)
            assert communicator.all_reduce(data) is data and torch.equal(data, in_rank_order(nranks, (5, 33), dtype))
            columns = values(rank, (6, 4), dtype)
            communicator.all_reduce(columns[:, 1:3])
            assert torch.equal(columns[:, 1:3], in_rank_order(nranks, (6, 4), dtype)[:, 1:3])
            assert torch.equal(columns[:, 0], values(rank, (6, 4), dtype)[:, 0])
        for dtype in (torch.bfloat16, torch.bool, torch.int16):
            for dim in (0, -1):
                parts = [values(r, (2, 3), torch.float32) for r in range(nranks)]
                parts = [part.gt(0) if dtype == torch.bool else part.to(dtype) for part in parts]
                gathered = communicator.gather(parts[rank], dst=nranks - 1, dim=dim)
                assert (gathered is None) == (rank != nranks - 1)
                assert gathered is None or torch.equal(gathered, torch.cat(parts, dim=dim))
                assert torch.equal(communicator.all_gather(parts[rank], dim=dim), torch.cat(parts, dim=dim))
        sent = {f"tensor {index}": torch.full((index % 3, 4), index, dtype=torch.bfloat16) for index in range(70)}
        sent |= {"mask": torch.tensor([True, False]), "number": torch.tensor(7)}
        if rank == 0:
            communicator.send_tensor_dict(sent, 1)
            with pytest.raises(ValueError, match="'text' is a str"):
                communicator.send_tensor_dict({"text": "no tensor"}, 1)
        elif rank == 1:
            got = communicator.recv_tensor_dict(0)
            assert list(got) == list(sent)
            assert all(got[key].dtype == value.dtype and torch.equal(got[key], value) for key, value in sent.items())


# Inductor compiles C++: on a busy machine that takes minutes.
@in_gloo(2, limit=900, FAST_ALLREDUCE_VLLM="cpu")
def test_every_call_in_a_graph(rank, nranks, inductor):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    with registered(), Said(SAYS) as lines:
        communicator = made()

        def layer(data, weight):
            product = communicator.all_reduce(data @ weight)
            gathered = communicator.all_gather(torch.relu(product) + data)
            columns = communicator.all_reduce(data * 3)[:, 1:3]
            communicator.all_reduce(columns)
            parts = communicator.gather(gathered, dst=1)
            return (gathered, columns) if parts is None else (gathered, columns, parts)

        # vLLM's default: one graph, or an error.
        found = torch.compile(layer, fullgraph=True)(values(rank, (4, 8), torch.float32), torch.eye(8))
        expected = layer(values(rank, (4, 8), torch.float32), torch.eye(8))
    assert len(found) == len(expected) == (3 if rank == 1 else 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    # Logged once for a group, not for each call.
    (line,) = lines
    assert f"fast_allreduce {fa.__version__} is used for the group tp:0: rank {rank} of {nranks} on cpu" in line
    assert "plan: " in line and "a wait ends after 1800 s (FAST_ALLREDUCE_TIMEOUT" in line
    torch._dynamo.reset()


@in_gloo(2, FAST_ALLREDUCE_VLLM="cpu")
def test_keys_of_compiled_code():
    assert "FAST_ALLREDUCE_VLLM" not in vllm.envs.compile_factors()
    with registered():
        without = vllm.envs.compile_factors()["FAST_ALLREDUCE_VLLM"]
        communicator = made()
        key = vllm.envs.compile_factors()["FAST_ALLREDUCE_VLLM"]
        assert communicator.dist_module._ranks is not None
    assert operators.IDENTITY in key and "tp:0" in key
    # The key also differs from that of the plugin without a communicator.
    assert without != key
    assert fa.__version__ in operators.IDENTITY


@in_gloo(2, FAST_ALLREDUCE_VLLM="cpu")
def test_ranks_that_cannot_join(rank):
    with registered(), pytest.MonkeyPatch.context() as patch, Said(SAYS) as lines:
        patch.setattr(meeting, "node", lambda: f"machine-{rank} 4:1 -")
        communicator = made()
        with pytest.raises(fa.errors.InvalidArgument, match="rank 0 is on 'machine-0'|rank 1 is on 'machine-1'"):
            meeting.communicator_of(dist.group.WORLD)
        # vLLM's own methods run.
        assert communicator.dist_module._ranks is None and communicator.dist_module.handle is not None
        data = torch.full((3,), rank + 1.0)
        communicator.all_reduce(data)
        assert torch.equal(data, torch.full((3,), 3.0))
        assert "groups []" in vllm.envs.compile_factors()["FAST_ALLREDUCE_VLLM"]
        dist.barrier()
    (line,) = lines
    assert "fast_allreduce is not used for the group tp:0 on cpu: " in line


@in_gloo(2, FAST_ALLREDUCE_VLLM="cpu")
def test_one_rank_with_vllms_own_class(rank):
    with registered() as own, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(cpu_communicator, "_CPUSHMDistributed", own)
        communicator = made()
        # vLLM compares the ranks' names of their shared memory, which differ, and uses torch.distributed.
        assert communicator.dist_module is dist
        data = torch.full((3,), rank + 1.0)
        communicator.all_reduce(data)
        assert torch.equal(data, torch.full((3,), 3.0))


def test_other_interfaces(monkeypatch):
    """vLLM's own class stays where something is missing or has another interface, and the log says why, once."""
    own, variables = cpu_communicator._CPUSHMDistributed, dict(vllm.envs.environment_variables)
    monkeypatch.setenv("FAST_ALLREDUCE_VLLM", "cpu")
    for where, name, other, reason in (
        (own, "all_reduce", lambda self, tensor: None, "SHMDistributed.all_reduce has the parameters (self, tensor)"),
        (own, "gather", lambda self, input, gather_list, dst=0, group=None, more=0: 0, "dst=0, group=None, more=0)"),
        (own, "__init__", lambda self: None, "_CPUSHMDistributed.__init__ has the parameters (self)"),
        (own, "reduce_scatter", lambda self: None, "_CPUSHMDistributed.reduce_scatter is unknown"),
        (cpu_communicator, "_CPUSHMDistributed", None, "cpu_communicator._CPUSHMDistributed is missing"),
        (sys.modules, "vllm.envs", types.ModuleType("vllm.envs"), "vllm.envs.environment_variables is missing"),
    ):
        with monkeypatch.context() as patch, Said(SAYS) as lines:
            if where is sys.modules:
                patch.setitem(where, name, other)
            elif other:
                patch.setattr(where, name, other, raising=False)
            else:
                patch.delattr(where, name)
            plugin("vllm.general_plugins")()
        (line,) = lines
        assert line.startswith("fast_allreduce is not used on cpu: ") and reason in line, line
        assert line.endswith("this plugin was written for vLLM 0.32.0 and 0.33.0")
    assert cpu_communicator._CPUSHMDistributed is own and vllm.envs.environment_variables == variables
