"""Metrics of this library's calls under vLLM's `/metrics`.

vLLM's API server answers `/metrics`, and its workers make the calls. Each rank keeps its flight record in a file of a
directory that all processes know by FAST_ALLREDUCE_FLIGHT_DIR; at a scrape the API server reads the files. The process
that has no such directory yet makes one, before it starts the others, and removes it when it ends. The directory of a
killed process is removed by the next one.
"""

import atexit
import fcntl
import glob
import importlib
import os
import shutil
import sys
import tempfile

from .. import errors, inspect_metrics

_DIRECTORY = "FAST_ALLREDUCE_FLIGHT_DIR"
# In memory.
_SHARED = "/dev/shm"
_PREFIX = "fast-allreduce-vllm-"
_REGISTRY = "vllm.v1.metrics.prometheus"
# Modules that have vLLM's function under their own name.
_USERS = ("vllm.entrypoints.serve.instrumentator.metrics",)


class Collector:
    """A collector of `prometheus_client`: the metrics of all ranks whose files are in the directory."""

    def describe(self):
        """Returns nothing: a registry then does not collect when this is registered."""
        return []

    def collect(self):
        """Returns the metrics; none before the first communicator, and none of files that are not readable."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            text = inspect_metrics(os.environ[_DIRECTORY])
        except (KeyError, errors.Error):
            return []
        return list(text_string_to_metric_families(text))


def _locked(directory):
    """Locks a directory and returns its descriptor. Returns None if another process has locked or removed it, and
    raises an OSError if locking does not work here. The system unlocks it when the process and its forks have ended,
    however they do.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    is_kept = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_kept = os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not is_kept:
            os.close(descriptor)
    return descriptor if is_kept else None


def _remove_abandoned(parent):
    for directory in glob.glob(os.path.join(glob.escape(parent), _PREFIX + "*")):
        try:
            descriptor = _locked(directory)
        except OSError:
            # Another user's, or not a directory.
            continue
        if descriptor is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(descriptor)


def _remove(directory, process):
    # Forks inherit the function.
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory():
    if os.environ.get(_DIRECTORY):
        return
    parent = _SHARED if os.access(_SHARED, os.W_OK) else tempfile.gettempdir()
    _remove_abandoned(parent)
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        # It stays locked. Another process may have taken it for an abandoned one.
        try:
            if _locked(directory) is not None:
                break
        except OSError:
            # Without a lock it works as well, until another process removes it.
            break
    os.environ[_DIRECTORY] = directory
    atexit.register(_remove, directory, os.getpid())


def enable():
    """Adds the metrics to those of this process. A second call does nothing. Without prometheus_client or with another
    vLLM it only makes the directory.
    """
    _make_directory()
    try:
        from prometheus_client import REGISTRY

        module = importlib.import_module(_REGISTRY)
        original = module.get_prometheus_registry
    except (ImportError, AttributeError):
        return
    if hasattr(original, "of_fast_allreduce"):
        return
    REGISTRY.register(Collector())

    def get_prometheus_registry():
        # With several API servers it is a new one each time.
        registry = original()
        if registry is not REGISTRY:
            registry.register(Collector())
        return registry

    get_prometheus_registry.of_fast_allreduce = True
    module.get_prometheus_registry = get_prometheus_registry
    for name in _USERS:
        if hasattr(sys.modules.get(name), "get_prometheus_registry"):
            sys.modules[name].get_prometheus_registry = get_prometheus_registry
