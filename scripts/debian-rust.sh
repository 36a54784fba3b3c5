#!/usr/bin/env bash
# Obtains a Rust compiler from Debian's packages, unpacked in a folder of its own: nothing is installed. It needs no
# root, and leaves the system's lists of packages as they are. Debian 12's sources have both compilers.
#
#   scripts/debian-rust.sh NAME     prints the folder on stdout: ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/NAME
#     rust-1.85       rustc 1.85, the oldest that the library supports
#     rust-aarch64    Debian's newest rustc, the standard library for aarch64, and qemu-user
#
# bin/rustc is the compiler; use it with any cargo, as RUSTC. rust-aarch64 also has bin/qemu-aarch64. apt checks the
# signatures of the lists and the hashes of the packages. A complete folder is reused.
set -euo pipefail

say() { printf 'debian-rust: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

name=${1-}
case $name in
  rust-1.85) wanted=1.85. architectures=amd64 ;;
  rust-aarch64) wanted='' architectures=amd64,arm64 ;;
  *) die "usage: $0 rust-1.85|rust-aarch64" ;;
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
say "reading Debian's lists"
apt-get "${options[@]}" update -q >&2 || die "apt could not read the lists of packages: see above"

# newest <package>: the newest version that begins with $wanted.
newest() {
  local begins='substr($2, 1, length(wanted)) == wanted { print $2 }'
  apt-cache "${options[@]}" madison "$1" | awk -F' *[|] *' -v wanted="$wanted" "$begins" | sort -V | tail -n 1
}
rust=$(newest rustc-web:amd64)
[ -n "$rust" ] || die "no rustc-web ${wanted}* in this system's sources: they must be Debian 12's"
packages=("rustc-web:amd64=$rust" "libstd-rust-web-dev:amd64=$rust")
if [ "$name" = rust-aarch64 ]; then
  [ "$(newest libstd-rust-web-dev:arm64)" = "$rust" ] ||
    die "rustc-web is $rust, and the library for arm64 is another: they differ for some hours after an update"
  packages+=("libstd-rust-web-dev:arm64=$rust" qemu-user-static:amd64)
fi
# The compiler itself is a shared library with LLVM as another.
# depends <package> <pattern>: the package's dependency that matches.
depends() { apt-cache "${options[@]}" depends "$1" | sed -n "s/.*Depends: \($2\).*/\1/p"; }
compiler=$(depends "libstd-rust-web-dev:amd64=$rust" 'libstd-rust.*')
packages+=("$compiler:amd64=$rust")
llvm=$(depends "$compiler:amd64=$rust" 'libllvm[0-9]*')
[ -n "$llvm" ] || die "$compiler does not depend on LLVM: the packages have changed"
packages+=("$llvm:amd64")
say "fetching ${packages[*]}"
(cd "$work/packages" && apt-get "${options[@]}" download -q "${packages[@]}" >&2) ||
  die "a package is missing: see above"
for package in "$work"/packages/*.deb; do dpkg-deb -x "$package" "$work/root"; done

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
rm -rf "$root"
mv "$work/root" "$root"
finish
