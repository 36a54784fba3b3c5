#!/usr/bin/env python3
"""Steps of scripts/release.sh that change or describe files.

    release.py check                  every manifest has the version of the workspace
    release.py prepare VERSION DATE   writes the version into manifests, lock files and the changelog, and the owner's
                                      addresses (release.toml) into the manifests of packages
    release.py breaking OLD NEW       fails unless the step from version OLD to NEW permits a change of the public API
    release.py describe DIR TOOL...   writes DIR/SHA256SUMS and DIR/provenance.json; a TOOL is a command that prints its
                                      version
    release.py --self-test            plants faults; each must be found

The commands work in the current folder, the root of a clone."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

# The version of a package: in [package] or [workspace.package], the first of the file.
OWN = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
# A dependency on a crate of this project, as a folder.
DEPENDENCY = re.compile(r'^(fast-allreduce[\w-]* = \{ version = "=?)([^"]+)(", path)', re.MULTILINE)
# An entry of a lock file for a crate of this project: its name, and no source.
LOCKED = re.compile(
    r'(\[\[package\]\]\nname = "(?:fast-allreduce|tensor-parallel-llm)[^"]*"\nversion = ")([^"]+)("\n(?!source))'
)
SEMVER = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?")
# What an entry of the changelog says before the first release.
FIRST = re.compile(r"Nothing has been published yet\..*?\n\n", re.DOTALL)


# The keys of release.toml.
ADDRESSES = ("repository", "homepage")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def tracked(pattern: str) -> list:
    return [Path(name) for name in git("ls-files", pattern).splitlines()]


def version_of(root: Path) -> str:
    return tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def versions(path: Path) -> list:
    """Returns each version of this project that a file names."""
    text = path.read_text()
    if path.suffix == ".lock":
        return [version for _, version, _ in LOCKED.findall(text)]
    return OWN.findall(text) + [version for _, version, _ in DEPENDENCY.findall(text)]


def check(root: Path = Path()) -> list:
    expected = version_of(root)
    files = [root / path for path in tracked("*Cargo.toml") + tracked("*Cargo.lock")]
    faults = [f"{path}: {v}, not {expected}" for path in files for v in versions(path) if v != expected]
    if sum(len(versions(path)) for path in files) < 20:
        faults.append("the manifests and lock files name the version fewer times than expected")
    return faults


def order(version: str) -> tuple:
    """Returns a key by which versions are ordered: before a release come its pre-releases."""
    matched = SEMVER.fullmatch(version)
    if not matched:
        raise SystemExit(f"{version} is not a version such as 1.2.3 or 1.2.3-rc.1")
    *numbers, before = matched.groups()
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in before.split(".")] if before else []
    return (*map(int, numbers), not before, parts)


def may_break(old: str, new: str) -> bool:
    """Returns whether a public item may differ: in a new major version, and before 1.0 in a new minor one."""
    (major, minor), (new_major, new_minor) = order(old)[:2], order(new)[:2]
    return new_major > major or (new_major == major == 0 and new_minor > minor)


def changelog(text: str, version: str, date: str) -> str:
    head, found, rest = text.partition("## [Unreleased]\n")
    entry, later, older = FIRST.sub("", rest, count=1).partition("\n## [")
    if not found or not re.search(r"^- ", entry, re.MULTILINE):
        raise SystemExit("CHANGELOG.md has nothing under [Unreleased]")
    return f"{head}{found}\n## [{version}] - {date}\n{entry}{later}{older}"


def addressed(manifest: str, owner: dict) -> str:
    """Returns a crate's manifest with the owner's addresses, unless the crate is not published."""
    if "publish = false" in manifest:
        return manifest
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in owner.items())
    manifest = re.sub(rf"^(?:{'|'.join(ADDRESSES)}) = .*\n", "", manifest, flags=re.MULTILINE)
    return re.sub(r"^\[package\]\n", lambda found: found[0] + lines, manifest, count=1, flags=re.MULTILINE)


def with_urls(project: str, owner: dict) -> str:
    """Returns the manifest of the Python package with the owner's addresses."""
    project = re.sub(r"^\[project\.urls\]\n(?:\w+ = .*\n)*\n", "", project, flags=re.MULTILINE)
    urls = "".join(f"{key.capitalize()} = {json.dumps(value)}\n" for key, value in owner.items())
    return (
        project.replace("\n[project.optional", f"\n[project.urls]\n{urls}\n[project.optional", 1) if urls else project
    )


def prepare(version: str, date: str) -> None:
    last = max((tag[1:] for tag in git("tag", "--list", "v[0-9]*").split()), key=order, default=None)
    if last and order(version) <= order(last):
        raise SystemExit(f"{version} does not come after {last}")
    order(version)
    owner = tomllib.loads(Path("release.toml").read_text())
    if set(owner) != set(ADDRESSES):
        raise SystemExit(f"release.toml must have {' and '.join(ADDRESSES)}, and nothing else")
    owner = {key: value for key, value in owner.items() if value}
    for path in tracked("*Cargo.toml"):
        text = OWN.sub(f'version = "{version}"', path.read_text(), count=1)
        text = DEPENDENCY.sub(rf"\g<1>{version}\g<3>", text)
        path.write_text(addressed(text, owner))
    for path in tracked("*Cargo.lock"):
        path.write_text(LOCKED.sub(rf"\g<1>{version}\g<3>", path.read_text()))
    project = Path("python/pyproject.toml")
    project.write_text(with_urls(project.read_text(), owner))
    log = Path("CHANGELOG.md")
    log.write_text(changelog(log.read_text(), version, date))


def describe(folder: Path, tools: list) -> None:
    described = ("SHA256SUMS", "provenance.json")
    files = sorted(path for path in folder.iterdir() if path.name not in described)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    asked = [subprocess.run(shlex.split(tool), check=True, capture_output=True, text=True).stdout for tool in tools]
    commit = git("rev-parse", "HEAD").strip()
    repository = tomllib.loads(Path("release.toml").read_text())["repository"]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sums.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:fast-allreduce:scripts/release.sh",
                "externalParameters": {"version": version_of(Path())},
                "internalParameters": {"tools": [answer.splitlines()[0] for answer in asked]},
                "resolvedDependencies": [
                    {"uri": f"git+{repository or 'unpublished'}", "digest": {"gitCommit": commit}}
                ],
            },
            "runDetails": {"builder": {"id": "urn:fast-allreduce:scripts/release.sh"}},
        },
    }
    (folder / "provenance.json").write_text(json.dumps(statement, indent=1) + "\n")


def self_test() -> None:
    rising = ["0.1.0-rc.1", "0.1.0-rc.2", "0.1.0-rc.10", "0.1.0", "0.2.0", "0.10.0", "1.0.0"]
    assert sorted(sorted(rising), key=order) == rising
    for refused in ("1.0", "v1.0.0", "1.0.0 ", "01x"):
        try:
            order(refused)
        except SystemExit:
            continue
        raise AssertionError(refused)
    for old, new, expected in [
        ("0.1.9", "0.2.0-rc.1", True),
        ("0.9.0", "1.0.0", True),
        ("1.9.9", "2.0.0", True),
        ("0.1.0", "0.1.1", False),
        ("1.0.0", "1.1.0", False),
        ("1.1.0", "0.2.0", False),
    ]:
        assert may_break(old, new) == expected, (old, new)
    log = "# Changelog\n\n## [Unreleased]\n\nNothing has been published yet.\n\n- New.\n\n## [0.1.0] - x\n\n- Old.\n"
    new = changelog(log, "0.2.0", "2001-02-03")
    assert (
        new.index("[Unreleased]") < new.index("## [0.2.0] - 2001-02-03\n") < new.index("- New.") < new.index("[0.1.0]")
    )
    assert "yet" not in new
    try:
        changelog(new, "0.3.0", "2001-02-03")
        raise AssertionError("an empty entry was accepted")
    except SystemExit:
        pass
    one, two = ({key: f"https://{host}.example/{key}" for key in ADDRESSES} for host in ("one", "two"))
    published = [Path(folder, "Cargo.toml").read_text() for folder in (".", "kernels", "cli", "tests/oracle")]
    for change, texts in {addressed: published, with_urls: [Path("python/pyproject.toml").read_text()]}.items():
        for text in texts:
            again = change(change(text, one), two)
            written = tomllib.loads(again)
            found = written.get("package") or written["project"]["urls"]
            assert {key.lower(): value for key, value in found.items() if key.lower() in ADDRESSES} == two
            assert "//one." not in again
            assert change(text, {}) == text
    with tempfile.TemporaryDirectory() as folder:
        for path in tracked("*Cargo.toml") + tracked("*Cargo.lock"):
            copied = Path(folder) / path
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text(path.read_text())
        assert not check(Path(folder)), check(Path(folder))
        # One version that differs, in each file in turn.
        for path in [path for path in tracked("*Cargo.toml") + tracked("*Cargo.lock") if versions(path)]:
            copied = Path(folder) / path
            text, old = copied.read_text(), version_of(Path(folder))
            at = text.rindex(f'"{old}"') if path.suffix == ".toml" else LOCKED.search(text).start(2) - 1
            copied.write_text(text[:at] + text[at:].replace(old, "9.9.9", 1))
            assert check(Path(folder)), f"a version that differs in {path} is not found"
            copied.write_text(text)


def main(arguments: list) -> int:
    if arguments == ["check"]:
        faults = check()
        print("\n".join(faults) or f"every manifest has version {version_of(Path())}")
        return 1 if faults else 0
    if arguments[:1] == ["prepare"] and len(arguments) == 3:
        prepare(*arguments[1:])
    elif arguments[:1] == ["breaking"] and len(arguments) == 3:
        return 0 if may_break(*arguments[1:]) else 1
    elif arguments[:1] == ["describe"] and len(arguments) > 1:
        describe(Path(arguments[1]), arguments[2:])
    elif arguments == ["--self-test"]:
        self_test()
        print("self-test passed")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
