import os
import sys
from pathlib import Path

import pytest

# For the processes that tests start, which do not read this file.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    config.addinivalue_line("markers", "nightly: runs only with FAST_ALLREDUCE_TEST_FULL=1")


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that take too long for every commit. pytest prints how many."""
    if os.environ.get("FAST_ALLREDUCE_TEST_FULL") == "1":
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def inductor(tmp_path_factory):
    """Returns a folder for Inductor's compiled code, shared by all tests: compiling C++ takes long."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def store_path(tmp_path):
    """Returns the path of a file through which the ranks of a process group meet."""
    return str(tmp_path / "store")
