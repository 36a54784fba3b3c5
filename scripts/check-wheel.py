#!/usr/bin/env python3
"""Checks wheels of the Python package before they are released.

    scripts/check-wheel.py WHEEL...

Each wheel must have, and have only:

* the tag of its architecture for glibc 2.28, and by auditwheel no newer symbol and no library besides glibc's;
* the stable ABI (by abi3audit), or the ABI of free-threaded Python;
* the files of python/lib, one compiled module, and metadata with the licences;
* an SBOM with every crate that the module is linked from, each with its version and licence: `cargo tree` says which;
* no path of the machine that built it.

auditwheel and abi3audit are those in the folder of scripts/packaging-environment.sh."""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"fast_allreduce-([\w.]+)-(cp310-abi3|cp314-cp314t)-manylinux_2_28_(x86_64|aarch64)\.whl")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def linked_crates(architecture: str) -> set:
    """Returns name and version of each crate in the module; build dependencies and macros are not linked."""
    arguments = [
        "--manifest-path",
        "python/Cargo.toml",
        "--locked",
        "--edges",
        "normal,no-proc-macro",
        "--prefix",
        "none",
    ]
    listed = run("cargo", "tree", *arguments, "--features", "prebuilt", "--target", f"{architecture}-unknown-linux-gnu")
    return {tuple(line.split()[:2]) for line in listed.splitlines() if line.strip()}


def check_sbom(wheel: zipfile.ZipFile, architecture: str) -> list:
    names = [name for name in wheel.namelist() if re.search(r"\.dist-info/sboms/.*\.cyclonedx\.json$", name)]
    if len(names) != 1:
        return [f"{len(names)} SBOMs of crates, not 1"]
    sbom = json.loads(wheel.read(names[0]))
    parts = sbom["components"] + [sbom["metadata"]["component"]]
    listed = {(part["name"], f"v{part['version']}"): part for part in parts}
    faults = [f"the SBOM lacks {' '.join(crate)}" for crate in sorted(linked_crates(architecture) - set(listed))]
    faults += [f"the SBOM has no licence of {name}" for (name, _), part in listed.items() if not part.get("licenses")]
    return faults


def check_files(wheel: zipfile.ZipFile) -> list:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    package = run("git", "ls-files", "python/lib").split()
    expected = {name.removeprefix("python/lib/") for name in package}
    modules = {name for name in names if re.fullmatch(r"fast_allreduce/_native\.[\w-]+\.so", name)}
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    other = names - expected - modules - metadata
    faults = [f"{name} is missing" for name in sorted(expected - names)] + [
        f"{name} is extra" for name in sorted(other)
    ]
    if len(modules) != 1:
        faults.append(f"{len(modules)} compiled modules, not 1")
    licences = {name.rsplit("/")[-1] for name in metadata}
    return faults + [f"no {name}" for name in ("LICENSE-MIT", "LICENSE-APACHE") if name not in licences]


def check_paths(wheel: zipfile.ZipFile) -> list:
    # scripts/release.sh builds in /mnt.
    here = [str(ROOT), os.path.expanduser("~"), os.environ.get("CARGO_TARGET_DIR", ""), "/mnt/source", "/mnt/target"]
    places = {place.encode() for place in here if len(place) > 2}
    return [
        f"{name} contains {place.decode()}"
        for name in wheel.namelist()
        for place in sorted(places)
        if place in wheel.read(name)
    ]


# PEP 688 and python/src/buffers: in the stable ABI since 3.11, exported with the same arguments by 3.10.
BUFFERS = {"PyBuffer_Release", "PyObject_CheckBuffer", "PyObject_GetBuffer"}


def check_abi(path: Path, tools: Path) -> list:
    report = subprocess.run(
        [tools / "abi3audit", "--strict", "--report", path], check=False, capture_output=True, text=True
    ).stdout
    (wheel,) = json.loads(report)["specs"].values()
    (module,) = [part["result"] for part in wheel["wheel"]]
    later = set(module["future_abi3_objects"]) - BUFFERS
    faults = [] if module["is_abi3"] else ["not the stable ABI"]
    return faults + [f"not in the stable ABI of Python 3.10: {name}" for name in [*module["non_abi3_symbols"], *later]]


def check(path: Path, tools: Path) -> list:
    named = NAME.fullmatch(path.name)
    if not named:
        return ["its name has other tags"]
    _, python, architecture = named.groups()
    faults = []
    shown = " ".join(run(tools / "auditwheel", "show", path).split())
    if f'"manylinux_2_28_{architecture}"' not in shown and not re.search(
        r'platform tag: "manylinux_2_(1\d|2[0-7])_', shown
    ):
        faults.append(f"auditwheel: {shown}")
    if python.endswith("abi3"):
        faults += check_abi(path, tools)
    with zipfile.ZipFile(path) as wheel:
        return faults + check_files(wheel) + check_sbom(wheel, architecture) + check_paths(wheel)


def self_test(wheel: Path, tools: Path) -> list:
    """Plants a fault of each kind into a wheel; returns those that are not found."""
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        planted = Path(folder) / wheel.name
        for what, change in {
            "extra": lambda name, data: ("fast_allreduce/other.py" if name.endswith("/LICENSE-MIT") else name, data),
            "SBOM lacks": lambda name, data: (name, data.replace(b'"half"', b'"other"')),
            "no licence": lambda name, data: (name, data.replace(b'"licenses"', b'"other"', 1)),
            "contains": lambda name, data: (name, data + str(ROOT).encode() if name.endswith(".py") else data),
            "is missing": lambda name, data: ("fast_allreduce/_other.so" if name.endswith(".pyi") else name, data),
            "not 1": lambda name, data: (name.replace(".cyclonedx", ""), data),
        }.items():
            with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(planted, "w") as target:
                for name in source.namelist():
                    target.writestr(*change(name, source.read(name)))
            with zipfile.ZipFile(planted) as opened:
                architecture = NAME.fullmatch(wheel.name).group(3)
                found = check_files(opened) + check_sbom(opened, architecture) + check_paths(opened)
            if not any(what in fault for fault in found):
                faults.append(f"planted and not found: {what} ({found})")
    return faults


def main() -> int:
    if not sys.argv[1:]:
        print(__doc__)
        return 2
    tools = Path(run("scripts/packaging-environment.sh").strip()) / "bin"
    wheels = [Path(argument).resolve() for argument in sys.argv[1:]]
    failed = 0
    for path in wheels:
        faults = check(path, tools)
        failed += len(faults)
        print(f"{path.name}: {'; '.join(faults) or 'passed'}")
    missed = self_test(wheels[0], tools)
    print("planted faults:", "; ".join(missed) or "all found")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
