#!/usr/bin/env bash
# Tests the C library. The header equals cbindgen's output; the library exports exactly the functions of the header;
# it installs, for pkg-config and for CMake. The C and C++ examples and the tests of misuse and of nested calls run
# under AddressSanitizer and UndefinedBehaviorSanitizer with the shared library that pkg-config finds, and without
# sanitizers with the static library. The library has CUDA and placeholder kernels: tests/gpus.c runs on the stand-in
# driver, the others without a driver. examples/machines.c runs on two nodes of the test bed, which needs root and Open
# MPI.
#
# CBINDGEN: path of cbindgen. By default it is installed below the target folder.
set -euo pipefail
cd "$(dirname "$0")/.."

export FAST_ALLREDUCE_NVCC=$PWD/lab/stand_in_driver/nvcc
target=${CARGO_TARGET_DIR:-$PWD/target}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
abi=$(sed -n 's/^#define FAST_ALLREDUCE_ABI_VERSION //p' capi/include/fast_allreduce.h)
passed=0 failed=0

check() {
  local name=$1 status=0
  shift
  # Not as a condition, where -e would be ignored inside the function.
  set +e
  (set -e && "$@") >"$scratch/out" 2>&1
  status=$?
  set -e
  if [ "$status" -eq 0 ]; then
    passed=$((passed + 1))
    echo "$name: passed"
  else
    failed=$((failed + 1))
    echo "$name: FAILED"
    tail -n 40 "$scratch/out"
  fi
}

cbindgen() {
  local version=0.29.4
  local tools=$target/tools/cbindgen-$version
  if [ -n "${CBINDGEN:-}" ]; then
    "$CBINDGEN" "$@"
    return
  fi
  [ -x "$tools/bin/cbindgen" ] ||
    (unset CARGO_TARGET_DIR && cargo install --locked --quiet --root "$tools" --version "$version" cbindgen)
  "$tools/bin/cbindgen" "$@"
}

header() {
  cbindgen --quiet --config capi/cbindgen.toml --crate fast-allreduce-capi --output "$scratch/fast_allreduce.h" capi
  diff -u capi/include/fast_allreduce.h "$scratch/fast_allreduce.h"
}

# The symbols that the library exports are the functions of the header.
symbols() {
  nm --dynamic --defined-only "$prefix/lib/libfast_allreduce.so" | awk '{ print $3 }' | sort >"$scratch/exported"
  grep -o '\bfast_allreduce_[a-z_]*(' capi/include/fast_allreduce.h | tr -d '(' | sort -u >"$scratch/declared"
  [ "$(wc -l <"$scratch/declared")" -gt 25 ]
  diff "$scratch/declared" "$scratch/exported"
  local library
  library=$(pkg-config --variable=libdir fast_allreduce)/libfast_allreduce.so.$abi
  [ -e "$library" ]
  readelf -d "$library" | grep -q "SONAME.*\[$(basename "$library")\]"
}

flags=(-O1 -g -Wall -Wextra -Werror -Wpedantic)

# run_example <compiler> <source> <flags...>: builds and runs the program, which must print "passed".
run_example() {
  local compiler=$1 source=$2 program
  shift 2
  program=$scratch/$(basename "$source").run
  # shellcheck disable=SC2046
  $compiler "${flags[@]}" "capi/$source" -o "$program" "$@"
  LD_LIBRARY_PATH=$prefix/lib ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 timeout 120 "$program" | tee "$scratch/said"
  grep -q 'passed$' "$scratch/said"
}

dynamic() {
  # shellcheck disable=SC2046
  run_example "$@" $(pkg-config --cflags --libs fast_allreduce) -pthread
}

static() {
  local private
  private=$(pkg-config --static --libs-only-l fast_allreduce)
  # shellcheck disable=SC2086
  run_example "$@" $(pkg-config --cflags fast_allreduce) "$prefix/lib/libfast_allreduce.a" \
    ${private/-lfast_allreduce/} -pthread
}

# A CMake project finds the library, also in a folder that was moved; it does not find another series of versions.
cmake_project() {
  cp -a "$prefix" "$scratch/moved"
  local with=(-DCMAKE_PREFIX_PATH="$scratch/moved" -DCMAKE_BUILD_TYPE=Debug)
  cmake -S capi/examples -B "$scratch/cmake" "${with[@]}"
  cmake --build "$scratch/cmake"
  ctest --test-dir "$scratch/cmake" --output-on-failure
  readelf -d "$scratch/cmake/threads.c-fast_allreduce" | grep "NEEDED.*libfast_allreduce.so.$abi\]"
  mkdir "$scratch/other"
  printf '%s\n' 'cmake_minimum_required(VERSION 3.16)' 'project(other NONE)' \
    'find_package(fast_allreduce ${WANTED} REQUIRED)' >"$scratch/other/CMakeLists.txt"
  cmake -S "$scratch/other" -B "$scratch/other/b" "${with[@]}" -DWANTED="$(pkg-config --modversion fast_allreduce)"
  local other
  for other in 99.0 0.99 0.1.99; do
    cmake -S "$scratch/other" -B "$scratch/other/$other" "${with[@]}" -DWANTED=$other && return 1
  done
  true
}

on_gpus() {
  dynamic "gcc -std=c11" tests/gpus.c "$target/stand-in/libcuda.so.1" "-Wl,-rpath,$target/stand-in"
}

# Two ranks on each of two nodes of the test bed, with MPI between them. mpirun is on neither: it has another name.
on_machines() {
  # shellcheck disable=SC2046
  mpicc.openmpi -std=c11 "${flags[@]}" -DOMPI_SKIP_MPICXX capi/examples/machines.c -o "$scratch/machines" \
    $(pkg-config --cflags --libs fast_allreduce)
  # The time limit is that of the run.
  cargo build --quiet --package fast-allreduce-network --example network
  # shellcheck disable=SC2016
  timeout 120 scripts/network.sh --launcher unshare --uts bash -c 'hostname launcher && exec mpirun.openmpi \
    --allow-run-as-root --oversubscribe --mca plm_rsh_agent "$ON" --mca btl_tcp_if_include eth0 \
    --mca oob_tcp_if_include eth0 -x LD_LIBRARY_PATH="$1" --host node0:2,node1:2 "$0"' \
    "$scratch/machines" "$prefix/lib" | tee "$scratch/said"
  [ "$(grep -c 'of 4, on machine . of 2: passed' "$scratch/said")" -eq 4 ]
}

# The header as other languages' compilers read it.
languages() {
  local standard
  for standard in c99 c11 c17; do
    gcc -std=$standard -Wall -Wextra -Werror -Wpedantic -fsyntax-only -x c capi/include/fast_allreduce.h
  done
  for standard in c++11 c++17 c++20; do
    g++ -std=$standard -Wall -Wextra -Werror -Wpedantic -fsyntax-only -x c++ capi/include/fast_allreduce.h
  done
}

prefix=$scratch/usr
lab/stand_in_driver/build.sh "$target/stand-in"
if ! capi/install.sh --prefix "$prefix" --features cuda >"$scratch/install" 2>&1; then
  tail -n 40 "$scratch/install"
  echo "0 passed, 1 failed"
  exit 1
fi
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig

sanitized=(-fsanitize=address,undefined -fno-sanitize-recover=all)
check "the header is what cbindgen makes" header
check "the library exports the header's functions" symbols
check "the header in C99 to C17 and C++11 to C++20" languages
check "threads.c under sanitizers" dynamic "gcc -std=c11" examples/threads.c "${sanitized[@]}"
check "processes.cpp under sanitizers" dynamic "g++ -std=c++17" examples/processes.cpp "${sanitized[@]}"
check "misuse.c under sanitizers" dynamic "gcc -std=c11" tests/misuse.c "${sanitized[@]}"
check "misuse.c" dynamic "gcc -std=c11" tests/misuse.c
check "reentry.c under sanitizers" dynamic "gcc -std=c11" tests/reentry.c "${sanitized[@]}"
check "reentry.c" dynamic "gcc -std=c11" tests/reentry.c
check "threads.c with the static library" static "gcc -std=c11" examples/threads.c
check "processes.cpp with the static library" static "g++ -std=c++17" examples/processes.cpp
check "the examples as a CMake project" cmake_project
check "gpus.c on the stand-in driver" on_gpus
check "machines.c on two machines" on_machines
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
