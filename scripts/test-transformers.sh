#!/usr/bin/env bash
# Runs transformers and accelerate, unchanged, on two CPU ranks over the torch.distributed backend: the tokens and the
# trained weights must be those of one rank (python/tests/servers/transformers_tokens.py and accelerate_steps.py).
#
#   scripts/test-transformers.sh [--hidden 1536 --layers 8 --rounds 5]    with --rounds it measures, too
#
# The wheel is built below the target folder and used from there.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none} PIP_DISABLE_PIP_VERSION_CHECK=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
work=$CARGO_TARGET_DIR/python-transformers
environment=$(scripts/torch-environment.sh)
python=$environment/bin/python

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
