"""Runs an unchanged model of transformers with `tp_plan="auto"` between CPU ranks, over this backend and over gloo.

`scripts/test-transformers.sh` runs it. The model is a Llama with random weights, in f32; decoding is greedy. The tokens
must be those of one rank. With `--rounds` it also measures: one rank, this backend and gloo in turns, each time in new
processes, and prints medians with their range.
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

# Limit of one run in seconds.
LIMIT = 900
VOCABULARY, PROMPT, STEPS = 512, 11, 24
BACKENDS = ("fast_allreduce", "gloo")


def make_model(folder, hidden, layers):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder, backend):
    """In a process of its own: prints the tokens and the milliseconds per token of a second generation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    rank = 0
    if backend == "none":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        torch.distributed.init_process_group(backend)
        rank = torch.distributed.get_rank()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
        weight = model.model.layers[0].self_attn.q_proj.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        assert local.shape[0] * torch.distributed.get_world_size() == model.config.hidden_size, local.shape
    prompt = torch.arange(1, PROMPT + 1)[None]
    for _ in range(2):
        start = time.perf_counter()
        output = model.generate(prompt, min_new_tokens=STEPS, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
        per_token = 1e3 * (time.perf_counter() - start) / STEPS
    if rank == 0:
        print("@" + json.dumps([output[0].tolist(), per_token]), flush=True)
    if backend != "none":
        torch.distributed.destroy_process_group()


def run(folder, backend, ranks):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--model", str(folder), "--backend", backend]
    if backend != "none":
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
        command[1:1] = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert done.returncode == 0 and len(lines) == 1, f"{backend}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return json.loads(lines[0][1:])


def main(options):
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, options.hidden, options.layers)
        times = {backend: [] for backend in ("none", *BACKENDS)}
        expected = None
        for _ in range(max(options.rounds, 1)):
            for backend, measured in times.items():
                tokens, per_token = run(folder, backend, options.ranks)
                expected = expected or tokens
                assert tokens == expected, f"{backend}: {tokens} instead of {expected}"
                measured.append(per_token)
    assert len(set(expected)) > PROMPT + 5, "a model that repeats one token shows nothing"
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("fast-allreduce")}
    assert not left, left
    print(f"the same tokens on one rank and on {options.ranks}, over {' and '.join(BACKENDS)}")
    if options.rounds:
        model = f"Llama, {options.layers} layers, hidden {options.hidden}, f32"
        print(f"{model}; ms per token, median (range) of {options.rounds} rounds")
        for backend, measured in times.items():
            name = "one rank" if backend == "none" else f"{options.ranks} ranks, {backend}"
            print(f"{name:30} {statistics.median(measured):6.1f} ({min(measured):.1f} to {max(measured):.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=0, help="measure in this many rounds")
    # Of the processes that this program starts.
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        generate(options.model, options.backend)
    else:
        main(options)
