#!/usr/bin/env python3
"""Makes torch importable, for CPUs only, in an environment where it is installed without its dependencies.

    PYTHON -m pip install --no-deps torch && PYTHON scripts/cpu-torch.py

PyPI's torch for x86-64 Linux is linked with CUDA libraries of several gigabytes, which tests on CPUs never call. This
script puts libraries of the same names next to torch's. All their functions report that there is no device. Run it
with the environment's Python; it needs gcc and readelf. For tests only: this torch cannot use a GPU.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library))


def on_this_machine(name: str) -> Path | None:
    folders = ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    return next((path for folder in folders if (path := Path(folder) / name).exists()), None)


def symbols(library: Path) -> tuple[set[str], dict[str, tuple[str | None, bool]]]:
    """Returns the symbols that a library defines, and those that it requires: name to (version, whether it is data)."""
    defined, wanted = set(), {}
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        kind, binding, place = fields[3], fields[4], fields[6]
        name, _, version = fields[7].replace("@@", "@").partition("@")
        if place == "UND" and binding == "WEAK":
            continue
        if place == "UND":
            wanted[name] = (version or None, kind in ("OBJECT", "TLS"))
        else:
            defined.add(name)
    return defined, wanted


def versions(library: Path) -> dict[str, str]:
    """Returns the library that defines each symbol version."""
    found, file = {}, ""
    for line in run("readelf", "-V", "-W", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            found[match[1]] = file
    return found


def stub(name: str, functions: dict[str, tuple[str | None, bool]], folder: Path) -> None:
    by_version = defaultdict(list)
    lines = []
    for symbol, (version, is_data) in sorted(functions.items()):
        if is_data:
            lines.append(f"long {symbol}[64];")
        elif symbol.endswith(("ErrorString", "ErrorName", "StatusString")):
            lines.append(f'const char *{symbol}(void) {{ return "no device"; }}')
        else:
            lines.append(f"int {symbol}(void) {{ return {NO_DEVICE}; }}")
        if version:
            by_version[version].append(symbol)
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "stub.c", Path(scratch) / "stub.map"
        source.write_text("\n".join(lines) + "\n")
        script.write_text("".join(f"{version} {{ {'; '.join(of)}; }};\n" for version, of in by_version.items()))
        command = ["gcc", "-shared", "-fPIC", "-w", "-O1", f"-Wl,-soname,{name}", source, "-o", folder / name]
        if by_version:
            command.append(f"-Wl,--version-script,{script}")
        run(*command)


def main() -> None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit("torch is not installed in this Python's environment")
    folder = Path(found.origin).parent / "lib"
    libraries = sorted(folder.glob("*.so*"))
    missing: dict[str, dict[str, tuple[str | None, bool]]] = {}
    defined: set[str] = set()
    wants = []
    elsewhere = {path for library in libraries for name in needed(library) if (path := on_this_machine(name))}
    for path in elsewhere:
        # Libraries of the machine, such as libstdc++: a stub earlier in torch's order would replace their symbols.
        defined |= symbols(path)[0]
    for library in libraries:
        own, wanted = symbols(library)
        defined |= own
        lacks = [name for name in needed(library) if not (folder / name).exists() and not on_this_machine(name)]
        missing |= {name: {} for name in lacks if name not in missing}
        wants.append((lacks, wanted, versions(library)))
    for lacks, wanted, file_of in wants:
        for symbol, (version, is_data) in wanted.items():
            file = file_of.get(version or "")
            if file in missing:
                missing[file][symbol] = (version, is_data)
            elif version is None and lacks and symbol not in defined and not symbol.startswith(("Py", "_Py")):
                missing[lacks[0]].setdefault(symbol, (None, is_data))
    for name, functions in missing.items():
        stub(name, functions, folder)
    print(f"torch for the CPU only: {len(missing)} CUDA libraries replaced by stubs")


main()
