"""An allreduce between processes: python -m fast_allreduce.examples.allreduce [--ranks 4] [--count 1000000]."""

import argparse
import array
import multiprocessing

import fast_allreduce as fa


def rank_process(rank: int, nranks: int, unique_id: bytes, count: int) -> None:
    """Runs one rank: sums an array over the ranks, and checks every element."""
    with fa.Communicator.init(nranks, rank, fa.UniqueId(unique_id)) as communicator:
        data = array.array("f", [rank + 1.0]) * count
        communicator.allreduce(data)
        expected = nranks * (nranks + 1) / 2
        if any(value != expected for value in data):
            raise SystemExit(f"rank {rank}: a wrong sum")
        print(f"rank {rank} of {nranks}: {count} sums of {expected:g}, with {communicator.plan(count, 'f32')[0]}")


def main() -> None:
    """Starts the ranks, and exits with the largest of their exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--count", type=int, default=1_000_000)
    arguments = parser.parse_args()
    # The process that makes the id must run until the ranks have joined.
    unique_id = bytes(fa.get_unique_id())
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_process, args=(rank, arguments.ranks, unique_id, arguments.count))
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
