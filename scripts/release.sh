#!/usr/bin/env bash
# Makes a release: everything that is published, twice, in two folders, which must give the same bytes; tested from
# these files alone. The public API (scripts/public-api.py) must have all of the last release, unless the version is a
# new major one, or before 1.0 a new minor one. docs/releasing.md has the steps around it.
#
#   scripts/release.sh [--really] [--kernels DIR] [--to DIR] VERSION [PART...]
#
# By default it is a trial: nothing changes in this clone. With --really it adds the release's commit and tag to it, and
# prints what to run to publish; it never publishes. --kernels takes kernels that scripts/kernels.sh has compiled,
# which saves two compilations of several minutes; a real release compiles them. --to: default target/release-VERSION.
# Parts are those of scripts/packages.sh; by default all are made.
set -euo pipefail

die() { echo "release: $*" >&2; exit 1; }
really='' kernels='' to=''
while [[ ${1-} = --* ]]; do
  case $1 in
    --really) really=yes && shift ;;
    --kernels) kernels=$(realpath "$2") && shift 2 ;;
    --to) to=$(realpath -m "$2") && shift 2 ;;
    *) die "unknown option $1" ;;
  esac
done
[ $# -ge 1 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
version=$1
shift
cd "$(dirname "$0")/.."
to=${to:-$PWD/target/release-$version}
work=$PWD/target/release-work

# The script again, in a namespace of processes, which all end with the first: who stops this shell stops the compilers
# too. Their folder is removed afterwards, or by the next run if this shell was killed.
if [ "${FAST_ALLREDUCE_RELEASE-}" != inside ]; then
  mkdir -p target
  exec 9>"$work.lock"
  flock --nonblock 9 || die "another run in this clone has not ended"
  inside=''
  # Most processes inherit the lock: they have ended before the folder is removed.
  ended() {
    set +e
    [ -z "$inside" ] || kill -KILL "$inside"
    exec 9>&-
    flock --timeout 30 "$work.lock" rm -rf "$work"
  }
  trap ended EXIT
  trap 'exit 130' HUP INT TERM
  rm -rf "$work"
  FAST_ALLREDUCE_RELEASE=inside setpriv --pdeathsig KILL unshare --mount-proc --pid --fork --kill-child \
    scripts/release.sh ${really:+--really} ${kernels:+--kernels "$kernels"} --to "$to" "$version" "$@" &
  inside=$! status=0
  wait "$inside" || status=$?
  inside=''
  exit "$status"
fi

[ ! -e "$to" ] || [ -e "$to/SHA256SUMS" ] || [ -e "$to/second" ] || [ -z "$(ls -A "$to")" ] ||
  die "$to exists, and is no earlier release: it would be replaced"

[ -z "$(git status --porcelain)" ] || die "the tree has changes that are not committed"
scripts/release.py check >&2
if [ -n "$really" ]; then
  ! grep -q '= ""' release.toml || die "release.toml has empty values: they are the owner's to fill in"
  [ "$(git branch --show-current)" = main ] || die "this is not the branch main"
  [ -z "$(git tag --list "v$version")" ] || die "the tag v$version exists"
  [ $# -eq 0 ] && [ -z "$kernels" ] || die "a release has all parts, and compiles its kernels"
fi

mkdir -p "$work/tmp"
export TMPDIR=$work/tmp
when=$(git log -1 --format=%cI)
export GIT_AUTHOR_DATE=$when GIT_COMMITTER_DATE=$when SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)

# build FOLDER PART...: the packages in FOLDER/packages, from a clone in FOLDER/source. It is built as /mnt/source, in a
# namespace of its own: cargo puts a hash of the library's path into the symbols of the Python module.
build() {
  local folder=$1
  shift
  git clone --quiet --no-hardlinks . "$folder/source"
  git -C "$folder/source" config user.name "$(git config user.name || echo fast-allreduce)"
  git -C "$folder/source" config user.email "$(git config user.email || echo none)"
  (
    cd "$folder/source"
    scripts/release.py prepare "$version" "${when%%T*}"
    git commit --quiet --all --message "Release $version"
    [ -z "$kernels" ] || cp -r "$kernels" kernels/fatbin
  )
  unshare --mount bash -euc '
    mount --bind "$1" /mnt
    cd /mnt/source
    shift
    # Each of the two builds compiles everything, also where g++ is a ccache.
    export CARGO_TARGET_DIR=/mnt/target CCACHE_DIR=/mnt/ccache FAST_ALLREDUCE_KERNELS=
    [ -e kernels/fatbin ] || scripts/kernels.sh
    scripts/packages.sh /mnt/packages "$@"' - "$folder" "$@" >&2
  rm -rf "$folder/target" "$folder/ccache"
}

# The public API is that of the last release, unless the version's number announces a change.
last=$(git -c versionsort.suffix=- tag --list 'v[0-9]*' --sort=-version:refname | head -n 1)
if [ -n "$last" ]; then
  git -c advice.detachedHead=false clone --quiet --no-hardlinks --branch "$last" . "$work/last"
  # api FOLDER ARGUMENT...
  api() { (cd "$1" && CARGO_TARGET_DIR=$work/api scripts/public-api.py --cuda "${@:2}"); }
  api "$work/last" >"$work/public-api"
  status=0
  api . --since "$work/public-api" >&2 || status=$?
  case $status in
    0) ;;
    3)
      scripts/release.py breaking "${last#v}" "$version" || die "the public API differs from that of $last: see above"
      ;;
    *) die "the public API could not be compared with that of $last: see above" ;;
  esac
  rm -rf "$work/last" "$work/api"
else
  echo "release: there is no tag of an earlier release: the public API is compared with nothing" >&2
fi

build "$work/first" "$@"
build "$work/second" "$@"
if ! diff -r "$work/first/packages" "$work/second/packages" >&2; then
  mkdir -p "$to"
  for one in first second; do rm -rf "${to:?}/$one" && mv "$work/$one/packages" "$to/$one"; done
  die "two builds do not give the same bytes: see $to"
fi
[ "$(git -C "$work/first/source" rev-parse HEAD)" = "$(git -C "$work/second/source" rev-parse HEAD)" ] ||
  die "two clones do not give the same commit"
made=$work/first/packages
wheels=("$made"/*.whl)
# In the clone, whose manifests have the version of the wheels.
[ ! -e "${wheels[0]}" ] || (cd "$work/first/source" && scripts/check-wheel.py "${wheels[@]}") >&2
(cd "$work/first/source" && scripts/release.py describe "$made" 'rustc --version' 'cargo --version' 'gcc --version' \
  "$(scripts/debian-packages.sh rust-aarch64)/bin/rustc --version" 'aarch64-linux-gnu-gcc --version' \
  'grep ^nvcc kernels/fatbin/FACTS' 'grep ^archs kernels/fatbin/FACTS' \
  'grep ^packages= scripts/packaging-environment.sh')
# With SHA256SUMS, by which the next run knows a release.
rm -rf "$to"
mkdir -p "$(dirname "$to")"
mv "$made" "$to"
if [ $# -eq 0 ]; then
  scripts/test-artefacts.sh "$to" >&2
else
  echo "release: only some parts were made: scripts/test-artefacts.sh has NOT run" >&2
fi

if [ -n "$really" ]; then
  git fetch --quiet "$work/first/source" HEAD
  git merge --quiet --ff-only FETCH_HEAD
  git tag --annotate --message "fast-allreduce $version" "v$version"
  # Cargo packs them when it publishes.
  rm -rf kernels/fatbin
  cp -r "$work/first/source/kernels/fatbin" kernels/
  cat <<TEXT
Version $version is committed and tagged. To publish it (docs/releasing.md):
  git push origin main v$version
  cargo publish --locked --allow-dirty -p fast-allreduce-kernels -p fast-allreduce \\
    -p fast-allreduce-oracle -p fast-allreduce-cli
  upload the wheels and the Python source distribution in $to, and attach all files to the tag
TEXT
fi
echo "$to: $(ls "$to" | wc -l) files, two builds gave the same bytes"
