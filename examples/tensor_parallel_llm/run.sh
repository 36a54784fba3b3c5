#!/usr/bin/env bash
# Runs the model on 1 to 4 ranks, and fails unless all outputs are the same, bit for bit.
#
#   run.sh random    random weights: 9 heads in 3 groups, 64 tokens
#   run.sh real      SmolLM2-135M-Instruct, which it fetches first
set -euo pipefail
cd "$(dirname "$0")"

case ${1:-} in
  random) weights=(--random --layers 6) ;;
  real) weights=(--model "$(./fetch-weights.sh)") ;;
  *) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac

cargo build --release --locked
program=${CARGO_TARGET_DIR:-$PWD/../../adapters/candle/target}/release/tensor-parallel-llm
expected=
for ranks in 1 2 3 4; do
  output=$("$program" --ranks "$ranks" --tokens 48 "${weights[@]}" "Once upon a time")
  echo "$output"
  # The text and the digests. Times differ.
  said=$(grep -v '^# fast-allreduce' <<<"$output")
  [ "$said" = "${expected:=$said}" ] || { echo "FAILED: the output of $ranks ranks differs"; exit 1; }
done
