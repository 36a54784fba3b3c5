#!/usr/bin/env bash
# Checks licences and sources of the third-party crates of every lock file, by cargo-deny and deny.toml, and that each
# crate of a package stands in supply-chain, by cargo-vet. The self-test first removes a licence, the registry and a
# crate from copies of these files, and bans a crate that is used. It expects that each is found.
#
#   scripts/check-dependencies.sh
#
# cargo-vet fetches nothing. To accept a new crate or version, read it (`cargo vet inspect`), then run `cargo vet
# certify`; `cargo vet add-exemption` accepts it unread. scripts/tools.sh prints the path of cargo-vet.
#
# CARGO_DENY_DB: a folder with a clone of RustSec's database, below which cargo-deny finds it (`db-path`). Without it,
# advisories are not checked, and the output says so. adapters/candle/mistralrs is left out: its lock file belongs to
# crates that its script edits.
set -euo pipefail
cd "$(dirname "$0")/.."

deny=$(scripts/tools.sh cargo-deny)
vet=$(scripts/tools.sh cargo-vet)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# check <manifest> <configuration> <what>...
check() { "$deny" --manifest-path "$1" --locked --config "$2" check "${@:3}"; }
# vet <manifest> <folder>
vet() {
  PATH=$(dirname "$vet"):$PATH cargo vet --locked --manifest-path "$1" --store-path "$2" --cache-dir "$work/cache"
}

sed '/^  "MIT",$/d' deny.toml >"$work/licence.toml"
sed '/^\[sources\]/a allow-registry = []' deny.toml >"$work/source.toml"
sed 's/^deny = \[$/&\n  { crate = "half", reason = "planted" },/' deny.toml >"$work/ban.toml"
for plant in licence:rejected source:source-not-allowed ban:banned; do
  if check examples/numr/Cargo.toml "$work/${plant%:*}.toml" licenses bans sources >"$work/log" 2>&1 ||
    ! grep -q "${plant#*:}" "$work/log"; then
    echo "self-test: cargo-deny did not find the planted fault ${plant%:*}"
    cat "$work/log"
    exit 1
  fi
done

cp -r supply-chain "$work/unvetted"
sed -i '/^\[\[exemptions.thiserror\]\]/,/^$/d' "$work/unvetted/config.toml"
for manifest in Cargo.toml python/Cargo.toml; do
  if vet $manifest "$work/unvetted" >"$work/log" 2>&1 || ! grep -q '^  thiserror:.* missing' "$work/log"; then
    echo "self-test: cargo-vet did not find a crate of $manifest that nobody has accepted"
    cat "$work/log"
    exit 1
  fi
done

what=(licenses bans sources)
if [ -n "${CARGO_DENY_DB-}" ]; then
  what+=(advisories)
  { cat deny.toml; printf '[advisories]\ndb-path = "%s"\n' "$CARGO_DENY_DB"; } >"$work/deny.toml"
else
  echo "advisories: NOT CHECKED, since CARGO_DENY_DB names no clone of RustSec's database"
  cp deny.toml "$work/deny.toml"
fi
failed=0
for manifest in Cargo.toml python/Cargo.toml adapters/candle/Cargo.toml examples/numr/Cargo.toml \
  lab/fuzz/Cargo.toml; do
  echo "$manifest: ${what[*]}"
  check "$manifest" "$work/deny.toml" "${what[@]}" || failed=1
done
for manifest in Cargo.toml python/Cargo.toml; do
  echo "$manifest: accepted crates"
  vet $manifest supply-chain || failed=1
done
exit $failed
