"""Runs SGLang's parallel groups on CPU ranks with the plugin: its own classes, as its plugin registry hooks them.

`scripts/test-sglang.sh` runs it. SGLang's engine is not started: it needs functions of `sgl_kernel` for CPUs, which no
wheel has. Its groups only import modules that import these functions.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import types

LIMIT = 600


class Kernels(types.ModuleType):
    """A module that has every name, for imports."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def rank(rank, nranks, path, used):
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["FAST_ALLREDUCE_SGLANG"] = "cpu" if used else ""
    sys.modules["sgl_kernel"] = Kernels("sgl_kernel")
    import torch
    from sglang.srt.distributed import (
        parallel_state,
        tensor_model_parallel_all_gather,
        tensor_model_parallel_all_reduce,
    )
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_parallel

    torch.set_num_threads(1)
    # SGLang's processes do this first, and find the plugin by its entry point.
    load_plugins()
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(nranks, rank, f"file://{path}", rank, "gloo")
    widths = ("pp_size", "moe_ep_size", "attn_dp_size", "attn_cp_size", "moe_dp_size", "attn_dcp_size")
    get_parallel().override_permanently(
        tp_size=nranks, attn_tp_size=nranks, moe_tp_size=nranks, dcp_enabled=False, shared_experts_tp_size=None,
        **dict.fromkeys(widths, 1),
    )  # fmt: skip
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_tp_group()
    communicator = getattr(group, "fast_allreduce", None)
    assert (communicator is not None) == used, communicator

    def values(rank, *shape, dtype):
        return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def in_rank_order(*shape, dtype):
        total = torch.zeros(shape)
        for other in range(nranks):
            total += values(other, *shape, dtype=dtype).float()
        return total.to(dtype)

    calls = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((3,), (16, 4096), (2, 0), (600, 1024)):
            data = values(rank, *shape, dtype=dtype)
            assert tensor_model_parallel_all_reduce(data) is data
            if used:
                assert torch.equal(data, in_rank_order(*shape, dtype=dtype))
            else:
                torch.testing.assert_close(data, in_rank_order(*shape, dtype=dtype), rtol=0.02, atol=0.05)
        columns = values(rank, 6, 4, dtype=dtype)
        # Both sum a view in place.
        tensor_model_parallel_all_reduce(columns[:3])
        torch.testing.assert_close(columns[:3], in_rank_order(6, 4, dtype=dtype)[:3], rtol=0.02, atol=0.05)
        assert torch.equal(columns[3:], values(rank, 6, 4, dtype=dtype)[3:])
        for dim in (0, 1, -1):
            parts = [values(other, 2, 3, 5, dtype=dtype) for other in range(nranks)]
            assert torch.equal(tensor_model_parallel_all_gather(parts[rank], dim), torch.cat(parts, dim))
        calls += 8
    numbers = torch.arange(5) + rank
    assert torch.equal(tensor_model_parallel_all_reduce(numbers.clone()), torch.arange(5) * nranks + sum(range(nranks)))
    if used:
        assert communicator.counters().calls == calls + 1, communicator.counters().calls

        def layer(hidden):
            hidden = tensor_model_parallel_all_reduce(hidden * 2)
            return tensor_model_parallel_all_gather(hidden.relu(), -1)

        hidden = values(rank, 4, 8, dtype=torch.float32)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(hidden), layer(hidden))
    parallel_state.destroy_model_parallel()
    assert communicator is None or not communicator.is_valid
    parallel_state.destroy_distributed_environment()


def main():
    context = multiprocessing.get_context("spawn")
    for nranks, used in ((2, False), (2, True), (3, True)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (nranks, os.path.join(folder, "store"), used)
            ranks = [context.Process(target=rank, args=(one, *arguments)) for one in range(nranks)]
            for process in ranks:
                process.start()
            end = time.monotonic() + LIMIT
            for process in ranks:
                process.join(max(end - time.monotonic(), 0))
            exits = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
        if any(exits):
            sys.exit(f"{nranks} ranks, plugin {used}: the ranks ended with {exits}")
        print(f"{nranks} ranks, {'with the plugin' if used else 'without it'}: as expected", flush=True)


if __name__ == "__main__":
    main()
