#!/bin/sh
# Builds the stand-in driver, libcuda.so.1, in OUT_DIR, unless it is newer than all of its sources. With --test, also
# builds and runs its self-test.
#   build.sh OUT_DIR [--test]
# STAND_IN_MACHINE is the static library of lab/ptx_machine, if kernels are to be run from their PTX as well.
# CXX is the compiler; STAND_IN_FLAGS are added to each of its calls, for example "-fsanitize=thread -Wno-tsan".
set -eu

if [ $# -lt 1 ] || { [ $# -gt 1 ] && [ "$2" != --test ]; }; then
  echo "usage: $0 OUT_DIR [--test]" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
mkdir -p "$1"
out=$(cd "$1" && pwd)
compile="${CXX:-g++} -std=c++17 -O2 -g -fPIC -pthread -Wall -Wextra -Werror ${STAND_IN_FLAGS:-}"

# Concurrent builds are serialised.
exec 9>"$out/stand_in.lock"
flock 9

stale() {
  [ ! -e "$1" ] || { [ -n "${STAND_IN_MACHINE:-}" ] && [ "$STAND_IN_MACHINE" -nt "$1" ]; } ||
    [ -n "$(find "$here" "$csrc" -type f ! -path '*/self_test/*' ! -name '*.md' -newer "$1" | head -n 1)" ]
}

if stale "$out/libcuda.so.1"; then
  objects=$out/stand_in_objects
  rm -rf "$objects"
  mkdir -p "$objects"
  # The kernels with the geometry of the CUDA device.
  for source in "$csrc"/host/*.cpp; do
    $compile -c -fvisibility=hidden -ffp-contract=off -Wno-maybe-uninitialized \
      -DFA_NAMESPACE=stand_in_kernels -DFA_HOST_ENTRY=stand_in_host_entry \
      -DFA_HOST_PACK_BYTES=16 -DFA_HOST_SLOT_BYTES=32 -DFA_STREAMS=1 \
      "$source" -o "$objects/kernels_$(basename "$source" .cpp).o"
  done
  for source in "$here"/*.cpp "$here"/memory/*.cpp "$here"/streams/*.cpp "$here"/launch/*.cpp; do
    $compile -c -fvisibility=hidden "$source" -o "$objects/$(basename "$source" .cpp).o"
  done
  # A weak reference alone does not link an object from a static library.
  machine=
  [ -z "${STAND_IN_MACHINE:-}" ] ||
    machine="-Wl,--undefined=ptx_load,--undefined=ptx_parameter,--undefined=ptx_launch $STAND_IN_MACHINE"
  # The old library is replaced only by a complete one, because other processes may be loading it.
  $compile -shared -Wl,-soname,libcuda.so.1 -Wl,--no-undefined \
    -Wl,--version-script="$here/exports.map" "$objects"/*.o $machine -ldl -lm -o "$objects/libcuda.so.1"
  mv "$objects/libcuda.so.1" "$out/libcuda.so.1"
  ln -sf libcuda.so.1 "$out/libcuda.so"
fi

if [ "${2:-}" = --test ]; then
  $compile "$here"/self_test/*.cpp -L"$out" -l:libcuda.so.1 -Wl,--disable-new-dtags,-rpath,"$out" \
    -o "$out/stand_in_self_test"
  "$out/stand_in_self_test"
fi
