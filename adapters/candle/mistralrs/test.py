#!/usr/bin/env python3
"""Serves a random model with mistral.rs on one, two and three CPU ranks, and compares the tokens.

    test.py SERVER

SERVER is the program that scripts/test-mistralrs.sh builds. It also kills ranks, and checks that clients get an answer
that names the rank, that no process is left, and that /dev/shm is as before."""

import array
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# Numbers of heads and channels that two and three ranks divide.
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 192, 12, 6, 384, 4
BYTES = 256
BEGIN, END = BYTES, BYTES + 1
VOCABULARY = BYTES + 2
# A limit for everything that is expected to happen soon, in seconds.
SOON = 120


def write_model(folder):
    """Writes a Llama with random weights, and a tokenizer with a token for each byte."""
    rng = random.Random(34)
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                "mlp.up_proj": (INTERMEDIATE, HIDDEN),
                "mlp.down_proj": (HIDDEN, INTERMEDIATE),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = array.array("f", [1.0]) * shape[0]
        else:
            scale = 2 * shape[1] ** -0.5
            values = array.array("f", (rng.uniform(-scale, scale) for _ in range(shape[0] * shape[1])))
        if name == "lm_head.weight":
            # Logits of 0 for all but printable characters: the text of an answer shows its tokens.
            for token in (*range(0x21), *range(0x7F, VOCABULARY)):
                values[token * HIDDEN : (token + 1) * HIDDEN] = array.array("f", bytes(4 * HIDDEN))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
        data += values.tobytes()
    packed = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed + data)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    # GPT-2's characters for bytes: printable ones stand for themselves, others for characters from 256 on.
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in itself else next(others)): byte for byte in range(BYTES)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": BEGIN, "content": "<s>", **special}, {"id": END, "content": "</s>", **special}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def wait_until(what, condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, f"not within {SOON} s: {what}"
        time.sleep(0.02)


def daemons(process):
    """Returns the processes of ranks 1 and following, in the order of the ranks. The server may have several threads
    that start processes."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == b"__MISTRALRS_DAEMON_INTERNAL":
                    found[json.loads(value)["Init"]["worker_rank"]] = int(child)
    return [found[rank] for rank in sorted(found)]


def gone(process):
    """Returns whether a process has ended. One that nobody has waited for counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Server:
    def __init__(self, program, model, ranks, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "RUST_LOG": "info", "NO_COLOR": "1"}
        environment.pop("MISTRALRS_MN_LOCAL_WORLD_SIZE", None)
        if ranks > 1:
            environment["MISTRALRS_MN_LOCAL_WORLD_SIZE"] = str(ranks)
        self.process = subprocess.Popen(
            [program, str(model), self.address], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_until("the server answers", self.answers)
            self.daemons = daemons(self.process.pid)
            assert len(self.daemons) == ranks - 1, self.daemons
        except BaseException:
            self.process.kill()
            raise

    def answers(self):
        assert self.process.poll() is None, f"the server ended: {self.process.returncode}"
        try:
            return urllib.request.urlopen(f"http://{self.address}/health", timeout=SOON).status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def complete(self, prompt, tokens=16, **options):
        """Returns the status and the body of an answer, and the seconds that it took."""
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, **options}
        request = urllib.request.Request(
            f"http://{self.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=SOON) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, text, time.monotonic() - start

    def text(self, prompt, **options):
        status, text, _ = self.complete(prompt, **options)
        assert status == 200, text
        choice = json.loads(text)["choices"][0]
        assert choice["finish_reason"] == "length", text
        return choice["text"]


@contextmanager
def serve(program, model, ranks):
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryFile("w+") as log:
        server = None
        try:
            server = Server(program, model, ranks, log)
            server.log = lambda: (log.seek(0), log.read())[1]
            yield server
        except BaseException:
            log.seek(0)
            print(f"--- the log of {ranks} ranks\n{log.read()}---", flush=True)
            raise
        finally:
            if server:
                server.process.terminate()
                server.process.wait(SOON)
                wait_until("all ranks have ended", lambda: all(map(gone, server.daemons)))
    # Other programs of the machine have files there as well.
    left = {name for name in set(os.listdir("/dev/shm")) - shared if re.match("fast-allreduce|mistral", name)}
    assert not left, f"left in /dev/shm: {left}"


PROMPTS = ["The quick brown fox", "a", "0123456789" * 8, "x = [", "!?"]


def answers(server):
    """Returns the answers to each prompt alone, then to all at the same time."""
    alone = [server.text(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        together = list(clients.map(server.text, PROMPTS))
    return alone, together


def client_that_leaves(server):
    """Begins to read a stream and closes the connection."""
    host, _, port = server.address.partition(":")
    body = json.dumps({"model": "default", "prompt": "leaves", "max_tokens": 40, "temperature": 0.0, "stream": True})
    with socket.create_connection((host, int(port)), timeout=SOON) as stream:
        stream.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"200 OK" in stream.recv(1 << 16)


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        with serve(program, model, 1) as server:
            expected, together = answers(server)
            assert together == expected
        assert len(set(expected)) == len(PROMPTS) and all(len(text) == 16 for text in expected), expected
        for ranks in (2, 3):
            start = time.monotonic()
            with serve(program, model, ranks) as server:
                client_that_leaves(server)
                assert answers(server) == (expected, expected)
                # Sampled tokens: rank 0 answers, and all ranks continue with the same ones.
                sampled = server.text("random", temperature=1.0, top_k=20)
                assert len(sampled) == 16, sampled
                assert server.text(PROMPTS[0]) == expected[0]
            print(f"{ranks} ranks: the tokens of one rank ({time.monotonic() - start:.1f} s)", flush=True)
        killed_rank(program, model)
        killed_server(program, model)


def killed_rank(program, model):
    with serve(program, model, 3) as server, ThreadPoolExecutor(1) as client:
        before = cpu_time(server.daemons[0])
        answer = client.submit(server.complete, "long", tokens=3000)
        wait_until("the request runs", lambda: cpu_time(server.daemons[0]) > before + 0.2)
        os.kill(server.daemons[0], signal.SIGKILL)
        killed = time.monotonic()
        status, text, _ = answer.result(SOON)
        first = time.monotonic() - killed
        assert status != 200 and "rank 1" in text, (status, text)
        status, text, second = server.complete("again")
        assert status != 200 and "rank 1" in text, (status, text)
        assert first < 30 and second < 30, (first, second)
        assert f"rank 1 (process {server.daemons[0]}) has ended" in server.log()
    print(f"a killed rank is named in the answers, after {first:.2f} and {second:.2f} s: {text}", flush=True)


def cpu_time(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def killed_server(program, model):
    with serve(program, model, 3) as server:
        server.process.kill()
        server.process.wait(SOON)
    print("no rank outlives a killed server", flush=True)


if __name__ == "__main__":
    main()
