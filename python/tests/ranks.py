"""Runs functions as the ranks of a world, each in a separate process, and returns what each rank returned or raised.

`on_ranks` makes a test of a function. `run` reuses processes for the next test, because importing torch takes seconds.
`start` is for ranks that die.
"""

import contextlib
import faulthandler
import inspect
import multiprocessing
import os
import pickle
import signal
import traceback

import pytest

import fast_allreduce as fa

LIMIT = 90

# Arguments that each rank gets here. The others are fixtures and parameters of pytest.
OF_RANKS = ("rank", "nranks", "unique_id", "communicator")

# A fork of a process with threads may hang, so ranks are spawned.
context = multiprocessing.get_context("spawn")


def on_ranks(*sizes, limit=LIMIT, setup=None):
    """Makes a test of a function, which runs as each rank of worlds of these sizes.

    The function takes any of `rank`, `nranks`, `unique_id` and `communicator`, and fixtures. `setup`, a picklable
    function of the rank, the number of ranks and the path of a store, returns a context manager around the call.
    """

    def decorate(function):
        names = [name for name in inspect.signature(function).parameters if name not in OF_RANKS]
        names += ["store_path"] if setup is not None and "store_path" not in names else []

        def test(nranks, **arguments):
            run(_as_rank, nranks, function, setup, arguments, limit=limit)

        # Ranks find the function by this path.
        function.__qualname__ += ".as_rank"
        test.as_rank, test.__doc__, test.__module__ = function, function.__doc__, function.__module__
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("nranks", *names)])
        return pytest.mark.parametrize("nranks", sizes)(test)

    return decorate


def _as_rank(rank, nranks, unique_id, function, setup, arguments):
    names = inspect.signature(function).parameters
    with contextlib.ExitStack() as stack:
        if setup is not None:
            stack.enter_context(setup(rank, nranks, arguments["store_path"]))
        arguments |= {"rank": rank, "nranks": nranks, "unique_id": unique_id}
        if "communicator" in names:
            communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=60)
            arguments["communicator"] = stack.enter_context(communicator)
        return function(**{name: arguments[name] for name in names})


def _result(function, rank, nranks, unique_id, arguments):
    try:
        return ("returned", function(rank, nranks, fa.UniqueId(unique_id), *arguments))
    except pytest.skip.Exception as reason:
        return ("skipped", str(reason))
    except BaseException as error:  # the test judges what a rank raises
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(repr(error))
        return ("raised", error, text)


def _rank(results, *call):
    results.send(_result(*call))


def _staying(calls):
    faulthandler.register(signal.SIGUSR2)
    while (call := calls.recv()) is not None:
        calls.send(_result(*call))


def start(function, nranks, *arguments):
    """Starts a process for each rank. Returns the processes with the pipes of their results."""
    unique_id = bytes(fa.get_unique_id())
    started = []
    for rank in range(nranks):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(send, function, rank, nranks, unique_id, arguments), daemon=True)
        process.start()
        send.close()
        started.append((process, receive))
    return started


def outcome(process, receive):
    """Returns a rank's outcome: ("returned", value), ("raised", error, text), ("skipped", reason) or ("ended", exit
    code)."""
    try:
        if not receive.poll(LIMIT):
            process.kill()
            raise AssertionError("a rank has not ended")
        result = receive.recv()
    except EOFError:
        process.join(LIMIT)
        return ("ended", process.exitcode)
    process.join(LIMIT)
    assert process.exitcode == 0, f"a rank that had {result[0]} ended with {process.exitcode}"
    return result


def _returned(outcomes):
    for result in outcomes:
        if result[0] == "skipped":
            pytest.skip(result[1])
        if result[0] == "raised":
            raise AssertionError(result[2]) from result[1]
        assert result[0] == "returned", result
    return [result[1] for result in outcomes]


class _Staying:
    """Processes that run one function after the other."""

    def __init__(self):
        self.ranks = []

    def run(self, function, nranks, *arguments, limit):
        while len(self.ranks) < nranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_staying, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        unique_id = bytes(fa.get_unique_id())
        for rank, (_, calls) in enumerate(self.ranks[:nranks]):
            calls.send((function, rank, nranks, unique_id, arguments))
        outcomes = []
        for process, calls in self.ranks[:nranks]:
            try:
                outcomes.append(calls.recv() if calls.poll(limit) else ("hangs",))
            except EOFError:
                outcomes.append(("ended",))
            if outcomes[-1] == ("hangs",):
                # It prints its threads' stacks, for which it gets a moment.
                os.kill(process.pid, signal.SIGUSR2)
                calls.poll(2)
            if outcomes[-1][0] != "returned":
                # The others learn that within their own limits.
                limit = min(limit, LIMIT)
        if any(result[0] != "returned" for result in outcomes):
            # The next test starts with new processes.
            for process, _ in self.ranks:
                process.kill()
            self.ranks.clear()
        return _returned(outcomes)


_staying_ranks = _Staying()


def run(function, nranks, *arguments, limit=LIMIT):
    """Returns what each rank returned. Raises if a rank raises, or takes longer than `limit` seconds."""
    return _staying_ranks.run(function, nranks, *arguments, limit=limit)
