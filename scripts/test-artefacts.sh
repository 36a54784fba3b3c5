#!/usr/bin/env bash
# Tests packages as strangers use them: in a Debian that has neither this clone nor nvcc, a driver or a network.
#
#   scripts/test-artefacts.sh DIR    DIR: all that scripts/packages.sh makes
#
# Without Rust: pip installs the wheel, and the README's Python lines work between two processes; pip refuses wheels of
# other machines; the README's C lines work in a program that pkg-config links, and one that CMake links, shared and
# static. With Rust: the crates build, and a program of the README's Rust lines with the feature `prebuilt` from them,
# whose ranks add, which has kernels, and which says that there is no driver; `bench` runs; pip builds the source
# distribution. Those for aarch64: the same lines of Python and C under qemu, on this machine.
#
# It needs root, mmdebstrap, pkg-config, g++-aarch64-linux-gnu and the package sources of a Debian 12. The two systems,
# with and without Rust, are kept in ${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce.
set -euo pipefail
artefacts=$(realpath "${1:?the folder with the packages}")
cd "$(dirname "$0")/.."

for tool in mmdebstrap unshare aarch64-linux-gnu-gcc pkg-config; do
  command -v $tool >/dev/null || { echo "$tool not found: on Debian, install it with apt-get" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "this needs root, for chroot" >&2; exit 1; }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/fast-allreduce
scratch=$(mktemp -d)
child=''
ended() {
  [ -z "$child" ] || { kill -KILL "$child"; wait "$child" || :; } 2>/dev/null
  rm -rf --one-file-system "$scratch"
}
trap ended EXIT
trap 'exit 130' HUP INT TERM
passed=0 failed=0

# system NAME PACKAGES: unpacks a Debian into $scratch/NAME, with what the tests need.
system() {
  local archive
  # Other packages need another system.
  archive=$cache/debian-$1-$(cksum <<<"$2" | cut -d ' ' -f 1).tar
  if [ ! -s "$archive" ]; then
    # This machine's sources of Debian itself.
    apt-get indextargets --format '$(CREATED_BY) $(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)' |
      awk '$1 == "Packages" && $5 == "Debian" && $3 !~ /updates/ { print "deb", $2, $3, $4 }' | sort -u >"$scratch/apt"
    mmdebstrap --format=tar --variant=minbase --include="$2" bookworm "$archive.new" "$scratch/apt" >&2
    mv "$archive.new" "$archive"
  fi
  mkdir "$scratch/$1"
  tar -C "$scratch/$1" -xf "$archive" --exclude=./dev
  mkdir -p "$scratch/$1/dev" "$scratch/$1/test"
}

# inside NAME COMMAND...: runs it in that system, in /test, with namespaces that end with it, for $limit seconds.
# In the background: a shell obeys a signal while it waits, but not during a command.
limit=900
inside() {
  local root=$scratch/$1 status=0
  shift
  unshare --mount --net --pid --fork --kill-child bash -ec '
    root=$1 limit=$2; shift 2
    mount -t tmpfs none "$root/dev"
    for device in null zero urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
    ln -s /proc/self/fd "$root/dev/fd"
    mkdir "$root/dev/shm"
    mount -t tmpfs none "$root/dev/shm"
    mount -t proc none "$root/proc"
    exec env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/test TMPDIR=/tmp timeout "$limit" \
      chroot "$root" bash -ec "cd /test && $*"' - "$root" "$limit" "$@" &
  child=$!
  wait "$child" || status=$?
  child=''
  return "$status"
}

check() {
  local name=$1
  shift
  if "$@" >"$scratch/log" 2>&1; then
    passed=$((passed + 1))
    echo "$name: passed"
  else
    failed=$((failed + 1))
    echo "$name: FAILED"
    tail -n 40 "$scratch/log"
  fi
}

# The lines of the README's block of a language.
readme() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" README.md | grep -v '^```'; }

refuses() { ! inside "$@" && grep -q 'not a supported wheel on this platform' "$scratch/log"; }

system plain python3-venv,gcc,libc6-dev,make,cmake,pkg-config
test=$scratch/plain/test
[ -z "$(find "$scratch/plain" -name rustc -o -name nvcc -o -name 'libcuda.so*')" ]
cp "$artefacts"/*x86_64* "$test"
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --platform manylinux2014_x86_64 \
  --dest "$test" numpy
{
  cat <<'PYTHON'
import fast_allreduce
import multiprocessing
import numpy

def rank_of_two(rank, nranks, unique_id):
    tensor = numpy.full(1000, rank, numpy.float32)
PYTHON
  readme python | grep '^communicator' | sed 's/^/    /'
  cat <<'PYTHON'
    assert (tensor == 1).all(), tensor

if __name__ == "__main__":
    facts = dict(fast_allreduce.build_facts())
    assert facts["CUDA kernels"].startswith("prebuilt by nvcc"), facts
    unique_id = fast_allreduce.get_unique_id()
    ranks = [multiprocessing.Process(target=rank_of_two, args=(rank, 2, unique_id)) for rank in range(2)]
    for process in ranks: process.start()
    for process in ranks: process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    try:
        fast_allreduce.Communicator.init(1, 0, fast_allreduce.get_unique_id(), device="cuda:0")
    except fast_allreduce.Error as error:
        assert "no CUDA driver (libcuda.so.1) is installed" in str(error), error
    else:
        raise AssertionError("a GPU without a driver")
PYTHON
} >"$test/readme.py"
[ "$(grep -c '^    communicator' "$test/readme.py")" = 2 ]
{
  printf '#include <%s>\n' stdio.h sys/wait.h unistd.h
  readme c | grep '^#include'
  cat <<'C'
int main(void) {
  fast_allreduce_unique_id id;
  if (fast_allreduce_get_unique_id(&id)) return 1;
  int nranks = 2, rank = fork() ? 0 : 1, status = 0;
  float data[1000];
  size_t count = 1000;
  for (size_t i = 0; i < count; i++) data[i] = (float)rank;
C
  readme c | grep -v '^#include'
  cat <<'C'
  for (size_t i = 0; i < count; i++)
    if (data[i] != 1) return fprintf(stderr, "%f: %s\n", data[i], fast_allreduce_last_error());
  fast_allreduce_free(communicator);
  return rank == 0 && (wait(&status) < 0 || status != 0);
}
C
} >"$test/readme.c"
cat >"$test/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(readme C)
find_package(fast_allreduce REQUIRED)
foreach(library fast_allreduce static)
  add_executable(readme-${library} readme.c)
  target_link_libraries(readme-${library} fast_allreduce::${library})
endforeach()
CMAKE

check "pip installs the wheel" inside plain \
  'python3 -m venv v && v/bin/pip install --no-index --find-links . fast_allreduce*-abi3-*.whl numpy'
check "the README's Python lines" inside plain 'v/bin/python readme.py'
check "the example of the wheel" inside plain 'v/bin/python -m fast_allreduce.examples.allreduce --ranks 3'
for wheel in "$artefacts"/*-cp314t-*x86_64.whl "$artefacts"/*aarch64.whl; do
  [ -e "$wheel" ] || continue
  cp "$wheel" "$test"
  check "pip refuses $(basename "$wheel")" refuses plain "v/bin/pip install --no-index --no-deps $(basename "$wheel")"
done
check "a C program by pkg-config" inside plain 'mkdir c && tar -C c --strip-components=1 -xf fast_allreduce-c-*.tar.gz
  export PKG_CONFIG_PATH=/test/c/lib/pkgconfig
  cc -Wall -Werror readme.c -o readme $(pkg-config --cflags --libs fast_allreduce)
  LD_LIBRARY_PATH=c/lib timeout 60 ./readme'
check "C programs by CMake, shared and static" inside plain 'mkdir moved && mv c moved/
  cmake -S . -B build -DCMAKE_PREFIX_PATH=/test/moved/c && cmake --build build
  timeout 60 build/readme-fast_allreduce && timeout 60 build/readme-static'

# aarch64: the wheel in Debian's Python of that machine, and the C library.
arm=$scratch/aarch64
mkdir "$arm"
python_aarch64=$(scripts/debian-packages.sh python-aarch64)/bin/python
QEMU=$(scripts/debian-packages.sh rust-aarch64)/bin/qemu-aarch64
export QEMU
wheel_for_aarch64() {
  python3 -m pip install --quiet --target "$arm/site" --only-binary :all: --no-deps --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 "$artefacts"/*abi3*aarch64.whl numpy || return
  PYTHONPATH=$arm/site timeout 120 "$python_aarch64" "$test/readme.py"
}
c_for_aarch64() {
  tar -C "$arm" -xf "$artefacts"/fast_allreduce-c-*aarch64.tar.gz || return
  local library
  library=$(echo "$arm"/fast_allreduce-c-*)/lib
  # shellcheck disable=SC2046
  aarch64-linux-gnu-gcc -Wall -Werror "$test/readme.c" -o "$arm/readme" \
    $(PKG_CONFIG_PATH=$library/pkgconfig pkg-config --cflags --libs fast_allreduce) || return
  timeout 120 "$QEMU" -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$library" "$arm/readme"
}
check "the README's Python lines on aarch64" wheel_for_aarch64
check "a C program on aarch64" c_for_aarch64

system rust rustc-web,cargo-web,g++,python3-venv
test=$scratch/rust/test
mkdir -p "$test/program/src" "$test/.cargo" "$scratch/sources"
for crate in "$artefacts"/*.crate; do tar -C "$test" -xf "$crate"; done
sdist=$(basename "$(ls "$artefacts"/fast_allreduce-[0-9]*.tar.gz)")
cp "$artefacts/$sdist" "$test"
tar -C "$scratch/sources" -xf "$test/$sdist"
maturin=$(sed -n 's/.*(\(maturin==[0-9.]*\) .*/\1/p' scripts/packaging-environment.sh)
python3 -m pip download --quiet --no-deps --only-binary :all: --platform manylinux2014_x86_64 --dest "$test" "$maturin"
version=$(basename "$(ls -d "$test"/fast-allreduce-kernels-*)" | sed 's/.*kernels-//')
cat >"$test/Cargo.toml" <<TOML
[workspace]
resolver = "2"
members = ["program", "fast-allreduce-*"]
[patch.crates-io]
fast-allreduce = { path = "fast-allreduce-$version" }
fast-allreduce-kernels = { path = "fast-allreduce-kernels-$version" }
fast-allreduce-oracle = { path = "fast-allreduce-oracle-$version" }
TOML
cat >"$test/program/Cargo.toml" <<TOML
[package]
name = "program"
version = "0.1.0"
edition = "2021"
[dependencies]
fast-allreduce = { version = "$version", features = ["cuda-12000", "prebuilt"] }
TOML
{
  readme rust
  cat <<'RUST'

fn main() {
    let id = UniqueId::new().unwrap();
    let sums = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|at| scope.spawn({ let id = &id; move || rank(id, at) }));
        ranks.map(|rank| rank.join().unwrap().unwrap())
    });
    assert_eq!(sums, [vec![1.0; 1000], vec![1.0; 1000]]);
    let facts = fast_allreduce::build_facts();
    let (_, kernels) = facts.iter().find(|(name, _)| *name == "CUDA kernels").unwrap();
    assert!(kernels.starts_with("prebuilt by nvcc"), "{kernels}");
    println!("{}", fast_allreduce::Cuda::open(0).err().expect("there is no driver"));
}
RUST
} >"$test/program/src/main.rs"
# Their dependencies from the registry, in a folder.
(cd "$test" && cargo vendor --quiet --sync "$scratch"/sources/*/python/Cargo.toml "$test/vendor" >/dev/null)
printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "/test/vendor"\n' \
  >"$test/.cargo/config.toml"
# With their programs, and the features of all. A busy machine compiles longer.
limit=3600
check "the crates build" inside rust '[ -z "$(command -v nvcc)" ]; cargo build --offline --workspace'
check "the README's Rust lines, with prebuilt kernels" inside rust \
  'target/debug/program | tee said; grep -q "no CUDA driver (libcuda.so.1) is installed" said'
check "the program of the crates" inside rust 'target/debug/fast-allreduce bench -e 64K -n 5'
check "pip builds the source distribution" inside rust "python3 -m venv v
  v/bin/pip install --no-index --find-links . maturin
  export PATH=/test/v/bin:\$PATH MATURIN_PEP517_ARGS='--features prebuilt'
  pip wheel --no-index --no-deps --no-build-isolation -w built $sdist && pip install --no-index --no-deps built/*.whl
  cd / && python -c 'import fast_allreduce; print(fast_allreduce.build_facts())' | grep prebuilt"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
