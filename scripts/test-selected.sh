#!/usr/bin/env bash
# Runs the tests that filters select, and fails if a filter selects none that passes, which cargo accepts.
#
#   scripts/test-selected.sh cargo test [OPTION...] -- FILTER...
set -euo pipefail
filters=("$@")
while [ "${filters[0]-}" != -- ]; do
  [ ${#filters[@]} -gt 1 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
  filters=("${filters[@]:1}")
done
filters=("${filters[@]:1}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" | tee "$log"
for filter in "${filters[@]}"; do
  grep -q "^test .*$filter.*ok$" "$log" || { echo "no test ran for the filter $filter" >&2; exit 1; }
done
