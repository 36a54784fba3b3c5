"""Metrics of this library's calls under vLLM's `/metrics`.

vLLM's API server answers `/metrics`, and its workers make the calls. Each rank keeps its flight record in a file of a
directory that all processes know by FAST_ALLREDUCE_FLIGHT_DIR; at a scrape the API server reads the files. The process
that has no such directory yet makes one, before it starts the others, and removes it when it ends.
"""

import atexit
import importlib
import os
import shutil
import sys
import tempfile

from .. import errors, inspect_metrics

_DIRECTORY = "FAST_ALLREDUCE_FLIGHT_DIR"
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


def _remove(directory, process):
    # Forks inherit the function.
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory():
    if not os.environ.get(_DIRECTORY):
        # In memory, if there is such a directory.
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        directory = tempfile.mkdtemp(prefix="vllm-metrics-", dir=shared)
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
