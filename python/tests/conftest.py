import sys
from pathlib import Path

import pytest

# For the processes that tests start, which do not read this.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def inductor(tmp_path_factory):
    """The folder of Inductor's compiled code for all tests: the first one that compiles C++ takes long."""
    return str(tmp_path_factory.mktemp("inductor"))
