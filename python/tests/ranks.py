"""Runs a function as the ranks of a world, each a process of its own, and brings back what each returns or raises."""

import multiprocessing
import pickle
import traceback

import fast_allreduce as fa

LIMIT = 90

# A fork of a process that has threads may hang: each rank starts afresh.
context = multiprocessing.get_context("spawn")


def _rank(function, rank, nranks, unique_id, arguments, results):
    try:
        result = ("returned", function(rank, nranks, fa.UniqueId(unique_id), *arguments))
    except BaseException as error:  # what a rank raises is the test's to judge
        try:
            pickle.loads(pickle.dumps(error))
            result = ("raised", error, traceback.format_exc())
        except Exception:
            result = ("raised", RuntimeError(repr(error)), traceback.format_exc())
    results.send(result)


def start(function, nranks, *arguments):
    """The processes, and the ends of pipes that their results come through."""
    unique_id = bytes(fa.get_unique_id())
    started = []
    for rank in range(nranks):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, nranks, unique_id, arguments, send), daemon=True)
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


def run(function, nranks, *arguments):
    """What each rank returned; an exception of any is raised."""
    outcomes = [outcome(*one) for one in start(function, nranks, *arguments)]
    for result in outcomes:
        if result[0] == "raised":
            raise AssertionError(result[2]) from result[1]
        assert result[0] == "returned", result
    return [result[1] for result in outcomes]
