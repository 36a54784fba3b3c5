#!/usr/bin/env bash
# Runs SGLang's groups on two and three CPU ranks with the plugin (python/tests/servers/sglang_groups.py).
#
# The environment (2.6 GB: torch, triton, and what SGLang's parallel state imports) is kept outside of the clone, in a
# folder named after its versions. The wheel is built below the target folder and used from there.
set -euo pipefail
cd "$(dirname "$0")/.."

sglang=0.5.23
# The versions that this SGLang requires.
torch=2.14.1
torchvision=0.29.2
triton=3.8.0
transformers=5.19.0

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none} PIP_DISABLE_PIP_VERSION_CHECK=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
work=$CARGO_TARGET_DIR/python-sglang
python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/sglang-$sglang-torch-$torch-$python_version
python=$environment/bin/python

if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  "$python" -m pip install --quiet --no-compile 'maturin>=1.7,<2' "transformers==$transformers" \
    filelock typing-extensions sympy networkx jinja2 fsspec setuptools numpy \
    aiohttp fastapi uvicorn uvloop msgspec packaging pillow prometheus-client psutil pybase64 pydantic \
    python-multipart pyzmq regex requests setproctitle sentencepiece tiktoken tqdm einops orjson interegular \
    partial_json_parser llguidance xxhash zstandard IPython apache-tvm-ffi==0.1.11 dill loguru
  # Without the CUDA libraries, which take several gigabytes, and SGLang's kernels, which are for GPUs.
  "$python" -m pip install --quiet --no-deps --no-compile "torch==$torch" "torchvision==$torchvision" \
    "triton==$triton" "sglang==$sglang" compressed-tensors gguf openai sniffio
  "$python" scripts/cpu-torch.py
  touch "$environment/complete"
fi

rm -rf "$work"
(cd python && "$environment/bin/maturin" build --release --interpreter "$python" --out "$work/wheels")
# Into a separate folder, so that the environment keeps only what others wrote. Entry points are found there as well.
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/wheels/*.whl
(cd python/tests && PYTHONPATH=$work/site "$python" servers/sglang_groups.py)
scripts/check-versions.py "SGLang's groups" "$python" sglang torch
