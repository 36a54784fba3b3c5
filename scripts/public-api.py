#!/usr/bin/env python3
"""Lists the public API of the library, one item with its declaration in each line, for the comparison of two versions.

    scripts/public-api.py                  prints the list, without `cuda`
    scripts/public-api.py --cuda           the same with `cuda`, `nccl`, `nvtx`, `float8` and `tcp`
    scripts/public-api.py --since LIST     has exit status 3 if an item of an older list is gone or is declared
                                           differently, and another one if it cannot tell
    scripts/public-api.py --self-test      plants a change of each kind

It reads rustdoc's JSON, an unstable format, and cuts declarations out of the sources. A removal or a change needs a new
major version, and before 1.0 a new minor one. So do a new method of a trait that users implement, and a new variant or
field of what is not `non_exhaustive`; this program does not tell them from other additions. Items that a macro declares
have only a name and a kind here."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIFFERS = 3
CUDA = ("--features", "cuda-12000,nccl,nvtx,float8,tcp")


def described(features):
    """Returns rustdoc's description of the library."""
    environment = {**os.environ, "RUSTC_BOOTSTRAP": "1", "FAST_ALLREDUCE_NVCC": "none"}
    # With it, cargo writes the description elsewhere.
    environment.pop("CARGO_BUILD_TARGET", None)
    command = ["cargo", "rustdoc", "--quiet", "--locked", "--package", "fast-allreduce", "--lib", *features]
    command += ["--", "-Z", "unstable-options", "--output-format", "json", "--cap-lints", "allow"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True, capture_output=True
    )
    target = Path(json.loads(metadata.stdout)["target_directory"])
    return json.loads((target / "doc" / "fast_allreduce.json").read_text())


def declaration(item, kind):
    """Returns the source text of an item up to its body, on one line."""
    span = item["span"]
    if span is None or not (ROOT / span["filename"]).is_file():
        return ""
    lines = (ROOT / span["filename"]).read_text().splitlines()
    (first, column), (last, _) = span["begin"], span["end"]
    text = " ".join(line.split("//")[0].strip() for line in [lines[first - 1][column - 1 :], *lines[first:last]])
    if kind in ("function", "struct", "enum", "trait", "impl", "union"):
        text = re.split(r"\{|;| = ", text)[0] if kind != "function" else re.split(r"\{|;", text)[0]
    return " ".join(text.split())


def items(crate):
    """Returns the lines of the list."""
    index, lines = crate["index"], set()

    def visit(identifier, path, seen):
        item = index.get(str(identifier))
        if item is None or identifier in seen:
            return
        seen = seen | {identifier}
        (kind, inner), name = next(iter(item["inner"].items())), item["name"]
        if kind == "use":
            inside = path if inner["is_glob"] else f"{path}::{inner['name']}"
            target = index.get(str(inner["id"]))
            if target is not None:
                children(target, inside, seen) if inner["is_glob"] else listed(target, inside, seen)
            return
        listed(item, f"{path}::{name}" if name else path, seen)

    def listed(item, path, seen):
        kind = next(iter(item["inner"]))
        if kind not in ("impl", "module"):
            lines.add(f"{path}: {kind} {declaration(item, kind)}".strip())
        elif kind == "module":
            lines.add(f"{path}: module")
        children(item, path, seen)

    def children(item, path, seen):
        kind, inner = next(iter(item["inner"].items()))
        if kind == "struct" and isinstance(inner["kind"], dict):
            fields = inner["kind"].get("plain", {}).get("fields", inner["kind"].get("tuple", []))
        else:
            fields = []
        found = {
            "module": lambda: inner["items"],
            "struct": lambda: fields,
            "enum": lambda: inner["variants"],
            "trait": lambda: inner["items"],
        }.get(kind, list)()
        for child in found:
            public = child is not None and str(child) in index
            visibility = index[str(child)]["visibility"] if public else ""
            if visibility in ("public", "default"):
                visit(child, path, seen)
        for child in inner.get("impls", []) if isinstance(inner, dict) else []:
            block = index.get(str(child), {}).get("inner", {}).get("impl")
            if block is None or block["is_synthetic"] or block["blanket_impl"] is not None:
                continue
            if block["trait"] is not None:
                lines.add(f"{path}: implements {block['trait']['path']}")
                continue
            for member in block["items"]:
                if index[str(member)]["visibility"] == "public":
                    visit(member, path, seen)

    visit(crate["root"], "", frozenset())
    return sorted(lines)


def broken(old, new):
    """Returns the lines of an older list that a newer one does not have."""
    return sorted(set(old) - set(new))


def since(old, **environment):
    """Returns the exit status of a comparison with an older list."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(old))
        file.flush()
        command = [sys.executable, __file__, *(["--cuda"] if "--cuda" in sys.argv else []), "--since", file.name]
        return subprocess.run(command, env={**os.environ, **environment}, check=False, capture_output=True).returncode


def main():
    arguments = sys.argv[1:]
    features = CUDA if "--cuda" in arguments else ()
    found = items(described(features))
    if len(found) < 300:
        sys.exit(f"only {len(found)} items: rustdoc's format has changed")
    if "--self-test" in arguments:
        function = next(line for line in found if "function pub fn all_reduce_in_place" in line)
        changed = [line.replace("op: ReduceOp", "op: u32") if line == function else line for line in found]
        gone = [line for line in found if line != function]
        planted = (changed, gone)
        if any(broken(found, new) != [function] for new in planted) or broken(found, [*found, "new: function"]):
            sys.exit("a planted change was not found")
        outcomes = [since(found), since([*found, "gone: function"]), since([])]
        outcomes.append(since(found, RUSTC="false"))
        if outcomes != [0, DIFFERS, 1, 1]:
            sys.exit(f"exit statuses for no change, a change, no list and a failed compiler: {outcomes}")
        print(f"{len(found)} items; planted changes were found")
    elif "--since" in arguments:
        old = Path(arguments[arguments.index("--since") + 1]).read_text().splitlines()
        if len(old) < 300:
            sys.exit(f"{len(old)} items: this is no list of an older version")
        if left := broken(old, found):
            print("\n".join(["gone or declared differently:", *left]), file=sys.stderr)
            sys.exit(DIFFERS)
    else:
        print("\n".join(found))


if __name__ == "__main__":
    main()
