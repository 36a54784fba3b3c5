#!/usr/bin/env bash
# Tests builds with prebuilt kernels, with placeholders from the stand-in's nvcc: which kernels a build embeds, and what
# it refuses. tests/build_script.rs has damaged folders of kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

stand_in=$PWD/lab/stand_in_driver/nvcc
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export FAST_ALLREDUCE_NVCC= FAST_ALLREDUCE_ARCHS=
passed=0 failed=0

# expect TEXT NAME=VALUE...: the library checked with these variables has this fact, or fails with this message.
expect() {
  local text=$1 said
  shift
  # Some of the builds are to fail: only a successful one prints facts, and only a failing one a message.
  said=$(env "$@" cargo check --locked --package fast-allreduce --features cuda-13000,prebuilt \
    --message-format json-render-diagnostics 2>&1) || said+=" (the build failed)"
  if grep -qF "$text" <<<"$said"; then
    passed=$((passed + 1))
    echo "$*: $text"
  else
    failed=$((failed + 1))
    printf '%s: FAILED: no "%s" in\n' "$*" "$text"
    grep -E 'CUDA_BUILD|panicked' -A 3 <<<"$said" | cut -c 1-1000
  fi
}

FAST_ALLREDUCE_NVCC=$stand_in scripts/kernels.sh "$scratch/kernels"
[ "$(cat "$scratch"/kernels/*.fatbin | wc -l)" = 4 ]
cp -r "$scratch/kernels" "$scratch/other"
sed -i 's/^sources .*/sources 0000000000000000/' "$scratch/other/FACTS"
mkdir "$scratch/empty"

kernels=FAST_ALLREDUCE_KERNELS=$scratch/kernels
expect "prebuilt by nvcc stand-in-without-kernels for sm_90, 144 bytes" "$kernels"
expect "nvcc stand-in-without-kernels ($stand_in) for sm_90, 144 bytes" "$kernels" FAST_ALLREDUCE_NVCC="$stand_in"
expect "none: FAST_ALLREDUCE_NVCC=none" "$kernels" FAST_ALLREDUCE_NVCC=none
expect "the prebuilt kernels are for sm_90; FAST_ALLREDUCE_NVCC=PATH compiles others" "$kernels" \
  FAST_ALLREDUCE_ARCHS=sm_80
expect "are of other sources (fingerprints 0000000000000000" FAST_ALLREDUCE_KERNELS="$scratch/other"
expect "is not the absolute path of a folder with kernels" FAST_ALLREDUCE_KERNELS="$scratch/empty"
expect "is not the absolute path of a folder with kernels" FAST_ALLREDUCE_KERNELS="$(realpath --relative-to kernels \
  "$scratch/kernels")"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
