#!/usr/bin/env bash
# Predicts the time of the allreduce kernels on GPUs from the code that nvcc generates (the model: lab/gpu-model.md).
# Needs no GPU; downloads nvcc.
#   scripts/gpu-model.sh [-o FOLDER] [ARGUMENTS...]
# writes predictions for an H100 to FOLDER (default target/gpu-model), as gpu-model.json and gpu-model.html, and
# prints a table. ARGUMENTS are those of ptx-clock: --machine b200, --ranks 4, --sizes 8K,64K, --causes, --path,
# --constants FILE; --help lists them. PTX_NVCC selects another nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
out=$target/gpu-model
if [ "${1:-}" = -o ]; then
  out=${2:?-o needs a folder}
  shift 2
fi
nvcc=${PTX_NVCC:-$(scripts/cuda-toolchain.sh)/bin/nvcc}
mkdir -p "$out"

mapfile -t flags < <(grep -vE '^(#|$)' build/nvcc.flags)
# Compiles again only if a source is newer: it takes minutes.
if [ ! -e "$out/kernels.cubin" ] ||
  [ -n "$(find csrc build/nvcc.flags -newer "$out/kernels.cubin" -print -quit)" ]; then
  "$nvcc" -ptx -lineinfo -arch=compute_90 "${flags[@]}" -I csrc -o "$out/kernels.ptx" csrc/cuda/kernels.cu
  "$(dirname "$nvcc")/ptxas" -arch=sm_90 -o "$out/kernels.cubin" "$out/kernels.ptx"
fi
references=lab/ptx_machine/tests/references/references.cu
"$nvcc" -ptx -lineinfo -arch=compute_90 -std=c++17 -O3 -o "$out/references.ptx" "$references"

cargo run --quiet --release --package fast-allreduce-ptx-machine --bin ptx-clock -- "$out/kernels.ptx" \
  --references "$out/references.ptx" --cubin "$out/kernels.cubin" \
  --json "$out/gpu-model.json" --html "$out/gpu-model.html" "$@"
echo "$out/gpu-model.html"
