"""Limits of joining a world that the environment names."""

import os
import subprocess
import sys

import pytest

RANK = """
import sys, time
import fast_allreduce as fa
start = time.monotonic()
try:
    fa.Communicator.from_env(**eval(sys.argv[1]))
except fa.errors.Timeout as error:
    print(f"{error.missing} {error}")
"""


@pytest.mark.parametrize(
    "keywords, variables, waited",
    [
        ({"join_timeout": 0.25}, {}, "250ms"),
        ({}, {"FAST_ALLREDUCE_JOIN_TIMEOUT": "0.125"}, "125ms"),
        ({"join_timeout": 0.25, "timeout": 100}, {"FAST_ALLREDUCE_JOIN_TIMEOUT": "100"}, "250ms"),
    ],
)
def test_a_rank_that_is_alone_waits_as_long_as_it_is_told(tmp_path, keywords, variables, waited):
    """Rank 0 never joins. The limit of calls does not apply."""
    world = {"FAST_ALLREDUCE_SOCKET_DIR": str(tmp_path), "FAST_ALLREDUCE_RANK": "1", "FAST_ALLREDUCE_WORLD_SIZE": "2"}
    environment = {**os.environ, **world, **variables}
    command = [sys.executable, "-c", RANK, repr(keywords)]
    rank = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert rank.returncode == 0, rank.stderr
    assert f"timed out after {waited} waiting for rank 0" in rank.stdout, rank.stdout
