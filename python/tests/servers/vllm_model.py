"""A small Llama with random weights and a tokenizer, made on the spot. Token i is the word "wi"."""

import json

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 512, 128, 256, 4, 2, 32, 2

# Tokens that a run generates for each prompt.
STEPS = 24

# More than a block of vLLM's cache, so that it is reused, and than one step of the HTTP servers takes.
_SHARED = [(5 * i * i + 3 * i) % VOCABULARY for i in range(150)]


def text_of(tokens):
    """Returns the text of tokens."""
    return " ".join(f"w{token}" for token in tokens)


# Of different lengths. They share their beginning, and end with a repetition, which ngram speculation can find.
PROMPTS = [text_of(_SHARED + [(7 * i + 3 * j) % VOCABULARY for j in range(5 + 9 * i)] * 2) for i in range(8)]


def make_model(folder):
    """Writes the model and the tokenizer to a folder."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

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
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
