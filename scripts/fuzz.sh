#!/usr/bin/env bash
# Runs every decoder of what peers, files and the system say on changed and random input, by libFuzzer with coverage of
# the library's code. First a planted bug must be found.
#
#   scripts/fuzz.sh [SECONDS [decoder...]]     default: 10 seconds for each decoder
#
# Each line of lab/fuzz/corpus/DECODER is an input, with escapes as of printf '%b'. Inputs that reach new code are kept
# below ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/fuzz, where later runs begin with them. libFuzzer prints an input
# that ends in a panic, and leaves it in that folder's `crashes`: make it a line of the corpus, and a unit test.
#
# FUZZ_KEEP=1 adds the shortest inputs that reach new code to the corpora of the decoders that run.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-10}
shift $(($# > 0))
cache=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/fuzz
target=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
mkdir -p "$cache/crashes"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without a sanitizer, which needs a nightly compiler: safe Rust, with checks of indices, overflows and assertions.
export FAST_ALLREDUCE_NVCC=none
"$(scripts/tools.sh cargo-fuzz)" build --fuzz-dir lab/fuzz --sanitizer none --release --target-dir "$target" decode
program=$(find "$target" -path '*/release/decode' -type f | head -n 1)

# run <decoder> <seconds> <folder>...: false if libFuzzer found a failure. It prints the failure and its last line.
run() {
  DECODER=$1 timeout $(($2 + 60)) "$program" -max_total_time="$2" -timeout=5 -rss_limit_mb=1024 -max_len=4096 \
    -use_value_profile=1 -artifact_prefix="$cache/crashes/$1-" "${@:3}" >"$work/log" 2>&1
}

# escaped <file>...: a line for each, for printf '%b': the shortest 40 of at most 600 characters.
escaped() {
  python3 -c '
import sys
text = lambda byte: chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02x}"
lines = {"".join(map(text, open(path, "rb").read())) for path in sys.argv[1:]}
print("\n".join(sorted((line for line in lines if 0 < len(line) <= 600), key=len)[:40]))' "$@"
}

if run planted 30 || ! grep -q 'index out of bounds' "$work/log"; then
  tail "$work/log"
  echo "the planted bug was not found: this proves nothing"
  exit 1
fi
echo "planted: found after $(grep -o '^#[0-9]*' "$work/log" | tail -n 1 | tr -d '#') inputs"
rm -f "$cache"/crashes/planted-*

mapfile -t all < <(grep -rhoP 'testing::decoder!\(fuzz_\K\w+' src | sort)
[ ${#all[@]} -gt 10 ] || { echo "found only ${#all[@]} decoders"; exit 1; }
[ $# -gt 0 ] || set -- "${all[@]}"
failed=0
for decoder in "$@"; do
  corpus=lab/fuzz/corpus/$decoder
  mkdir -p "$cache/$decoder" "$work/$decoder"
  [ -s "$corpus" ] || { echo "$decoder: no corpus in $corpus"; failed=1; }
  number=0
  while IFS= read -r line; do
    printf '%b' "$line" >"$work/$decoder/$((number += 1))"
  done < <(cat "$corpus" 2>/dev/null)
  if run "fuzz_$decoder" "$seconds" "$cache/$decoder" "$work/$decoder"; then
    echo "$decoder: $number inputs of the corpus; $(grep -o 'cov: [0-9]*' "$work/log" | tail -n 1);" \
      "$(sed -n 's/^Done \([0-9]* runs\).*/\1/p' "$work/log")"
  else
    echo "$decoder: FAILED"
    tail -n 40 "$work/log"
    failed=1
  fi
  if [ "${FUZZ_KEEP-}" = 1 ]; then
    mkdir "$work/kept"
    DECODER=fuzz_$decoder "$program" -merge=1 "$work/kept" "$work/$decoder" "$cache/$decoder" >/dev/null 2>&1
    { cat "$corpus"; escaped "$work"/kept/*; } | awk '!seen[$0]++' >"$work/corpus"
    mv "$work/corpus" "$corpus"
    rm -rf "$work/kept"
  fi
done
exit $failed
