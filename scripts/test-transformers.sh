#!/usr/bin/env bash
# Runs transformers and accelerate, unchanged, on two CPU ranks over the torch.distributed backend: the tokens and the
# trained weights must be those of one rank (python/tests/servers/transformers_tokens.py and accelerate_steps.py).
#
#   scripts/test-transformers.sh [--hidden 1536 --layers 8 --rounds 5]    with --rounds it measures, too
#
# The environment (1 GB) is kept outside of the clone, in a folder named after its versions. The wheel is built below
# the target folder and used from there.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.15.0
transformers=5.24.0
accelerate=1.15.0

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none} PIP_DISABLE_PIP_VERSION_CHECK=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
work=$CARGO_TARGET_DIR/python-transformers
python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/transformers-$transformers-torch-$torch-$python_version
python=$environment/bin/python

if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  "$python" -m pip install --quiet 'maturin>=1.7,<2' \
    numpy filelock typing-extensions sympy networkx jinja2 fsspec setuptools
  # Without the CUDA libraries, which take several gigabytes.
  "$python" -m pip install --quiet --no-deps --no-compile "torch==$torch"
  "$python" scripts/cpu-torch.py
  "$python" -m pip install --quiet --no-compile "transformers==$transformers" "accelerate==$accelerate"
  touch "$environment/complete"
fi

rm -rf "$work"
(cd python && "$environment/bin/maturin" build --release --interpreter "$python" --out "$work/wheels")
# Into a separate folder, so that the environment keeps only what others wrote. Entry points are found there as well.
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/wheels/*.whl
cd python/tests/servers
export PYTHONPATH=$work/site
"$python" transformers_tokens.py "$@"
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d \
  --rdzv-endpoint localhost:0 accelerate_steps.py
cd ../../..
scripts/check-versions.py transformers "$python" torch transformers accelerate
