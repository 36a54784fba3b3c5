#!/usr/bin/env bash
# Obtains a compiler, an interpreter or CRIU from Debian's packages, unpacked in a folder of its own: nothing is
# installed.
# It needs no root, and leaves the system's lists of packages as they are.
#
#   scripts/debian-packages.sh NAME   prints the folder on stdout: ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/NAME
#     rust-1.85        rustc 1.85, the oldest that the library supports
#     rust-aarch64     Debian's newest rustc, the standard library for aarch64, and qemu-user
#     python-aarch64   Python 3.11 for aarch64, with the libraries that it and a compiled module need
#     hwloc-machines   recordings of machines from the tests of hwloc's source package: linux/NAME/sys has files of
#                      sysfs, FOLDER/NAME.output what hwloc finds: there, and on other machines in x86 and xml
#     criu             CRIU of Debian 13, as bin/criu, with its libraries: that of Debian 12 does not start on kernels
#                      whose vDSO has more pages
#
# bin/rustc is the compiler; use it with any cargo, as RUSTC. rust-aarch64 also has bin/qemu-aarch64. bin/python starts
# python-aarch64 with the emulator that QEMU names. apt checks the signatures of the lists and the hashes of the
# packages. A complete folder is reused.
set -euo pipefail

say() { printf 'debian-packages: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

name=${1-}
case $name in
  rust-1.85) wanted=1.85. architectures=amd64 ;;
  rust-aarch64) wanted='' architectures=amd64,arm64 ;;
  python-aarch64) architectures=arm64 ;;
  hwloc-machines | criu) architectures=amd64 ;;
  *) die "usage: $0 rust-1.85|rust-aarch64|python-aarch64|hwloc-machines|criu" ;;
esac
root=${XDG_CACHE_HOME:-${HOME:?neither HOME nor XDG_CACHE_HOME is set}/.cache}/fast-allreduce/$name
version=$root/fast-allreduce-version
finish() { say "$name: $(cat "$version")"; printf '%s\n' "$root"; exit 0; }
[ ! -s "$version" ] || finish
[ "$(uname -m)" = x86_64 ] || die "these packages are for x86_64"
for tool in apt-get dpkg-deb flock; do
  command -v $tool >/dev/null || die "$tool not found: this needs Debian"
done

mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"
flock 9
[ ! -s "$version" ] || finish # another run was faster
work=$root.installing
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages,root/bin}
: >"$work/status"

# The system's sources and keys, with lists of its own.
options=(-o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
  -o "APT::Architectures=$architectures" -o APT::Sandbox::User=root -o Acquire::Languages=none)
# other_sources EDIT: uses the system's sources as sed edits them.
other_sources() {
  local file
  mkdir "$work/sources"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
    [ ! -f "$file" ] || sed "$1" "$file" >"$work/sources/$(basename "$file")"
  done
  options+=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$work/sources")
}
case $name in
  hwloc-machines) other_sources 's/^Types:.*/Types: deb-src/; s/^deb /deb-src /' ;;
  criu) other_sources 's/bookworm/trixie/g' ;;
esac

# unpack: unpacks the packages that have been fetched.
unpack() {
  local package
  for package in "$work"/packages/*.deb; do dpkg-deb -x "$package" "$work/root"; done
}
# complete: puts the result in its place, and ends.
complete() {
  rm -rf "$root"
  mv "$work/root" "$root"
  finish
}

say "reading Debian's lists"
apt-get "${options[@]}" update -q >&2 || die "apt could not read the lists of packages: see above"

if [ "$name" = hwloc-machines ]; then
  (cd "$work/packages" && apt-get "${options[@]}" source -q --download-only hwloc >&2) ||
    die "apt could not fetch the source of hwloc: see above"
  python3 - "$work"/packages/hwloc_*.orig.tar.* "$work/root" >&2 <<'UNPACK'
import re, sys, tarfile
from pathlib import Path

source, root = sys.argv[1], Path(sys.argv[2])
WANTED = re.compile(r"/tests/hwloc/((?:linux|x86|xml)/[^/]+)\.(output|xml|options|env|tar\.bz2)$")
FILES = re.compile(
    r"sys/devices/(system/((cpu|node)/\w+|node/node\d+/(cpulist|distance)|cpu/cpu\d+/(cpu_capacity|topology/\w+"
    r"|cache/index\d+/(level|type|size|shared_cpu_list)))|cpu_(core|atom)/cpus)$"
)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


with tarfile.open(source) as package:
    special = set()
    for file in package:
        if not (named := WANTED.search(file.name)) or not file.isfile():
            continue
        name, kind = named.groups()
        content = package.extractfile(file)
        if kind in ("output", "xml"):
            write(root / f"{name}.output", content.read())
        elif kind != "tar.bz2":
            special.add(name)
        elif name.startswith("linux/"):
            with tarfile.open(fileobj=content) as recording:
                for member in recording:
                    if (found := FILES.search(member.name)) and member.isfile() and member.size <= 1 << 16:
                        # Some have NULs at the end.
                        write(root / name / found[0], recording.extractfile(member).read().rstrip(b"\0"))
# Views that depend on options, or have files under another name.
for view in root.glob("*/*.output"):
    name = str(view.relative_to(root)).removesuffix(".output")
    if name in special or name.startswith("linux/") and not (root / name).exists():
        view.unlink()
UNPACK
  basename "$work"/packages/hwloc_*.orig.tar.* >"$work/root/fast-allreduce-version"
  complete
fi

if [ "$name" = criu ]; then
  say "fetching criu and its libraries"
  apt-get "${options[@]}" -o Debug::NoLocking=true install -q -y --download-only --no-install-recommends criu >&2 ||
    die "a package is missing: see above"
  mv "$work"/cache/archives/*.deb "$work/packages"
  unpack
  # Its libraries need the C library that they come with.
  cat >"$work/root/bin/criu" <<'WRAPPER'
#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
libraries=$root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$root/usr/sbin/criu" "$@"
WRAPPER
  chmod +x "$work/root/bin/criu"
  "$work/root/bin/criu" --version | head -n 1 >"$work/root/fast-allreduce-version" ||
    die "it does not start: see above"
  complete
fi

# newest <package>: the newest version that begins with $wanted.
newest() {
  local begins='substr($2, 1, length(wanted)) == wanted { print $2 }'
  apt-cache "${options[@]}" madison "$1" | awk -F' *[|] *' -v wanted="$wanted" "$begins" | sort -V | tail -n 1
}
# depends <package> <pattern>: the package's dependency that matches.
depends() { apt-cache "${options[@]}" depends "$1" | sed -n "s/.*Depends: \($2\).*/\1/p"; }
if [ "$name" = python-aarch64 ]; then
  packages=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libexpat1 zlib1g libffi8 libssl3 libbz2-1.0
    liblzma5 libuuid1 libc6 libgcc-s1 libstdc++6)
  packages=("${packages[@]/%/:arm64}")
else
  rust=$(newest rustc-web:amd64)
  [ -n "$rust" ] || die "no rustc-web ${wanted}* in this system's sources: they must be Debian 12's"
  packages=("rustc-web:amd64=$rust" "libstd-rust-web-dev:amd64=$rust")
  if [ "$name" = rust-aarch64 ]; then
    [ "$(newest libstd-rust-web-dev:arm64)" = "$rust" ] ||
      die "rustc-web is $rust, and the library for arm64 is another: they differ for some hours after an update"
    packages+=("libstd-rust-web-dev:arm64=$rust" qemu-user-static:amd64)
  fi
  # The compiler itself is a shared library with LLVM as another.
  compiler=$(depends "libstd-rust-web-dev:amd64=$rust" 'libstd-rust.*')
  packages+=("$compiler:amd64=$rust")
  llvm=$(depends "$compiler:amd64=$rust" 'libllvm[0-9]*')
  [ -n "$llvm" ] || die "$compiler does not depend on LLVM: the packages have changed"
  packages+=("$llvm:amd64")
fi
say "fetching ${packages[*]}"
(cd "$work/packages" && apt-get "${options[@]}" download -q "${packages[@]}" >&2) ||
  die "a package is missing: see above"
unpack

if [ "$name" = python-aarch64 ]; then
  cat >"$work/root/bin/python" <<'WRAPPER'
#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONHOME="$root/usr"
exec "${QEMU:?QEMU must be the path of qemu-aarch64}" -L "$root" -0 "$root/bin/python" "$root/usr/bin/python3.11" "$@"
WRAPPER
  chmod +x "$work/root/bin/python"
  echo "${packages[0]} and its libraries" >"$work/root/fast-allreduce-version"
else
  # A wrapper that finds its libraries, wherever the folder is.
  cat >"$work/root/bin/rustc" <<'WRAPPER'
#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$root/usr/bin/rustc" "$@"
WRAPPER
  chmod +x "$work/root/bin/rustc"
  if [ "$name" = rust-aarch64 ]; then
    # The package has an emulator for each architecture; the others take 200 MB.
    find "$work/root/usr/bin" -name 'qemu-*' ! -name qemu-aarch64-static -delete
    ln -s ../usr/bin/qemu-aarch64-static "$work/root/bin/qemu-aarch64"
  fi
  "$work/root/bin/rustc" -vV >&2 || die "the compiler does not start: see above"
  {
    "$work/root/bin/rustc" --version
    [ "$name" != rust-aarch64 ] || "$work/root/bin/qemu-aarch64" --version | head -n 1
  } | paste -sd, >"$work/root/fast-allreduce-version"
fi
complete
