#!/usr/bin/env bash
# Builds the C library and installs it: header, shared and static library, files for pkg-config and CMake.
#
#   capi/install.sh [--prefix /usr/local] [--features cuda] [--profile release] [--target TRIPLE]
#
# DESTDIR is prepended to the prefix, for packages. CARGO_TARGET_DIR has the same meaning as for Cargo.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=/usr/local features= profile=release target=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=$2 ;;
    --features) features=$2 ;;
    --profile) profile=$2 ;;
    --target) target=$2 ;;
    *) sed -n 's/^#   capi/usage: capi/p' "$0" >&2 && exit 2 ;;
  esac
  shift 2
done

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Cargo prints the libraries that a statically linked program also needs.
cargo rustc --package fast-allreduce-capi --profile "$profile" --features "$features" \
  ${target:+--target "$target"} -- --print native-static-libs 2>&1 | tee "$log" >&2
private=$(sed -n 's/^note: native-static-libs: //p' "$log" | tail -n 1)
# Cargo prints nothing if there is nothing to build; these are the libraries that Rust and C++ need.
private=${private:--lstdc++ -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc}

folder=${CARGO_TARGET_DIR:-target}${target:+/$target}/${profile/#dev/debug}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
abi=$(sed -n 's/^#define FAST_ALLREDUCE_ABI_VERSION //p' capi/include/fast_allreduce.h)
to=${DESTDIR:-}$prefix
install -d "$to/include" "$to/lib/pkgconfig" "$to/lib/cmake/fast_allreduce"
install -m 644 capi/include/fast_allreduce.h "$to/include/"
install -m 644 "$folder/libfast_allreduce_capi.a" "$to/lib/libfast_allreduce.a"
install -m 755 "$folder/libfast_allreduce_capi.so" "$to/lib/libfast_allreduce.so.$version"
ln -sf "libfast_allreduce.so.$version" "$to/lib/libfast_allreduce.so.$abi"
ln -sf "libfast_allreduce.so.$abi" "$to/lib/libfast_allreduce.so"
fill() {
  sed -e "s|@prefix@|$prefix|" -e "s|@version@|$version|" -e "s|@abi@|$abi|" -e "s|@private@|$private|" \
    -e "s|@private_list@|${private// /;}|" "capi/$1.in" >"$to/lib/$2/$(basename "$1")"
}
fill fast_allreduce.pc pkgconfig
fill cmake/fast_allreduce-config.cmake cmake/fast_allreduce
fill cmake/fast_allreduce-config-version.cmake cmake/fast_allreduce
echo "installed fast_allreduce $version in $to"
