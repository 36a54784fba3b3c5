#!/usr/bin/env bash
# Builds mistral.rs's server with the adapter for candle, and serves a model with it on one, two and three CPU ranks
# (adapters/candle/mistralrs/test.py). Also runs the adapter's tests with the version of candle that mistral.rs uses.
#
# mistral.rs's crates come from the registry. adapters/candle/mistralrs/edit.py edits copies of two of them. Copies and
# compiled crates are kept outside of the clone, in a folder named after the lock file and the compiler. The copies do
# not depend on this repository, so a change of it compiles none of them again.
set -euo pipefail
cd "$(dirname "$0")/../adapters/candle/mistralrs"

version=0.8.1

cargo fmt --check
rustfmt --edition 2021 --check added/*.rs

key=$(cat Cargo.toml Cargo.lock <(rustc -vV) | sha256sum | head -c 16)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce/mistralrs-$version-$key
export CARGO_TARGET_DIR=$folder/target FAST_ALLREDUCE_NVCC=none
mkdir -p "$folder/published/src" "$CARGO_TARGET_DIR"
exec 9>"$folder/lock"
flock 9

edits=$(cat edit.py added/* | sha256sum)
if [ "$(cat "$folder/edits" 2>/dev/null)" != "$edits" ]; then
  rm -rf "$folder/edits" "$folder/crates"
  # A package that has the crates as dependencies, for cargo to download them.
  touch "$folder/published/src/lib.rs"
  cat >"$folder/published/Cargo.toml" <<END
[workspace]
[package]
name = "published"
edition = "2021"
[dependencies]
mistralrs-core = "=$version"
mistralrs-quant = "=$version"
END
  cp Cargo.lock "$folder/published"
  published=$(cargo metadata --format-version 1 --manifest-path "$folder/published/Cargo.toml" | python3 -c '
import json, sys
paths = {package["name"]: package["manifest_path"] for package in json.load(sys.stdin)["packages"]}
print(*(paths[name].removesuffix("/Cargo.toml") for name in ("mistralrs-quant", "mistralrs-core")), sep="\n")')
  mapfile -t published <<<"$published"
  ./edit.py "$folder/crates" "${published[@]}"
  echo "$edits" >"$folder/edits"
fi

patches=()
for crate in mistralrs-quant mistralrs-core; do
  patches+=(--config "patch.crates-io.$crate.path='$folder/crates/$crate'")
done
# What an earlier clone left might be newer than the files of this one.
find "$CARGO_TARGET_DIR" -maxdepth 3 \( -name '*fast[-_]allreduce*' -o -path '*/deps/candle-*' \) -prune \
  -exec rm -rf {} +
cargo "${patches[@]}" test --locked
cargo "${patches[@]}" build --locked
./test.py "$CARGO_TARGET_DIR/debug/fast-allreduce-mistralrs"
