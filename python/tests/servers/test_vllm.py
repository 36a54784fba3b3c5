"""vLLM for CPUs with the plugin (`scripts/test-vllm.sh`): the tokens are those of vLLM's own shared memory and of one
rank, offline and over HTTP, and failures leave nothing behind."""

import http.client
import os
import signal
import socket
import time

import pytest
from vllm_model import LAYERS, PROMPTS, STEPS, make_model
from vllm_runs import PATH, SOON, Server, offline, wait_for

# Each step makes one call for the embedding, two for a layer, and one for the logits.
CALLS = STEPS * (2 + 2 * LAYERS)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "model").mkdir()
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
def one_rank(folder):
    """Returns the words that one rank generates, in f32."""
    words, *_ = offline(folder, "one-rank", tensor_parallel_size=1, enforce_eager=True)
    assert len(words) == len(PROMPTS) and all(len(one) == STEPS for one in words), words
    assert len({word for one in words for word in one}) > 20, "a model that says one thing shows nothing"
    return words


@pytest.fixture(scope="session")
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def check_use(calls, run, least=CALLS, group="tp:0"):
    """Fails unless both workers made the same number of calls, at least `least`, and said so once."""
    assert calls[0] == calls[1] >= least, calls
    assert run.used(group) == 2, run.said()


def check_fusion(counted):
    """Fails unless, in each step, the sums of all layers were fused calls, and that of the embedding was not."""
    for counts in counted:
        # A step ends with an all-gather of the logits.
        steps = counts["allgather"]
        assert steps >= STEPS and counts["allreduce"] == steps, counts
        assert counts["allreduce_fused"] == 2 * LAYERS * steps, counts


@pytest.mark.parametrize(
    ("mode", "dtype"), [pytest.param("eager", "bfloat16", marks=pytest.mark.nightly), ("compiled", "float32")]
)
def test_offline(folder, mode, dtype, request):
    settings = {"enforce_eager": mode == "eager", "dtype": dtype}
    own, no_calls, _, run = offline(folder, f"own-{mode}", **settings)
    assert no_calls == [None, None] and run.used() == 0
    # A fused call rounds less often than vLLM's three steps, which shows in bf16.
    environment = {"FAST_ALLREDUCE_VLLM_FUSION": "1" if dtype == "float32" else "0"}
    found, calls, counted, run = offline(folder, f"plugin-{mode}", "cpu", environment, **settings)
    check_use(calls, run)
    assert found == own
    if dtype == "float32":
        check_fusion(counted)
        assert found == request.getfixturevalue("one_rank")
    if mode == "compiled":
        # Code compiled with different operators has different keys.
        kept = list((folder / "cache").glob("torch_compile_cache/torch_aot_compile/*"))
        assert len(kept) == 2, kept


@pytest.mark.nightly
def test_pipeline(folder, one_rank):
    # Compiled: with enforce_eager, stages of this vLLM have nothing to receive into.
    found, calls, _, run = offline(folder, "pipeline", "cpu", tensor_parallel_size=1, pipeline_parallel_size=2)
    assert found == one_rank
    # A launch for the length, one for the names, and one for the tensors of each step.
    check_use(calls, run, STEPS, "pp:0")


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


def check_answers(server, expected):
    """Eight clients at once, twice, get the expected words, from the plugin's calls."""
    for _ in range(2):
        assert server.begin(PROMPTS)() == expected
    # Speculation and batches make several tokens in a step.
    check_use([int(calls) for calls in server.of_workers("calls_made")], server, CALLS // 4)


def kill_worker(server, rank):
    """Kills a worker while eight clients ask. All clients get an error, the server ends, and the log says why."""
    # However fast the server is, its clients have not finished when the worker dies: they ask again.
    finish = server.begin(PROMPTS, steps=3000, repeats=True)
    wait_for(lambda: server.metric("vllm:num_requests_running") > 0, SOON, "requests run")
    assert server.metric("fast_allreduce_calls_total") > 0
    calls = server.of_workers("calls_made")
    wait_for(lambda: server.of_workers("calls_made") != calls, SOON, "calls are made")
    start = time.monotonic()
    os.kill(server.pids[rank], signal.SIGKILL)
    answers = finish(SOON)
    answered = time.monotonic() - start
    _, left = server.end(SOON)
    print(f"{server.log.stem}: answers after {answered:.1f} s, ended after {time.monotonic() - start:.1f} s")
    # Status 500 or, if the server has ended before it answers, a closed connection.
    errors = OSError, http.client.HTTPException
    assert all(isinstance(answer, errors) and getattr(answer, "code", 500) == 500 for answer in answers), answers
    assert not left, left
    assert "died unexpectedly" in server.said()


def test_http_and_a_killed_first_worker(folder, port, one_rank):
    # A step takes fewer tokens than a prompt has.
    chunks = ("--enable-prefix-caching", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    with Server(folder, "http-chunks", port, *chunks) as server:
        check_answers(server, one_rank)
        assert server.metric("vllm:prefix_cache_hits_total") > 0
        assert "Chunked prefill is enabled with max_num_batched_tokens=64" in server.said()
        kill_worker(server, 0)


@pytest.mark.nightly
def test_http_restarted_with_speculation_and_a_killed_second_worker(folder, port, one_rank):
    with Server(folder, "http-ngram", port, "--speculative-config", NGRAM) as server:
        check_answers(server, one_rank)
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        kill_worker(server, 1)


def test_http_restarted_and_terminated(folder, port, one_rank):
    with Server(folder, "http-eager", port, "--enforce-eager") as server:
        server.ask("/collective_rpc", {"method": "count_calls"})
        check_answers(server, one_rank)
        check_fusion(server.of_workers("counted"))
        # Without running requests: vLLM may wait for their connections after its engine has ended.
        server.process.terminate()
        status, left = server.end(SOON)
        assert status == 0 and not left, (status, left)


CHANGED = '''
import multiprocessing
import os

def register():
    """Gives vLLM's class for CPUs a method that this project does not know."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    if multiprocessing.current_process().name in os.environ["CHANGED"].split(","):
        _CPUSHMDistributed.reduce_scatter = lambda self, output, input: None
'''


@pytest.mark.parametrize(
    "changed", [pytest.param("VllmWorker-0,VllmWorker-1", marks=pytest.mark.nightly), "VllmWorker-1"]
)
def test_another_interface(folder, one_rank, changed):
    """A plugin of vLLM that is loaded before this one changes a class on all ranks, or on one."""
    plugin = folder / "changed"
    (plugin / "changed-1.dist-info").mkdir(parents=True, exist_ok=True)
    (plugin / "changed.py").write_text(CHANGED)
    (plugin / "changed-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: changed\nVersion: 1\n")
    (plugin / "changed-1.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nchanged = changed:register\n"
    )
    environment = {"CHANGED": changed, "PYTHONPATH": os.pathsep.join([str(plugin), PATH])}
    count = len(changed.split(","))
    found, calls, _, run = offline(folder, f"changed-on-{count}", "cpu", environment, enforce_eager=True)
    assert calls == [None, None] and run.used() == 0, calls
    assert found == one_rank
    reason = "fast_allreduce is not used on cpu: _CPUSHMDistributed.reduce_scatter is unknown"
    assert run.said().count(reason) == count, run.said()
    # vLLM compares the ranks' names of the group's shared memory.
    assert ("ranks do not share the same SHM group name" in run.said()) == (count == 1), run.said()
