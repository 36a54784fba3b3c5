#!/usr/bin/env bash
# Compiles the CUDA kernels into a folder: the fatbins, and the file FACTS, which says what they were compiled from.
# About ten minutes on two cores.
#
#   scripts/kernels.sh [DIR]    DIR: default kernels/fatbin, which the crate fast-allreduce-kernels packs
#
# FAST_ALLREDUCE_NVCC and FAST_ALLREDUCE_ARCHS have the same meaning as for Cargo; by default it takes the nvcc of
# scripts/cuda-toolchain.sh and all architectures.
set -euo pipefail
to=$(realpath -m "${1:-$(dirname "$0")/../kernels/fatbin}")
cd "$(dirname "$0")/.."

if [ "${FAST_ALLREDUCE_NVCC:-none}" = none ]; then
  FAST_ALLREDUCE_NVCC=$(scripts/cuda-toolchain.sh)/bin/nvcc
fi
export FAST_ALLREDUCE_NVCC FAST_ALLREDUCE_ARCHS=${FAST_ALLREDUCE_ARCHS:-all}
# Cargo says in which folder the build script has written.
out=$(cargo check --locked --package fast-allreduce --features cuda-13000 --message-format json-render-diagnostics |
  grep '"FAST_ALLREDUCE_CUDA_BUILD"' | sed 's/.*"out_dir":"\([^"]*\)".*/\1/')
# Only kernels are replaced.
[ ! -e "$to" ] || [ -f "$to/FACTS" ] || rmdir "$to"
rm -rf "$to.new"
mkdir -p "$to.new"
cp "$out/FACTS" "$to.new"
sed -n 's/^\(.*[.]fatbin\) .*/\1/p' "$out/FACTS" | while read -r name; do cp "$out/$name" "$to.new"; done
rm -rf "$to"
mv "$to.new" "$to"
echo "$to: $(du -bc "$to"/*.fatbin | tail -n 1 | cut -f 1) bytes, nvcc $(sed -n 's/^nvcc //p' "$to/FACTS") for" \
  "$(sed -n 's/^archs //p' "$to/FACTS")"
