#!/usr/bin/env python3
"""Compares the interface of `fast_allreduce.flashinfer` with FlashInfer's own: arguments, their order and defaults,
and the numbers of patterns and layouts.

    scripts/check-flashinfer.py [VERSION]

Both are read as text, so it needs neither torch nor a GPU. The wheel (62 MB) is downloaded to the user's cache.
"""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.7.2.post1"
OURS = Path(__file__).parent.parent / "python/lib/fast_allreduce/flashinfer.py"
# Where FlashInfer has what this library has.
FUNCTIONS = ("allreduce_fusion", "create_allreduce_fusion_workspace")
METHODS = ("is_buffer_size_sufficient", "destroy")
CONSTANTS = ("AllReduceFusionPattern", "QuantizationSFLayout")


def wheel(version: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fast-allreduce/wheels"
    pattern = f"flashinfer_python-{version}-*.whl"
    if not list(cache.glob(pattern)):
        download = ("download", "--quiet", "--no-deps", "--dest", cache, f"flashinfer-python=={version}")
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    return next(cache.glob(pattern))


def definitions(text: str) -> dict[str, ast.AST]:
    """Returns the functions and classes of a module, and the methods of its classes, by their names."""
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for outer in [node for node in found.values() if isinstance(node, ast.ClassDef)]:
        found |= {f"{outer.name}.{node.name}": node for node in outer.body if isinstance(node, ast.FunctionDef)}
    return found


def parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Returns a function's arguments with their defaults: those that have a position, and those that do not."""

    def shown(argument: ast.arg, default: ast.expr | None) -> str:
        return argument.arg + (f"={ast.unparse(default)}" if default is not None else "")

    given = function.args
    first = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    return [shown(*pair) for pair in zip(given.args, first)], [
        shown(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults)
    ]


def constants(outer: ast.ClassDef) -> dict[str, int]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in outer.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else VERSION
    theirs: dict[str, ast.AST] = {}
    with zipfile.ZipFile(wheel(version)) as files:
        for name in ("workspace_base", "trtllm_ar", "allreduce"):
            theirs |= definitions(files.read(f"flashinfer/comm/{name}.py").decode())
    ours = definitions(OURS.read_text())
    for name in (*FUNCTIONS, *(f"AllReduceFusionWorkspace.{method}" for method in METHODS)):
        (has, more), (expected, others) = parameters(ours[name]), parameters(theirs[name])
        assert has == expected, f"{name} has the arguments {has}, and FlashInfer's {expected}"
        # Ours may have more.
        assert not set(others) - set(more), f"{name} lacks {sorted(set(others) - set(more))}"
    for name in CONSTANTS:
        assert constants(ours[name]) == constants(theirs[name]), f"{name} differs: {constants(theirs[name])}"
    print(f"The interface is that of FlashInfer {version}.")


if __name__ == "__main__":
    main()
