#!/usr/bin/env python3
"""Compares a row of the table of versions in docs/python.md with an environment in which tests have just run.

    scripts/check-versions.py ROW PYTHON PACKAGE...

ROW is the first cell of the row. The row must name each PACKAGE with the version that PYTHON's environment has, such as
"torch 2.15.0". The program prints the versions, and exits with status 1 if the row does not have them.
"""

import json
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "python.md"
ASK = "import json, sys; from importlib.metadata import version; print(json.dumps([version(p) for p in sys.argv[1:]]))"


def main(row: str, python: str, *packages: str) -> str | None:
    """Returns a text that says what is wrong, or None."""
    if not packages:
        return __doc__
    asked = subprocess.run([python, "-c", ASK, *packages], check=True, capture_output=True, text=True)
    # Local version labels, such as +cpu, do not count.
    versions = [version.partition("+")[0] for version in json.loads(asked.stdout)]
    ran = [f"{package} {version}" for package, version in zip(packages, versions)]
    print(f"{row}: {', '.join(ran)}")
    found = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {row} |")]
    if len(found) != 1:
        return f"{DOCUMENT.name} has {len(found)} rows for {row}, not 1"
    cells = [part.strip() for part in found[0].replace(",", "|").split("|")]
    missing = [text for text in ran if text not in cells]
    return f"{DOCUMENT.name}, row {row}: {', '.join(missing)} ran, and is not in the row" if missing else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 2 else __doc__)
