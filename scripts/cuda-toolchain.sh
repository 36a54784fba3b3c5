#!/usr/bin/env bash
# Obtains nvcc 13.0 and what the code generation checks need (ptxas, cuobjdump, nvdisasm) from
# Python wheels: no GPU, no driver and no system-wide install.
#
#   scripts/cuda-toolchain.sh [DIR]    DIR: default ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/cuda-13.0
#
# Prints only the toolkit's root on stdout:
#   export FAST_ALLREDUCE_NVCC="$(scripts/cuda-toolchain.sh)/bin/nvcc"
#
# A complete toolkit is reused; anything else is built again in a temporary folder and renamed into place.
set -euo pipefail

# Exact versions: the code generation checks judge the output of exactly these compilers.
# The disassemblers were first published as wheels with 13.2; they read the cubins of older compilers.
packages=(
  nvidia-cuda-nvcc==13.0.88
  nvidia-nvvm==13.0.88
  nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85
  nvidia-cuda-cuobjdump==13.2.86
  nvidia-cuda-nvdisasm==13.2.86
)

say() { printf 'cuda-toolchain: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

case "${1-}" in
  -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 0 ;;
  -*) die "unknown option $1 (usage: $0 [DIR])" ;;
esac
[ $# -le 1 ] || die "one argument at most: the folder to install into"

cache=${XDG_CACHE_HOME:-${HOME:?neither HOME nor XDG_CACHE_HOME is set: give a folder}/.cache}
root=${1:-$cache/fast-allreduce/cuda-13.0}
mkdir -p "$(dirname "$root")"
root=$(cd "$(dirname "$root")" && pwd)/$(basename "$root")

# The marker lists the versions; a change of them reinstalls the toolkit.
marker=.fast-allreduce-toolchain
finished() { [ -x "$root/bin/nvcc" ] && [ "$(cat "$root/$marker" 2>/dev/null)" = "${packages[*]}" ]; }
finish() { printf '%s\n' "$root"; exit 0; }

finished && finish

command -v flock >/dev/null || die "flock not found: install util-linux"
command -v python3 >/dev/null || die "python3 not found: install it, with pip (Debian: apt-get install python3-pip)"
python3 -m pip --version >/dev/null 2>&1 ||
  die "python3 has no pip: install it (Debian: apt-get install python3-pip; else: python3 -m ensurepip)"
[ -n "${NVCC_CCBIN-}" ] || command -v gcc >/dev/null ||
  die "gcc not found: nvcc needs a host compiler (Debian: apt-get install g++)"

exec 9>"$root.fast-allreduce-lock"
flock 9
finished && finish # another run was faster

# Only folders that this script made are replaced, never a user's own toolkit.
if [ -e "$root" ] && [ ! -e "$root/$marker" ]; then
  rmdir "$root" 2>/dev/null || die "$root exists and was not made by this script: give another folder"
fi

work=$root.fast-allreduce-installing
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir "$work"

say "installing into $root"
# Without dependencies: nvcc's wheel requires the newest nvvm and crt, which have another version.
PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore python3 -m pip install \
  --no-input --no-deps --no-compile --only-binary :all: --target "$work/wheels" "${packages[@]}" >&2 ||
  die "pip could not install the wheels: see above"

# All CUDA 13 wheels unpack into this folder, in the usual layout of a toolkit.
new=$work/wheels/nvidia/cu13
for tool in bin/nvcc bin/ptxas bin/fatbinary bin/cudafe++ bin/cuobjdump bin/nvdisasm nvvm/bin/cicc; do
  [ -x "$new/$tool" ] || die "the wheels did not bring $tool: their layout has changed"
done

# A real compilation finds what a list of files cannot: missing headers, a host compiler that nvcc rejects, tools that
# nvcc does not find.
say "compiling a kernel for sm_90"
printf '#include <cuda_bf16.h>\nextern "C" __global__ void smoke(__nv_bfloat16* x) { *x = __float2bfloat16(1.f); }\n' \
  >"$work/smoke.cu"
"$new/bin/nvcc" -fatbin -std=c++17 -gencode arch=compute_90,code=sm_90 -o "$work/smoke.fatbin" "$work/smoke.cu" >&2 ||
  die "nvcc was installed but does not compile: see above"
"$new/bin/cuobjdump" -sass "$work/smoke.fatbin" | grep 'Function : smoke' >&2 ||
  die "nvcc compiled a kernel that cuobjdump does not find"

printf '%s\n' "${packages[*]}" >"$new/$marker"
[ ! -e "$root" ] || mv "$root" "$work/replaced"
mv "$new" "$root"
say "done: $("$root/bin/nvcc" --version | sed -n 's/.*, V/nvcc /p')"
finish
