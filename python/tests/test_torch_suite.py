"""torch's own suite for backends, `torch.testing._internal.distributed.distributed_test`, with this one.

Its tests run one after the other in three processes, which are reused, because importing torch takes seconds. Outcomes
must equal those in `torch_suite.txt`: a test that begins to pass, or no longer exists, fails this test as well. The
file has a line `passed`, `skipped: REASON` or `unsupported: REASON` before the indented names of its tests.

`python test_torch_suite.py > torch_suite.txt` writes the outcomes. Review the reasons of unsupported tests after that.
"""

import os
import sys
import textwrap
import traceback
import unittest
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

NRANKS = 3
TABLE = Path(__file__).parent / "torch_suite.txt"
# Limit of a call's wait for other ranks.
LIMIT = 15


def of_torch(folder=None):
    """Returns the suite's module, which reads the environment on import, and its test class with this backend."""
    os.environ.setdefault("BACKEND", "fast_allreduce")
    os.environ.setdefault("WORLD_SIZE", str(NRANKS))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("TEMP_DIR", str(folder or "/nowhere"))
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("plugin", "subgroup", "ddp"):
        DistTestCases.backend_feature[feature].add("fast_allreduce")
    from torch.testing._internal.distributed import distributed_test as suite

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        """The suite's tests, without the processes that it starts itself."""

    return suite, Suite


def names():
    _, suite = of_torch()
    return sorted(name for name in dir(suite) if name.startswith("test_"))


def outcome_of(test, name):
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as left:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == left.code]
        return ("skipped", reasons[0]) if reasons else ("failed", f"exits with {left.code}")
    except BaseException as error:
        if os.environ.get("FAST_ALLREDUCE_TEST_TRACE"):
            traceback.print_exc()
        lines = str(error).strip().splitlines()
        return "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "passed", ""


def ranks_of_suite(rank, nranks, _, folder, wanted):
    """Returns the outcome of each test on this rank."""
    import datetime
    import warnings

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The suite relies on equal random values in all processes, some of which it makes on import.
    torch.manual_seed(0)
    suite, tests = of_torch(folder)
    suite.default_pg_timeout = LIMIT
    outcomes = []
    for name in wanted:
        own = Path(folder) / name
        for part in ("barrier", "test_dir", "init_dir"):
            (own / part).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(own)
        suite.Barrier.barrier_id = 0
        torch.manual_seed(0)
        test = tests(name)
        test.rank, test.file_name = rank, str(own / "init")
        limit = datetime.timedelta(seconds=LIMIT)
        dist.init_process_group(
            "fast_allreduce", init_method=f"file://{own}/store", rank=rank, world_size=nranks, timeout=limit
        )
        outcomes.append(outcome_of(test, name))
        if dist.is_initialized():
            dist.destroy_process_group()
        # Some tests leave this variable changed, and torch would wrap the groups of the next ones.
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        dist.set_debug_level(dist.DebugLevel.OFF)
        if rank == 0 and os.environ.get("FAST_ALLREDUCE_TEST_TRACE"):
            print(name, *outcomes[-1], file=sys.stderr, flush=True)
    return outcomes


def all_outcomes(folder, wanted):
    """Returns each test's outcome: passed if it passed on all ranks, skipped if one skipped it and none failed."""
    from ranks import run

    by_rank = run(ranks_of_suite, NRANKS, str(folder), wanted, limit=900)
    found = {}
    for name, outcomes in zip(wanted, zip(*by_rank)):
        kinds = {"failed": "unsupported", "skipped": "skipped", "passed": "passed"}
        for kind, told in kinds.items():
            reasons = [reason for what, reason in outcomes if what == kind]
            if reasons:
                found[name] = (told, reasons[0])
                break
    return found


def expected():
    table, kind = {}, None
    for line in TABLE.read_text().splitlines():
        if line.startswith("  "):
            table |= dict.fromkeys(line.split(), kind)
        else:
            kind = line.partition(":")[0]
    return table


def test_the_suite_of_torch(tmp_path):
    wanted, table = names(), expected()
    assert wanted == sorted(table), set(wanted) ^ set(table)
    found = all_outcomes(tmp_path, wanted)
    different = {name: (table[name], *found[name]) for name in wanted if found[name][0] != table[name]}
    assert not different


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        chosen = sys.argv[1:] or names()
        groups = {}
        for name, outcome in all_outcomes(folder, chosen).items():
            groups.setdefault(outcome, []).append(name)
        for (kind, reason), of_kind in groups.items():
            print(f"{kind}: {reason}" if reason else kind)
            print(textwrap.fill(" ".join(of_kind), 120, initial_indent="  ", subsequent_indent="  "))
