"""Runs vLLM for CPUs between two ranks with the plugin's fused calls, compiled and eager, and counts them.

In f32 the tokens must be those of one rank and of the plugin without fused calls, with nearly the same probabilities.
`scripts/test-vllm.sh` prepares the environment that it runs in.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_tokens import LAYERS, STEPS, VOCABULARY, make_model

# Limit of one run in seconds. On a busy machine compilation takes minutes.
LIMIT = 1800


def count_calls(worker):
    """In a worker: counts the calls of the plugin's communicator from now on, by method."""
    from collections import Counter

    from fast_allreduce.operators import definitions
    from vllm.distributed.parallel_state import get_tp_group

    calls = get_tp_group().device_communicator.dist_module

    class Counted:
        def __init__(self):
            self.counts = Counter()

        def __getattr__(self, name):
            value = getattr(ranks, name)
            self.counts[name] += callable(value)
            return value

    ranks = calls._ranks
    worker.counted = calls._ranks = Counted()
    definitions.named = lambda name: worker.counted


def calls_made(worker):
    """In a worker: returns the counts since `count_calls`."""
    return dict(worker.counted.counts)


def generate(folder, output, ranks, eager):
    """In a process of its own: writes the tokens, their log probabilities and the counts to a file."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, tensor_parallel_size=ranks, max_model_len=256, enforce_eager=eager,
        distributed_executor_backend="mp", dtype="float32",
    )  # fmt: skip
    counts = os.environ["FAST_ALLREDUCE_VLLM"] and llm.collective_rpc(count_calls)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % VOCABULARY for j in range(5 + 40 * i)]} for i in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=1)
    results = [result.outputs[0] for result in llm.generate(prompts, sampling)]
    tokens = [list(result.token_ids) for result in results]
    chosen = [[row[token].logprob for row, token in zip(r.logprobs, r.token_ids)] for r in results]
    counts = counts and llm.collective_rpc(calls_made)
    Path(output).write_text(json.dumps([tokens, chosen, counts]))


def run(folder, name, ranks=2, eager=False, plugin=True, fused=True):
    """Returns the tokens, the log probabilities, the counts of each rank, and the log of a run."""
    output, log = folder / f"{name}.json", folder / f"{name}.log"
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in (cores[0], cores[-1])[:ranks]),
        # Lets functions be sent to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # Shared by all runs, so that one could reuse another's compiled code.
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "FAST_ALLREDUCE_VLLM": "cpu" if plugin else "",
        "FAST_ALLREDUCE_VLLM_FUSION": "1" if fused else "0",
    }
    command = [sys.executable, __file__, str(folder / "model"), str(output), str(ranks), "eager" if eager else ""]
    started = time.monotonic()
    with log.open("w") as file:
        # A separate process group, which can be killed as a whole.
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    print(f"{name}: status {status} after {time.monotonic() - started:.0f} s", flush=True)
    said = log.read_text()
    assert status == 0, said[-6000:]
    return *json.loads(output.read_text()), said


def check(folder):
    """Makes the runs, and checks them. `folder` has the model, in `model`."""
    tokens, chosen, _, _ = run(folder, "one-rank", ranks=1, eager=True, plugin=False)
    for name, eager, fused in (("plain", False, False), ("fused", False, True), ("fused-eager", True, True)):
        found, logprobs, counts, said = run(folder, name, eager=eager, fused=fused)
        assert found == tokens, (name, found, tokens)
        # A step makes one allreduce for the embedding, two for each layer, and an allgather of the logits.
        for count in counts:
            steps, plain, with_norm = (count.get(call, 0) for call in ("allgather", "allreduce", "allreduce_fused"))
            assert steps >= STEPS and plain + with_norm == (1 + 2 * LAYERS) * steps, (name, count)
            assert with_norm == (2 * LAYERS * steps if fused else 0), (name, count)
        far = max(abs(a - b) for row, other in zip(logprobs, chosen) for a, b in zip(row, other))
        print(f"{name}: calls {counts[0]}; log probabilities differ from one rank's by up to {far:.1e}", flush=True)
        assert far < 1e-3, (name, far)
        line = f"{2 * LAYERS} allreduces of a graph include the residual and the norm"
        assert said.count(line) == (2 if fused and not eager else 0), (name, said[-3000:])


def check_patterns():
    """Applies the pass to the graphs that vLLM's own fusion for GPUs looks for."""
    from unittest import mock

    import fast_allreduce.operators  # noqa: F401
    import torch
    from fast_allreduce.vllm.fusion import Fusion
    from torch._inductor import pattern_matcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import VllmConfig, set_current_vllm_config

    # The wheel for CPUs has not all operators that these modules name.
    library, allreduce_rms_fusion = torch.library.Library("_C", "FRAGMENT"), None
    while allreduce_rms_fusion is None:
        try:
            allreduce_rms_fusion = importlib.import_module("vllm.compilation.passes.fusion.allreduce_rms_fusion")
        except AttributeError as error:
            missing = re.search("'_C' object has no attribute '([a-z0-9_]+)'", str(error))
            library.define(f"{missing[1]}() -> ()")
    graphs = []

    def traced(pattern, _replacement, inputs, *_, **__):
        graphs.append(pattern_matcher.fwd_only(pattern, inputs).graph)

    replaced = {
        "get_tp_group": lambda: None,
        "get_tensor_model_parallel_world_size": lambda: 2,
        "tensor_model_parallel_all_reduce": lambda data: torch.ops.vllm.all_reduce(data, group_name="tp:0"),
    }
    known = ("AllReduceFusedAddRMSNorm", "AllReduceFusedAddGemmaRMSNorm", "AllReduceFusedAddRMSNormStaticQuantFP8")
    with (
        mock.patch.multiple(allreduce_rms_fusion, **replaced),
        mock.patch.object(pattern_matcher, "register_replacement", traced),
        set_current_vllm_config(VllmConfig()), FakeTensorMode(), torch.no_grad(),
    ):  # fmt: skip
        for name in known:
            kind = getattr(allreduce_rms_fusion, f"{name}Pattern")
            kind(1e-5, torch.bfloat16, "cpu", None).register(None)
            for graph in graphs:
                fuse = Fusion({"tp:0": "ours"}.get)
                fuse(graph)
                graph.lint()
                assert fuse.count == 1, graph
                (call,) = graph.find_nodes(
                    op="call_function", target=torch.ops.fast_allreduce.allreduce_rms_norm.default
                )
                assert call.args[3:] == ("ours", 1e-5, "Gemma" in name), call.args
            assert graphs, name
            graphs.clear()
    print(f"vLLM's patterns {', '.join(known)} become fused calls", flush=True)


def main():
    check_patterns()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "model").mkdir()
        make_model(folder / "model")
        check(folder)
    print("the same tokens in all runs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(*sys.argv[1:3], ranks=int(sys.argv[3]), eager=sys.argv[4] == "eager")
    else:
        main()
