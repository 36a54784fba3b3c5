"""Runs an unchanged model of transformers with `tp_plan="auto"` between CPU ranks over this backend.

`scripts/test-transformers.sh` runs it. The model is a Llama with random weights, in f32; decoding is greedy. The tokens
must be those of one rank. With `--rounds` it also measures: one rank with one thread, this backend, gloo, and one rank
with as many threads as there are ranks, in turns. Processes that are not measured wait for their turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# Limit of the whole program in seconds.
LIMIT = 900
VOCABULARY, PROMPT, STEPS = 512, 11, 24


def make_model(folder, hidden, layers):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder, backend, threads):
    """In a process of its own: generates once per line of standard input, and prints tokens and ms per token."""
    import torch
    from transformers import AutoModelForCausalLM, DistributedConfig

    torch.set_num_threads(threads)
    if backend == "none":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = torch.distributed.FileStore(f"{folder}/{backend}", ranks)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        plan = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=plan)
        weight = model.model.layers[0].self_attn.q_proj.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        assert local.shape[0] * ranks == model.config.hidden_size, local.shape
    prompt = torch.arange(1, PROMPT + 1)[None]
    for _ in sys.stdin:
        start = time.perf_counter()
        output = model.generate(prompt, min_new_tokens=STEPS, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
        print(json.dumps([output[0].tolist(), 1e3 * (time.perf_counter() - start) / STEPS]), flush=True)
    if backend != "none":
        torch.distributed.destroy_process_group()


class Way:
    """The processes of one way to run the model."""

    def __init__(self, folder, backend, ranks, threads):
        self.backend = backend
        command = [sys.executable, __file__, "--model", folder, "--backend", backend, "--threads", str(threads)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        if backend != "none":
            environment["WORLD_SIZE"] = str(ranks)
        self.processes = [
            subprocess.Popen(
                command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(ranks if backend != "none" else 1)
        ]  # fmt: skip

    def generate(self):
        """Returns the tokens, which are the same on all ranks, and the milliseconds per token of rank 0."""
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        assert all(lines), f"{self.backend}: a rank has ended or took longer than {LIMIT} s"
        (tokens, per_token), *others = map(json.loads, lines)
        assert all(other[0] == tokens for other in others), f"{self.backend}: ranks have different tokens: {lines}"
        return tokens, per_token

    def end(self):
        for process in self.processes:
            process.stdin.close()
        statuses = [process.wait() for process in self.processes]
        assert not any(statuses), f"{self.backend}: exit statuses {statuses}"

    def kill(self):
        for process in self.processes:
            process.kill()


def main(options):
    before = set(os.listdir("/dev/shm"))
    ranks = options.ranks
    named = {"one rank": ("none", 1), f"{ranks} ranks, this backend": ("fast_allreduce", 1)}
    if options.rounds:
        named |= {f"{ranks} ranks, gloo": ("gloo", 1), f"one rank, {ranks} threads": ("none", ranks)}
    times = {name: [] for name in named}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, options.hidden, options.layers)
        ways = {}
        timer = threading.Timer(LIMIT, lambda: [way.kill() for way in ways.values()])
        timer.start()
        try:
            for name, (backend, threads) in named.items():
                ways[name] = Way(folder, backend, ranks, threads)
                # The first generation is not measured.
                ways[name].generate()
            expected, _ = ways["one rank"].generate()
            for _ in range(max(options.rounds, 1)):
                for name, way in ways.items():
                    tokens, per_token = way.generate()
                    assert tokens == expected, f"{name}: {tokens} instead of {expected}"
                    times[name].append(per_token)
            for way in ways.values():
                way.end()
        finally:
            timer.cancel()
            for way in ways.values():
                way.kill()
    assert options.rounds or len(set(expected)) > PROMPT + 5, "a model that repeats one token shows nothing"
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("fast-allreduce")}
    assert not left, left
    print(f"transformers: the same tokens from {', '.join(named)}")
    if options.rounds:
        model = f"Llama, {options.layers} layers, hidden {options.hidden}, f32"
        print(f"{model}; ms per token, median (range) of {options.rounds} rounds")
        for name, measured in times.items():
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
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        generate(options.model, options.backend, options.threads)
    else:
        main(options)
