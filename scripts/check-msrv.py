#!/usr/bin/env python3
"""Checks that the versions of Rust that the manifests promise are those that the locked dependencies ask for.

No crate that a user compiles with ours, as a dependency or for a build script, may state a newer `rust-version` than
the promise. Crates that state none are counted, not checked; .ci/run compiles those of the library. Dependencies of
tests do not count. `--self-test` lowers each promise, and expects to find the crates that break it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A dependency of cudarc, libloading 0.9, needs a newer compiler than the library does without `cuda`.
CUDA = "1.88"
WITH_CUDA = ("--features", "cuda-13000,nccl,nvtx,float8")
# Each published crate, and what else users build: the manifest, the features, and the promise if it is not the
# manifest's. `mpi` is left out, since bindgen reads the MPI of the machine.
PROMISES = (
    ("Cargo.toml", (), None),
    ("Cargo.toml", ("--features", "nvtx,float8,tcp"), None),
    ("Cargo.toml", WITH_CUDA, CUDA),
    ("kernels/Cargo.toml", (), None),
    ("tests/oracle/Cargo.toml", (), None),
    ("capi/Cargo.toml", (), None),
    ("capi/Cargo.toml", ("--features", "cuda"), CUDA),
    ("cli/Cargo.toml", (), None),
    ("cli/Cargo.toml", ("--features", "cuda"), CUDA),
    ("python/Cargo.toml", (), None),
    ("adapters/candle/Cargo.toml", (), None),
)
# Documents that state the two versions.
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def cargo(*arguments):
    return subprocess.run(
        ["cargo", *arguments, "--locked"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def number(version):
    return tuple(int(part) for part in (version.split(".") + ["0", "0"])[:3])


def described(manifest):
    """Returns the `rust-version` of each crate that the manifest's lock file has, and the manifest's package."""
    packages = json.loads(cargo("metadata", "--all-features", "--format-version", "1", "--manifest-path", manifest))[
        "packages"
    ]
    own = next(package for package in packages if Path(package["manifest_path"]) == ROOT / manifest)
    return {(package["name"], package["version"]): package["rust_version"] for package in packages}, own


def closure(manifest, package, features):
    """Returns names and versions of the crates that a build of the package compiles."""
    shape = ("--edges", "normal,build", "--prefix", "none", "--format", "{p}")
    lines = cargo("tree", "--manifest-path", manifest, "--package", package["name"], *shape, *features)
    return {(name, version.removeprefix("v")) for name, version in (line.split()[:2] for line in lines.splitlines())}


def newer(crates, stated, promise):
    return sorted(
        f"{name} {version} needs Rust {stated[name, version]}"
        for name, version in crates
        if stated[name, version] and number(stated[name, version]) > number(promise)
    )


def check(lowered=False):
    """Returns one text for each crate that is too new, and prints a line for each promise."""
    problems = []
    for manifest, features, promise in PROMISES:
        stated, own = described(manifest)
        promise = "1.60" if lowered else promise or own["rust_version"]
        crates = closure(manifest, own, features)
        found = newer(crates, stated, promise)
        if lowered:
            problems += [] if found else [f"{manifest} {' '.join(features)}: no crate needs more than {promise}"]
            continue
        silent = sum(not stated[crate] for crate in crates)
        print(f"{manifest} {' '.join(features)}: Rust {promise}; {len(crates)} crates, of which {silent} state none")
        problems += [f"{manifest} {' '.join(features)} promises Rust {promise}, and {text}" for text in found]
    return problems


def documented(texts, versions):
    return [
        f"{name} does not say Rust {version}"
        for name, text in texts.items()
        for version in versions
        if f"Rust {version}" not in text and f"{version} with" not in text
    ]


def main():
    if sys.argv[1:] == ["--self-test"]:
        problems = check(lowered=True)
        stated, own = described("Cargo.toml")
        if not any(
            "libloading" in text for text in newer(closure("Cargo.toml", own, WITH_CUDA), stated, own["rust_version"])
        ):
            problems.append("with cuda, the promise of the library without it holds: CUDA is no longer needed here")
        if len(documented({"a": "Rust 1.85"}, ["1.85", "1.88"])) != 1:
            problems.append("a document without a version was not found")
    else:
        versions = [described("Cargo.toml")[1]["rust_version"], CUDA]
        problems = check() + documented({name: (ROOT / name).read_text() for name in DOCUMENTS}, versions)
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
