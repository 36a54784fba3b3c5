#!/usr/bin/env bash
# Builds packages as they are released.
#
#   scripts/packages.sh DIR [PART...]    by default all parts:
#     sdist                              the Python package's sources
#     x86_64 aarch64                     wheels with the stable ABI
#     x86_64-t aarch64-t                 wheels for free-threaded Python 3.14
#     c-x86_64 c-aarch64                 the C library, as an archive of its installed files
#     crates                             what the registry of crates gets
#
# The kernels are the prebuilt ones: those in kernels/fatbin (scripts/kernels.sh), or in the folder that
# FAST_ALLREDUCE_KERNELS names. g++ compiles the host's kernels, as in all other builds; zig only links, with the
# symbols of glibc 2.28. SOURCE_DATE_EPOCH is the time of the last commit unless it is set.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
to=$(realpath -m "$1")
kernels=$(realpath -m "${FAST_ALLREDUCE_KERNELS:-$(dirname "$0")/../kernels/fatbin}")
cd "$(dirname "$0")/.."
shift
[ $# -gt 0 ] || set -- sdist crates x86_64 x86_64-t c-x86_64 aarch64 aarch64-t c-aarch64
[ -s "$kernels/FACTS" ] || { echo "$kernels has no kernels: run scripts/kernels.sh" >&2; exit 1; }
tools=$(scripts/packaging-environment.sh)
export PATH=$tools/bin:$PATH
export FAST_ALLREDUCE_NVCC= FAST_ALLREDUCE_ARCHS= FAST_ALLREDUCE_KERNELS=$kernels CARGO_INCREMENTAL=0
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# for_machine ARCHITECTURE: selects the compilers, and sets `target`.
for_machine() {
  target=$1-unknown-linux-gnu
  local name=${target//-/_} gcc=gcc
  if [ "$1" = aarch64 ]; then
    gcc=aarch64-linux-gnu-gcc
    RUSTC=$(scripts/debian-packages.sh rust-aarch64)/bin/rustc
    export RUSTC
  fi
  export "CC_$name=$gcc" "CXX_$name=${gcc/gcc/g++}" "AR_$name=${gcc/gcc/ar}"
  # Messages of panics name files: without this machine's folders.
  export RUSTFLAGS="--remap-path-prefix=$PWD=/fast-allreduce --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
}

# python_wheel ARCHITECTURE [ARGUMENT...]
python_wheel() {
  for_machine "$1"
  shift
  (cd python && maturin build --release --locked --zig --compatibility manylinux_2_28 --auditwheel check \
    --target "$target" --out "$scratch" --features prebuilt "$@")
  # maturin's SBOM has this folder in the names of our own crates.
  wheel unpack --dest "$scratch/wheel" "$scratch"/*.whl
  sed -i "s|$PWD|/fast-allreduce|g" "$scratch"/wheel/*/*.dist-info/sboms/*.json
  wheel pack --dest-dir "$to" "$scratch"/wheel/*
}

# The installed files find each other wherever the archive is unpacked.
c_library() {
  for_machine "$1"
  local name=fast_allreduce-c-$version-linux-$1 linker
  linker=CARGO_TARGET_${target//-/_}_LINKER
  printf '#!/bin/sh\nexec cargo-zigbuild zig cc -- -target %s-linux-gnu.2.28 "$@"\n' "$1" >"$scratch/linker"
  chmod +x "$scratch/linker"
  export "${linker^^}=$scratch/linker" DESTDIR=$scratch
  capi/install.sh --prefix "/$name" --features prebuilt --target "$target"
  sed -i "s|^prefix=.*|prefix=\${pcfiledir}/../..|" "$scratch/$name/lib/pkgconfig/fast_allreduce.pc"
  cp LICENSE-* docs/c.md "$scratch/$name"
  pack "$name"
}

# pack NAME: makes an archive of that folder in $scratch; the same files give the same bytes.
pack() {
  tar -C "$scratch" --format=ustar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --mode=u+w,go=rX -cf - "$1" | gzip -n -9 >"$to/$1.tar.gz"
}

source_distribution() {
  (cd python && maturin sdist --out "$scratch")
  tar -C "$scratch" -xf "$scratch"/*.tar.gz
  local folder
  folder=$(ls -d "$scratch"/*/)
  # maturin copies this manifest, or writes it without the targets that are not in the archive, by chance.
  awk '/^\[/ { skip = /^\[\[(test|bench|example)\]\]/ } !skip' Cargo.toml >"$folder/Cargo.toml"
  # The kernels, wherever they are: maturin packs only those in kernels/fatbin.
  [ -d "$folder/kernels" ] || { echo "maturin's archive has no crate of the kernels" >&2; return 1; }
  rm -rf "$folder/kernels/fatbin"
  mkdir "$folder/kernels/fatbin"
  cp "$kernels"/* "$folder/kernels/fatbin"
  pack "$(basename "$folder")"
}

# The registry's checks, except a build: scripts/test-artefacts.sh builds the packed files, where nothing else is.
crates() {
  local crates=(fast-allreduce-kernels fast-allreduce fast-allreduce-oracle fast-allreduce-cli) crate
  # Cargo packs only files of the crate.
  diff -r "$kernels" kernels/fatbin >&2 ||
    { echo "crates have the kernels in kernels/fatbin: copy those of FAST_ALLREDUCE_KERNELS there" >&2; return 1; }
  cargo publish --dry-run --no-verify --locked --allow-dirty "${crates[@]/#/--package=}"
  cargo package --no-verify --locked --allow-dirty "${crates[@]/#/--package=}"
  for crate in "${crates[@]}"; do cp "$CARGO_TARGET_DIR/package/$crate-$version.crate" "$to"; done
}

mkdir -p "$to"
for part in "$@"; do
  rm -rf "${scratch:?}"/*
  case $part in
    sdist) source_distribution ;;
    crates) (export FAST_ALLREDUCE_NVCC=none FAST_ALLREDUCE_KERNELS= && crates) ;;
    x86_64 | aarch64) (python_wheel "$part") ;;
    x86_64-t | aarch64-t) (python_wheel "${part%-t}" --interpreter python3.14t) ;;
    c-x86_64 | c-aarch64) (c_library "${part#c-}") ;;
    *) echo "$part is not a part" >&2 && exit 2 ;;
  esac
done
