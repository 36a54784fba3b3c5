import sys
from pathlib import Path

import pytest

# For the processes that tests start, which do not read this file.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def inductor(tmp_path_factory):
    """Returns a folder for Inductor's compiled code, shared by all tests: compiling C++ takes long."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def store_path(tmp_path):
    """Returns the path of a file through which the ranks of a process group meet."""
    return str(tmp_path / "store")
