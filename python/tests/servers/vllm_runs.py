"""Starts vLLM, offline and as an HTTP server, and checks that nothing is left of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from vllm_model import STEPS

HERE = Path(__file__).parent

# Where the processes of a run find this folder and the package.
PATH = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

# Limit in seconds of a start, and of whatever ends. Compilation takes minutes on a busy machine.
LIMIT = 900

# Seconds within which clients have an answer and the server has ended, after a worker's death or SIGTERM.
SOON = 180


def wait_for(condition, limit, what):
    """Waits until a condition holds. Returns its value."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit} s"
        time.sleep(0.1)
    return value


class Started:
    """A process of vLLM with all of its children, in a session of their own."""

    def __init__(self, folder, name, command, plugin, **environment):
        self.log = folder / f"{name}.log"
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
            # vLLM leaves its sockets there.
            "VLLM_RPC_BASE_PATH": str(folder),
            # Shared by all runs, so that one could reuse another's compiled code.
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "FAST_ALLREDUCE_VLLM": plugin,
            "PYTHONPATH": PATH,
        } | environment  # fmt: skip
        # What the run's processes have mapped in /dev/shm.
        self.names = set()
        self.started = time.monotonic()
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self):
        """Returns the log, in which lines are not broken."""
        return self.log.read_text(errors="replace")

    def used(self, group="tp:0"):
        """Returns how often the log says that the plugin is used for a group."""
        return self.said().count(f"is used for the group {group}: rank")

    def alive(self):
        """Returns the ids of the run's processes."""
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and self._is_ours(entry)]

    def _is_ours(self, entry):
        try:
            # vLLM gives its processes titles, which overwrite their environments. A zombie has ended.
            state, _, _, session, *_ = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return int(session) == self.process.pid and state != "Z"

    def look(self):
        """Notes the names in /dev/shm that the run's processes have mapped."""
        for process in self.alive():
            try:
                self.names |= set(re.findall(r"/dev/shm/(\S+)\n", Path(f"/proc/{process}/maps").read_text()))
            except OSError:
                pass

    def end(self, limit=LIMIT):
        """Waits for the process and its children. Returns its exit status and what is left in /dev/shm."""

        def has_ended():
            self.look()
            return self.process.poll() is not None

        wait_for(has_ended, limit, f"{self.log.stem} ends")
        wait_for(lambda: not self.alive(), SOON, f"processes {self.alive()} of {self.log.stem} end")
        return self.process.returncode, self.names & set(os.listdir("/dev/shm"))

    def kill(self):
        """Ends whatever is left."""
        for process in self.alive():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def offline(folder, name, plugin="", environment=None, **settings):
    """Returns a run's texts, as lists of words, its workers' numbers of calls, those by method if the environment asks
    for fused calls, and the run.
    """
    output = folder / f"{name}.json"
    settings = {"tensor_parallel_size": 2, "dtype": "float32", **settings}
    command = [sys.executable, str(HERE / "vllm_offline.py"), str(folder / "model"), str(output), json.dumps(settings)]
    # The engine runs in this process, which saves an import of several seconds. The servers' engines run in their own.
    run = Started(folder, name, command, plugin, VLLM_ENABLE_V1_MULTIPROCESSING="0", **(environment or {}))
    try:
        status, left = run.end()
    finally:
        run.kill()
    print(f"{name}: status {status} after {time.monotonic() - run.started:.0f} s")
    assert status == 0, run.said()[-6000:]
    assert run.names or settings["tensor_parallel_size"] == 1, "no shared memory: nothing was watched"
    for own in left:
        # vLLM's own operators leave shared memory behind.
        os.unlink(f"/dev/shm/{own}")
    assert not left or not run.used() and all(one.startswith("vllm_dist") for one in left), left
    return *json.loads(output.read_text()), run


class Server(Started):
    """An HTTP server with vLLM's interface of OpenAI."""

    def __init__(self, folder, name, port, *arguments):
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
        command += ["--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--tensor-parallel-size", "2", "--max-model-len", "4096", "--dtype", "float32"]
        command += ["--worker-extension-cls", "vllm_worker.Asked", *arguments]
        # The mode for developers has the path that calls methods of workers.
        super().__init__(folder, name, command, "cpu", VLLM_SERVER_DEV_MODE="1")

    def __enter__(self):
        try:
            wait_for(self._is_ready, LIMIT, f"{self.log.stem} is ready")
        except BaseException:
            self.kill()
            raise
        print(f"{self.log.stem}: ready after {time.monotonic() - self.started:.0f} s")
        self.pids = [int(one) for one in self.of_workers("process_id")]
        self.look()
        assert self.names, "no shared memory: nothing is watched"
        return self

    def __exit__(self, *_):
        self.kill()

    def _is_ready(self):
        assert self.process.poll() is None, self.said()[-6000:]
        try:
            return self.ask("/health") is not None
        except OSError:
            return False

    def ask(self, path, body=None):
        """Returns a response as text. Raises `OSError` for errors."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT) as response:
            return response.read().decode()

    def of_workers(self, method):
        """Returns what a method of each worker returns."""
        return json.loads(self.ask("/collective_rpc", {"method": method}))["results"]

    def metric(self, name):
        """Returns the value of a metric."""
        return float(re.search(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.ask("/metrics"), re.MULTILINE)[1])

    def complete(self, prompt, steps=STEPS):
        """Returns the words that follow a prompt."""
        body = {"model": "small", "prompt": prompt, "max_tokens": steps, "temperature": 0, "ignore_eos": True}
        return json.loads(self.ask("/v1/completions", body))["choices"][0]["text"].split()

    def begin(self, prompts, steps=STEPS, repeats=False):
        """Asks for all prompts concurrently, again and again until an error if `repeats`. Returns a function that
        returns the last answers: words or the error.
        """
        answers = [None] * len(prompts)

        def one(index):
            try:
                while True:
                    answers[index] = self.complete(prompts[index], steps)
                    if not repeats:
                        break
            except Exception as error:  # the test judges what a client gets
                answers[index] = error

        clients = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(prompts))]
        for client in clients:
            client.start()

        def finish(limit=LIMIT):
            end = time.monotonic() + limit
            for client in clients:
                client.join(max(0, end - time.monotonic()))
            return answers

        return finish
