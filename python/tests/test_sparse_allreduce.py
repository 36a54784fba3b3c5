"""The gradient-compression example: what each path promises, and the same bits as the Rust program."""

import os
import subprocess

import pytest

pytest.importorskip("torch")

from ranks import run  # noqa: E402

SHAPES = [(1, 3000, 0.01, 1), (2, 20000, 0.01, 1), (3, 20011, 0.03, 7), (4, 5000, 0.3, 2)]


def paths(rank, nranks, unique_id, *shape):
    from fast_allreduce.examples.sparse_allreduce import rank_of_all

    return rank_of_all(rank, nranks, unique_id, *shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_keeps_its_promise_and_has_the_bits_of_the_rust_program(shape):
    program = os.environ.get("FAST_ALLREDUCE_SPARSE_EXAMPLE")
    if program is None:
        pytest.skip("FAST_ALLREDUCE_SPARSE_EXAMPLE does not name the Rust example's program")
    nranks, count, density, seed = shape
    digests = run(paths, nranks, count, density, seed)[0]
    numbers = ["--ranks", nranks, "--count", count, "--density", density, "--seed", seed, "--iterations", 1]
    printed = subprocess.run([program, *map(str, numbers)], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    head = rows[0]
    # Headings of several words stand after the name and the number that is kept.
    assert head[:2] == ["path", "kept"] and len(rows) == 10
    told = {row[0]: (int(row[9], 16), int(row[1])) for row in rows[1:]}
    assert told == digests
