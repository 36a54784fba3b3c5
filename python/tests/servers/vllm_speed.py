"""Measures the plugin inside vLLM for CPUs, between two ranks: calls, and tokens per second.

`calls` runs one server, and switches between the ways in its workers, round by round: an allreduce; an allreduce with
the addition of the residual and an RMSNorm. It prints medians of the times and of the rounds' ratios, with their range.
`tokens` runs servers in turns: vLLM's own, the plugin without fused calls, and the plugin. It runs in vLLM's
environment (`scripts/test-vllm.sh`), with this package on PYTHONPATH. The machine should be idle.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import vllm_model

SIZES = (1 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
ROWS, HIDDEN = (1, 4, 16, 64), 4096
WAYS = {"vLLM": ("", "0"), "plugin": ("cpu", "0"), "plugin, fused": ("cpu", "1")}


def times(worker, rounds):
    """In a worker: returns microseconds by case, round and way."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    ours = communicator.dist_module
    # vLLM's own class, next to the one that replaces it.
    own = type(ours).__mro__[2](communicator)
    ranks, fused = ours._ranks, torch.ops.fast_allreduce.direct.allreduce_rms_norm
    native = __import__("vllm.ir.ops", fromlist=["ops"]).fused_add_rms_norm.impls["native"].impl_fn

    def timed(step, count):
        step()
        torch.distributed.barrier(communicator.device_group)
        ranks.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        return 1e6 * (time.perf_counter() - start) / count

    def reduced(size):
        data = torch.zeros(size // 2, dtype=torch.bfloat16)
        return {"vLLM": lambda: own.all_reduce(data), "ours": lambda: ours.all_reduce(data)}

    def normed(rows):
        data, residual = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16)

        def kernel():
            own.all_reduce(data)
            torch.ops._C.fused_add_rms_norm(data, residual, weight, 1e-5)

        def written():
            own.all_reduce(data)
            native(data, residual, weight, 1e-5)

        def operator():
            fused(data, residual, weight, ranks.name, 1e-5)

        def call():
            ranks.allreduce_fused(data, residual=residual, norm="rms", weight=weight, epsilon=1e-5)

        return {"vLLM": kernel, "vLLM, eager": written, "ours, in a graph": operator, "ours": call}

    results = {}
    with torch.no_grad():
        cases = [(f"{size} bytes", reduced(size), size) for size in SIZES]
        cases += [(f"{rows} rows", normed(rows), 4 * rows * HIDDEN) for rows in ROWS]
        for case, ways, size in cases:
            count = max(10, min(200, (8 << 20) // size))
            results[case] = [{way: timed(step, count) for way, step in ways.items()} for _ in range(rounds)]
    return results


def engine(folder, eager):
    from vllm import LLM

    return LLM(
        folder, skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=1024, enable_prefix_caching=False,
        enforce_eager=eager,
    )  # fmt: skip


def calls(folder, output, rounds, eager):
    Path(output).write_text(json.dumps(engine(folder, eager).collective_rpc(times, args=(rounds,))[0]))


def tokens(folder, output, rounds, eager):
    """In a process of its own: writes tokens per second of each repetition, by case."""
    from vllm import SamplingParams

    llm = engine(folder, eager)
    found = {}
    for _ in range(rounds + 1):
        for case, batch, prompt, steps in (("decode 1", 1, 8, 96), ("decode 4", 4, 8, 96), ("prefill 512", 1, 512, 1)):
            prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 512 for j in range(prompt)]} for i in range(batch)]
            sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            made = batch * (steps if steps > 1 else prompt)
            found.setdefault(case, []).append(made / (time.perf_counter() - start))
    # The first repetition warms up.
    Path(output).write_text(json.dumps({case: rates[1:] for case, rates in found.items()}))


def run(folder, mode, way, rounds, eager):
    plugin, fused = WAYS[way]
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_RPC_BASE_PATH": str(folder), "FAST_ALLREDUCE_VLLM": plugin,
        "FAST_ALLREDUCE_VLLM_FUSION": fused,
    }  # fmt: skip
    output = folder / "output.json"
    arguments = ["--folder", str(folder), "--rounds", str(rounds), "--output", str(output)]
    arguments += ["--eager"] if eager else []
    command = [sys.executable, __file__, mode, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())


def middle(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main(options):
    with tempfile.TemporaryDirectory() as kept:
        folder = options.folder or Path(kept)
        (folder / "model").mkdir(exist_ok=True)
        vllm_model.HIDDEN, vllm_model.INNER, vllm_model.LAYERS = options.hidden, 2 * options.hidden, options.layers
        vllm_model.HEADS, vllm_model.KV_HEADS, vllm_model.HEAD = options.hidden // 64, options.hidden // 128, 64
        vllm_model.make_model(folder / "model")
        config = json.loads((folder / "model/config.json").read_text())
        config |= {"torch_dtype": "bfloat16", "max_position_embeddings": 1024}
        (folder / "model/config.json").write_text(json.dumps(config))
        if options.mode == "calls":
            print("case | us, by way | vLLM's over ours")
            for case, rounds in run(folder, "calls", "plugin", options.rounds, True).items():
                shown = ", ".join(f"{way} {middle([one[way] for one in rounds])}" for way in rounds[0])
                ratios = [middle([one[way] / one["ours"] for one in rounds]) for way in rounds[0] if "vLLM" in way]
                print(f"{case} | {shown} | {'; '.join(ratios)}", flush=True)
            return
        found = {}
        for turn in range(options.turns):
            for way in WAYS:
                rates = run(folder, "tokens", way, options.rounds, options.eager)
                print(turn, way, {case: middle(values, 1) for case, values in rates.items()}, flush=True)
                for case, values in rates.items():
                    found.setdefault(case, {}).setdefault(way, []).append(statistics.median(values))
        how = "eager" if options.eager else "compiled"
        print(f"Llama, {options.layers} layers, hidden {options.hidden}, bf16, {how}; tokens/s, medians of the turns")
        for case, rates in found.items():
            print(f"{case} | " + " | ".join(f"{way} {middle(values, 1)}" for way, values in rates.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["calls", "tokens"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="does not compile the model, for `tokens`")
    parser.add_argument("--folder", type=Path, help="keeps the model and compiled code here")
    # Of the processes that this program starts.
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        globals()[options.mode](str(options.folder / "model"), options.output, options.rounds, options.eager)
    else:
        main(options)
