#!/usr/bin/env bash
# Prints a folder with the programs that make and check packages, such as maturin and zig, in bin/. Exact versions:
# they decide the packages' bytes.
set -euo pipefail

packages=(maturin==1.16.0 ziglang==0.17.1 cargo-zigbuild==0.24.1 auditwheel==6.8.2 abi3audit==0.0.26 wheel==0.48.0)
name=$({ printf '%s\n' "${packages[@]}" && python3 -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum)
root=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/packaging-${name:0:16}
if [ ! -e "$root/complete" ]; then
  mkdir -p "$(dirname "$root")"
  exec 9>"$root.lock"
  flock 9
  # In its place, since an environment cannot be moved.
  if [ ! -e "$root/complete" ]; then
    rm -rf "$root"
    python3 -m venv "$root"
    "$root/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" >&2
    touch "$root/complete"
  fi
fi
echo "$root"
