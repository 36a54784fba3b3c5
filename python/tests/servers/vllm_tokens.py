"""Runs vLLM for CPUs between two ranks, with and without the plugin. The tokens must be the same.

`scripts/test-vllm.sh` runs it. The model is a Llama with two layers and random weights, which is made on the spot;
prompts are numbers, so no tokenizer is needed. vLLM runs with its default settings, which compile the model, and with
enforce_eager.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Limit of one run in seconds. On a busy machine compilation takes minutes.
LIMIT = 1800
USED = "is used for the group tp:0"

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 512, 128, 256, 4, 2, 32, 2
STEPS = 24


def make_model(folder):
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "lm_head.weight": random(VOCABULARY, HIDDEN)}
    weights["model.norm.weight"] = 1 + random(HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": 1 + random(HIDDEN),
            f"{name}.post_attention_layernorm.weight": 1 + random(HIDDEN),
            f"{name}.self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def calls_made(worker):
    """Returns, in a worker, the number of calls of the plugin's communicator, or None if vLLM runs its own."""
    from vllm.distributed.parallel_state import get_tp_group

    ranks = getattr(get_tp_group().device_communicator.dist_module, "_ranks", None)
    return ranks and ranks.counters().calls


def generate(model, output, eager):
    """Writes the generated tokens to a file, in a separate process."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=256, enforce_eager=eager)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % VOCABULARY for j in range(5 + 40 * i)]} for i in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    tokens = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, sampling)]
    Path(output).write_text(json.dumps([tokens, llm.collective_rpc(calls_made)]))


def tokens_of(folder, plugin, eager):
    name = f"{'plugin' if plugin else 'vllm'}-{'eager' if eager else 'compiled'}"
    output, log = folder / f"{name}.json", folder / f"{name}.log"
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        # Lets functions be sent to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # Shared by all runs, so that one could reuse another's compiled code.
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "FAST_ALLREDUCE_VLLM": "cpu" if plugin else "",
    }
    command = [sys.executable, __file__, str(folder / "model"), str(output), "eager" if eager else "compiled"]
    started = time.monotonic()
    with log.open("w") as file:
        # A separate process group, which can be killed as a whole.
        run = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = run.wait(LIMIT)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, 9)
    said = log.read_text()
    used = said.count(USED)
    said_so = f"{used} ranks said that the plugin is used"
    print(f"{name}: status {status} after {time.monotonic() - started:.0f} s, {said_so}", flush=True)
    if status != 0:
        print(said[-6000:])
    assert status == 0, name
    # Once for each rank, whatever its number of calls.
    assert used == (2 if plugin else 0), f"{name}: {USED!r} is {used} times in its log"
    tokens, calls = json.loads(output.read_text())
    if plugin:
        # Each step makes one call for the embedding, two for a layer, and one for the logits.
        assert calls[0] == calls[1] >= STEPS * (2 + 2 * LAYERS), calls
    else:
        assert calls == [None, None], calls
    return tokens


def left_behind():
    """Returns the names in shared memory of this library and vLLM."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("fast-allreduce", "vllm_dist"))}


def main():
    before = left_behind()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "model").mkdir()
        make_model(folder / "model")
        for eager in (False, True):
            own, with_plugin = (tokens_of(folder, plugin, eager) for plugin in (False, True))
            assert len(own) == 4 and all(len(tokens) == STEPS for tokens in own), own
            assert len({token for tokens in own for token in tokens}) > 20, "a model that says one thing shows nothing"
            assert with_plugin == own, (with_plugin, own)
        # vLLM's own operators leave shared memory behind.
        for name in left_behind() - before:
            assert name.startswith("vllm_dist"), name
            os.unlink(f"/dev/shm/{name}")
        kept = list((folder / "cache").glob("torch_compile_cache/torch_aot_compile/*"))
        # Code compiled with different operators has different keys.
        assert len(kept) == 2, kept
    print("the same tokens in all runs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(*sys.argv[1:3], eager=sys.argv[3] == "eager")
    else:
        main()
