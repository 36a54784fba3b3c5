"""Runs a function as the ranks of a world, each a process of its own, and brings back what each returns or raises.

`run` has processes that stay for the next test, since importing torch takes seconds; `start` is for ranks that are to die.
"""

import multiprocessing
import pickle
import traceback

import fast_allreduce as fa

LIMIT = 90

# A fork of a process that has threads may hang: each rank starts afresh.
context = multiprocessing.get_context("spawn")


def _result(function, rank, nranks, unique_id, arguments):
    try:
        return ("returned", function(rank, nranks, fa.UniqueId(unique_id), *arguments))
    except BaseException as error:  # what a rank raises is the test's to judge
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(repr(error))
        return ("raised", error, text)


def _rank(results, *call):
    results.send(_result(*call))


def _staying(calls):
    while (call := calls.recv()) is not None:
        calls.send(_result(*call))


def start(function, nranks, *arguments):
    """The processes, and the ends of pipes that their results come through."""
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
    """What a rank came to: ("returned", value), ("raised", error, text) or ("ended", exit code)."""
    try:
        if not receive.poll(LIMIT):
            process.kill()
            raise AssertionError("a rank has not come to an end")
        result = receive.recv()
    except EOFError:
        process.join(LIMIT)
        return ("ended", process.exitcode)
    process.join(LIMIT)
    assert process.exitcode == 0, f"a rank that had {result[0]} ended with {process.exitcode}"
    return result


def _returned(outcomes):
    for result in outcomes:
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
        for _, calls in self.ranks[:nranks]:
            try:
                outcomes.append(calls.recv() if calls.poll(limit) else ("hangs",))
            except EOFError:
                outcomes.append(("ended",))
        if any(result[0] != "returned" for result in outcomes):
            # The next test is not to suffer from what these may have left.
            for process, _ in self.ranks:
                process.kill()
            self.ranks.clear()
        return _returned(outcomes)


_staying_ranks = _Staying()


def run(function, nranks, *arguments, limit=LIMIT):
    """What each rank returned; an exception of any is raised, and having taken longer than `limit` seconds is one."""
    return _staying_ranks.run(function, nranks, *arguments, limit=limit)
