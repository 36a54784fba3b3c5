#!/usr/bin/env bash
# Prints the folder of a virtual environment with torch for CPUs, transformers, accelerate and maturin. Where it does
# not exist, it is built outside of the clone, in a folder named after its versions (1.4 GB). Scripts that use it
# install nothing into it.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.15.0
transformers=5.24.0
accelerate=1.15.0

export PIP_DISABLE_PIP_VERSION_CHECK=1
versions=torch-$torch-transformers-$transformers-accelerate-$accelerate
python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/$versions-$python_version
mkdir -p "$environment"
# One of several scripts builds it, and the others wait.
exec 9>"$environment.lock"
flock 9
if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  pip=("$environment/bin/python" -m pip install --quiet --no-compile)
  # Without the CUDA libraries, which take several gigabytes.
  "${pip[@]}" --no-deps "torch==$torch"
  site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' "$site/torch-$torch.dist-info/METADATA"
  # torch's requirements are installed now.
  "${pip[@]}" "torch==$torch" numpy "transformers==$transformers" "accelerate==$accelerate" 'maturin>=1.7,<2'
  "$environment/bin/python" scripts/cpu-torch.py
  touch "$environment/complete"
fi >&2
echo "$environment"
