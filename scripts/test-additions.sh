#!/usr/bin/env bash
# Applies each patch of tests/additions to a copy of the sources, runs the generators, and runs tests that find the
# addition unchanged: the tests of all settings, or part of the conformance suite. Fails if a patch touches more
# hand-written files (tests excluded) than docs/architecture.md lists.
#
# test-additions.sh [--apply | kind...]: all kinds by default, none with --apply. Of the others it only checks that
# their patches apply, and their numbers of files.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=none
# No shared target folder: Cargo distinguishes the packages of two copies of a workspace only by the times of their
# files.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/additions
copy=$CARGO_TARGET_DIR/copy
trap 'rm -rf "$copy"' EXIT
applied=0 passed=0 failed=0

most_files() {
  case $1 in
    type | op | algorithm) echo 3 ;;
    setting | norm) echo 2 ;;
    collective) echo 4 ;;
    scaling) echo 1 ;;
    *) echo "nothing is promised of an addition of the kind $1" >&2 && return 1 ;;
  esac
}

# within_promise <kind> <patch>
within_promise() {
  local kind=$1 patch=$2 most touched
  most=$(most_files "$kind") || return
  touched=$(sed -n 's|^+++ b/||p' "$patch" | grep -vc '^tests/') || return
  echo "$kind: $touched files by hand, $most promised"
  [ "$touched" -le "$most" ] && git apply --check "$patch"
}

# selected <argument>...: cargo test with filters, each of which selects a test. Prints the output of a failure only.
selected() {
  local said
  said=$(scripts/test-selected.sh cargo test "$@" 2>&1) || { echo "$said" && return 1; }
}

# addition <kind>
addition() {
  local kind=$1 patch=$PWD/tests/additions/$1.patch
  rm -rf "$copy" && mkdir -p "$copy" || return
  git ls-files -z | xargs -0 cp --parents -t "$copy" || return
  cd "$copy" || return
  # Not as part of a repository that contains the copy.
  GIT_CEILING_DIRECTORIES=$CARGO_TARGET_DIR git apply "$patch" || return
  cargo run --quiet --package fast-allreduce-catalogue --example generate || return
  FAST_ALLREDUCE_BINDINGS=write cargo test --quiet --package fast-allreduce-catalogue --test bindings || return
  cargo check --quiet --package fast-allreduce-capi --package fast-allreduce-cli || return
  cargo test --quiet --package fast-allreduce-catalogue || return
  case $kind in
    setting) selected --lib -- settings:: ;;
    norm | scaling) selected --test conformance -- fused::every_shape fused::the_longest_rows ;;
    algorithm) selected --test conformance -- mixed::every_type worlds::threads::every_boundary ;;
    collective) selected --test conformance -- mixed:: worlds::threads::every_boundary_of_collectives ;;
    *) selected --test conformance -- mixed::every_type arguments::operations ;;
  esac
}

if [ $# -eq 0 ]; then
  # shellcheck disable=SC2046
  set -- $(basename --suffix .patch tests/additions/*.patch)
fi
for patch in tests/additions/*.patch; do
  if within_promise "$(basename --suffix .patch "$patch")" "$patch"; then
    applied=$((applied + 1))
  else
    failed=$((failed + 1))
    echo "$patch: FAILED"
  fi
done
[ "$1" != --apply ] || shift
for kind in "$@"; do
  if (addition "$kind"); then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "$kind: FAILED"
  fi
done
echo "$applied patches apply; $passed passed, $failed failed"
[ "$applied" -gt 0 ] && [ "$passed" -eq $# ] && [ "$failed" -eq 0 ]
