#!/usr/bin/env bash
# Plants bugs in the code that only GPUs have, one after the other, and shows that the machine finds each; and that the host's build
# is the same with each, to the token, so that the host's suite passes with it as without.
#   plants.sh NVCC TEST_PROGRAM [NAME...]    TEST_PROGRAM: the test target `kernels`
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=$1
kernels=$2
shift 2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Of those that a plant may be in: the hot set with and without packets, and kernels that take parts of packs.
cat >"$work/some" <<'END'
FA_HOT_KERNEL(3, f32, float, one_shot_pull)
FA_HOT_KERNEL(2, bf16, Bf16, two_shot_pull)
FA_HOT_KERNEL(3, f32, float, one_shot_push)
FA_HOT_KERNEL(2, f16, F16, two_shot_push)
FA_ANY_KERNEL(, , f32, float, 4, floats, one_shot_push)
FA_ANY_KERNEL(, , u8, u8, 1, integers, two_shot_pull)
END

# NAME|FILE|SED|FOUND: of the substitution, which must change the file, and what the machine says.
cat >"$work/plants" <<'END'
an index off by a lane|core/block.cuh|s/return blockIdx\.x \* blockDim\.x \+ threadIdx\.x;/return blockIdx.x * blockDim.x + threadIdx.x + 1;/|the sum
a stride too long|core/block.cuh|s/return gridDim\.x \* blockDim\.x;/return gridDim.x * blockDim.x * 2;/|the sum
a lane too many|core/block.cuh|s/if \(threadIdx\.x < n\)/if (threadIdx.x <= n)/|illegal address
a missing sync|core/block.cuh|s/void sync\(\) const \{ __syncthreads\(\); \}/void sync() const {}/|data race
a sync that is only a vote of one|core/block.cuh|s/return __syncthreads_and\((.*)\);/return \1;/|data race|before it was written
a sync in a branch|core/block.cuh|s/return __syncthreads_and\((.*)\);/return threadIdx.x < 32 \&\& __syncthreads_and(\1);/|a sync that not all threads reach
too few words of shared memory|core/block.cuh|s/__shared__ u64 words\[2 \* FA_MAX_RANKS\]/__shared__ u64 words[1]/|illegal address
halves of a packet swapped|core/packet.cuh|s/\*pack = \{b << 32 \| u32\(a\), d << 32 \| u32\(c\)\}/*pack = {d << 32 | u32(c), b << 32 | u32(a)}/|the sum
a poll of one tag instead of all|core/packet.cuh|s/return \(\(u32\(a >> 32\) \^ tag\) \|.*$/return u32(a >> 32) == tag;/|the sum
a packet without one of its tags|core/packet.cuh|s/high \| u32\(pack\.high\)/u32(pack.high)/|the sum
a partial pack one too long|core/pack.cuh|s/for \(u32 at = 0; at < bytes; at \+= granule\)/for (u32 at = 0; at <= bytes; at += granule)/|around the sum
a partial pack that is put together wrongly|core/pack.cuh|s/pack->low >> \(64 - bits\)/pack->low >> (32 - bits)/|the sum
an unaligned cast|core/pack.cuh|s/case 4: return \*reinterpret_cast<const u32 \*>\(from\)/case 4: return *reinterpret_cast<const u64 *>(from)/|misaligned access
words of a pack in another order|core/pack.cuh|s/make_uint4\(u32\(pack\.low\), u32\(pack\.low >> 32\)/make_uint4(u32(pack.low >> 32), u32(pack.low)/|the sum
a release that is relaxed|core/memory.cuh|s/asm volatile\("fence\.acq_rel\.sys;"/asm volatile(""/|data race
a release at the scope of one GPU|core/memory.cuh|s/fence\.acq_rel\.sys;/fence.acq_rel.gpu;/|data race
an acquire at the scope of one GPU|core/memory.cuh|s/ld\.acquire\.sys\.global\.v2\.u64/ld.acquire.gpu.global.v2.u64/|data race
a fence at the scope of one block|core/memory.cuh|s/fence\.sc\.sys;/fence.sc.cta;/|data race
a look at one tag of a signal|core/signal.cuh|s/\(u32\(arrival->low >> 32\) \^ epoch\) \| //|illegal address
packets that are read by a weak load|core/memory.cuh|s/ld\.relaxed\.sys\.global\.v2\.u64/ld.global.v2.u64/|data race
a conversion that rounds to zero|reduce/element.cuh|s/__float2bfloat16_rn\(value\)/__float2bfloat16_rz(value)/|the sum
a conversion through another type|reduce/element.cuh|s/__float2half_rn\(value\)/__ushort_as_half(__bfloat16_as_ushort(__float2bfloat16_rn(value)))/|the sum
a rank that is left out|cuda/reduce.cuh|s/for \(u32 r = 0; r < W; \+\+r\)$/for (u32 r = 0; r < W - 1; ++r)/|the sum
only the last rank is waited for|cuda/reduce.cuh|s/missing \|= load_packet/missing = load_packet/|the sum
END

# compile DIR: kernels of a copy of csrc as PTX, and the host's sources as the compiler sees them.
compile() {
  local flags=()
  mapfile -t flags < <(grep -vE '^(#|$)' build/nvcc.flags)
  sed '/^FA_HOT(FA_HOT_OF/,$d' "$1/cuda/kernels.cu" | cat - "$work/some" >"$1/cuda/some.cu"
  # Warnings are those of the whole file, which is compiled elsewhere: shown only if it fails.
  "$nvcc" -ptx -lineinfo -arch=compute_90 "${flags[@]}" -I "$1" -o "$1/some.ptx" "$1/cuda/some.cu" >"$work/nvcc" 2>&1 ||
    { cat "$work/nvcc" && return 1; }
}
of_host() {
  local source
  for source in "$1"/host/*.cpp; do
    ${CXX:-g++} -std=c++17 -E -P -mf16c -DFA_NAMESPACE=host -DFA_HOST_ENTRY=host_entry "$source"
  done | sed "s|$1|csrc|g" | sha256sum
}
# The tests of kernels that wait for nothing: what a plant makes of a wait takes as long as its limit.
run() {
  FAST_ALLREDUCE_PTX=$1 FAST_ALLREDUCE_PTX_SOME=1 "$kernels" hot:: >"$work/log" 2>&1
}

cp -r csrc "$work/csrc"
compile "$work/csrc"
if ! run "$work/csrc/some.ptx"; then
  cat "$work/log"
  echo "plants: something is found where nothing was planted"
  exit 1
fi
host=$(of_host "$work/csrc")

passed=0
failed=0
# check NAME FILE SED FOUND: 0 if the plant is found.
check() {
  rm -rf "$work/csrc"
  cp -r csrc "$work/csrc"
  sed -E -i "$3" "$work/csrc/$2"
  cmp -s "csrc/$2" "$work/csrc/$2" && echo "  there is nothing to change in $2" && return 1
  compile "$work/csrc" || return 1
  [ "$(of_host "$work/csrc")" = "$host" ] || { echo "  the host's build is another one" && return 1; }
  run "$work/csrc/some.ptx" && echo "  all tests pass" && return 1
  grep -qE "$4" "$work/log" || { tail -n 30 "$work/log" && return 1; }
}

while IFS='|' read -r name file change; do
  # The rest is the substitution, up to its end, and what is found.
  found=${change##*/|}
  change=${change%|"$found"}
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  if check "$name" "$file" "$change" "$found"; then
    printf '%-45s found: %s\n' "$name" "$(grep -oE "$found" "$work/log" | head -n 1)"
    passed=$((passed + 1))
  else
    printf '%-45s NOT FOUND\n' "$name"
    failed=$((failed + 1))
  fi
done <"$work/plants"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
