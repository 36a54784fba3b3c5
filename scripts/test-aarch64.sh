#!/usr/bin/env bash
# Builds the library for aarch64 and runs a part of its suites under qemu-user: kernels, Rust, Python's module and their
# calls of the system as aarch64 code. It shows nothing about the order of memory accesses, which is stricter on x86-64,
# and nothing about speed. Ranks in Rust are threads: a test that starts itself as a process fails, because the system
# cannot start aarch64 programs. Those of Python are processes, which a script starts. qemu 7.2 has no process_vm_readv
# and no robust futexes, so that the library's other ways run.
#
#   scripts/test-aarch64.sh [filter...]     tests in Rust; without a filter the part that CI runs, and that of Python
#
# Needs g++-aarch64-linux-gnu. CARGO_TARGET_DIR has an aarch64 folder beside the others.
set -euo pipefail
cd "$(dirname "$0")/.."

rust=$(scripts/debian-packages.sh rust-aarch64)
compiler=$(command -v aarch64-linux-gnu-g++) || { echo "aarch64-linux-gnu-g++ not found" >&2; exit 1; }
target=aarch64-unknown-linux-gnu
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
export RUSTC=$rust/bin/rustc CXX_aarch64_unknown_linux_gnu=$compiler AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$rust/bin/qemu-aarch64 -L /usr/aarch64-linux-gnu"
export FAST_ALLREDUCE_NVCC=none FAST_ALLREDUCE_REQUIRE=
all=
if [ $# -eq 0 ]; then
  all=yes
  # Every type, operation and algorithm, conversions, and an error. Of several tests of one kind the short one.
  set -- typed::typed_calls instruction_sets:: conversions:: quantized::typed_calls experts::typed_calls \
    fused::typed_calls row_shares::typed_calls raw::between_threads symmetric::views_between_threads \
    worlds::threads::every_type_operation_and_algorithm worlds::threads::every_small_count \
    errors::a_rank_that_does_not_call_is_named_in_time float_state::
fi
scripts/test-selected.sh cargo test --locked --target $target --test conformance --test faults -- "$@"
[ -n "$all" ] || exit 0

# The Python package as a wheel has it, without CUDA, in a folder of its own.
site=$CARGO_TARGET_DIR/$target/python
python=$(scripts/debian-packages.sh python-aarch64)/bin/python
cargo build --locked --target $target --manifest-path python/Cargo.toml --no-default-features
rm -rf "$site"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$site" \
  --only-binary :all: --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version 3.11 \
  numpy pytest
cp -r python/lib/fast_allreduce "$site"
cp "$CARGO_TARGET_DIR/$target/debug/lib_native.so" "$site/fast_allreduce/_native.abi3.so"
cd python/tests
export QEMU=$rust/bin/qemu-aarch64 PYTHONPATH=$site
# All kinds of buffers, and every collective between two ranks.
"$python" -m pytest -p no:cacheprovider --verbose test_buffers.py test_collectives.py -k 'buffers or 2' |
  tee "$site/log"
for file in test_buffers test_collectives; do
  grep -q "$file.py::.* PASSED" "$site/log" || { echo "no test of $file.py ran" >&2; exit 1; }
done
