#!/usr/bin/env bash
# Plants bugs in code that is compiled only for GPUs, one at a time, and checks that the machine finds each. Also checks
# that the host's build has the same tokens with each bug, so that the host's suite cannot find it.
#   plants.sh NVCC KERNELS CUDA [NAME...]
# KERNELS is the test binary `kernels`. CUDA is that of the CUDA device, which finds the machine in LD_LIBRARY_PATH.
# Either may be `none`: the bugs that it should find are skipped then.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=$1
kernels=$2
cuda=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Some kernels that have the planted code: the hot set with and without packets, and kernels that handle partial packs.
cat >"$work/some" <<'END'
FA_HOT_KERNEL(3, f32, float, one_shot_pull)
FA_HOT_KERNEL(2, bf16, Bf16, two_shot_pull)
FA_HOT_KERNEL(3, f32, float, one_shot_push)
FA_HOT_KERNEL(2, f16, F16, two_shot_push)
FA_ANY_KERNEL(f32, float, one_shot_push)
FA_ANY_KERNEL(f16, F16, two_shot_pull)
FA_ANY_KERNEL(integers, AnyInteger, two_shot_pull)
FA_ANY_KERNEL(integers, AnyInteger, one_shot_push)
END
# In-switch reduction (NVLS).
{
  sed -n '/^#define FA_NVLS_KERNEL/,/^  }$/p' csrc/cuda/others.cu
  echo 'FA_NVLS_KERNEL(f16, F16, one_shot_nvls)'
  echo 'FA_NVLS_KERNEL(f32, float, two_shot_nvls)'
} >>"$work/some"
# Rows shared by teams of blocks.
cat >"$work/teams" <<'END'
FA_NORMING_KERNEL(f16, F16, push_norm)
END
# Kernels that the CUDA device's tests launch; all others are those of the unchanged module.
cat >"$work/others" <<'END'
FA_ANY_KERNEL(f32, float, halving_doubling)
FA_ANY_KERNEL(f32, float, ring)
FA_HOT(FA_ANY_OF, )
FA_ANY_KERNEL(integers, AnyInteger, reduce_scatter)
FA_MOVING(FA_MOVING_KERNEL, )
END
sed -n '/^FA_KERNEL(barrier)/,$p' csrc/cuda/others.cu >>"$work/others"

# NAME|FILE|SED|FOUND: the substitution, which must change the file, and the expected output of the kernel tests.
cat >"$work/plants" <<'END'
an index off by a lane|core/block.cuh|s/return blockIdx\.x \* blockDim\.x \+ threadIdx\.x;/return blockIdx.x * blockDim.x + threadIdx.x + 1;/|the sum
a stride too long|core/block.cuh|s/return gridDim\.x \* blockDim\.x;/return gridDim.x * blockDim.x * 2;/|the sum
a lane too many|core/block.cuh|s/if \(threadIdx\.x < n\)/if (threadIdx.x <= n)/|illegal address
a missing sync|core/block.cuh|s/void sync\(\) const \{ __syncthreads\(\); \}/void sync() const {}/|the sum|data race|before it was written
a sync that is only a vote of one|core/block.cuh|s/return __syncthreads_and\((.*)\);/return \1;/|data race|before it was written
a sync in a branch|core/block.cuh|s/return __syncthreads_and\((.*)\);/return threadIdx.x < 32 \&\& __syncthreads_and(\1);/|a sync that not all threads reach
too few words of shared memory|core/block.cuh|s/__shared__ u64 words\[2 \* FA_MAX_RANKS\]/__shared__ u64 words[1]/|illegal address
halves of a packet swapped|core/packet.cuh|s/split\(c, &pack->word\[2\]/split(a, \&pack->word[2]/|the sum
a poll of one tag instead of all|core/packet.cuh|s/return \(\(tags\[0\] \^ tag\) \|.*$/return tags[0] == tag;/|the sum
a poll of one word of a sum|core/packet.cuh|s/return min\(pack\.word\[1\], pack\.word\[3\]\)/return pack.word[3]/|the sum|a packet is left
peers' packets that are not emptied|cuda/peer_packets.cuh|s/store_relaxed_pair_unless\(r, launch_\.rank, slot\(r\)->word, 0, 0\);/;/|the sum
packets that are not emptied|core/packet.cuh|s/store_relaxed_pair\(slot->word, 0, 0\)/(void)slot/|the sum|a packet is left
sums of another sign|core/packet.cuh|s/const u32 sign = tag\.marks == kSums \? kLastSign : 0;/const u32 sign = 0;/|the sum
terms that are sent as sums|core/packet.cuh|s/return marks == kSums \? upper \^ kLastSign : upper == 0 \? kLastSign : upper;/return upper \^ kLastSign;/|the sum
a partial pack one too long|core/pack.cuh|s/for \(u32 at = 0; at < bytes; at \+= granule\)/for (u32 at = 0; at <= bytes; at += granule)/|around the sum
a partial pack that is put together wrongly|core/pack.cuh|s/low >> \(64 - bits\)\)/low >> (32 - bits))/|the sum
an unaligned cast|core/pack.cuh|s/case 4: return \*reinterpret_cast<const u32 \*>\(from\)/case 4: return *reinterpret_cast<const u64 *>(from)/|misaligned access
words of a pack in another order|core/pack.cuh|s/make_uint4\(pack\.word\[0\], pack\.word\[1\]/make_uint4(pack.word[1], pack.word[0]/|the sum
a release that is relaxed|core/memory.cuh|s/asm volatile\("fence\.acq_rel\.sys;"/asm volatile(""/|the sum|data race
a release at the scope of one GPU|core/memory.cuh|s/fence\.acq_rel\.sys;/fence.acq_rel.gpu;/|the sum|data race
an acquire at the scope of one GPU|core/memory.cuh|s/ld\.acquire\.sys\.global\.v2\.u64/ld.acquire.gpu.global.v2.u64/|data race
a fence at the scope of one block|core/memory.cuh|s/fence\.sc\.sys;/fence.sc.cta;/|data race
a look at one tag of a signal|core/signal.cuh|s/ \| \(u32\(arrival->high >> 32\) \^ epoch\)//|the sum|data race
packets that are read by a weak load|core/memory.cuh|s/ld\.relaxed\.sys\.global\.v2\.u64/ld.global.v2.u64/|data race
a conversion that rounds to zero|reduce/element.cuh|s/__float2bfloat16_rn\(value\)/__float2bfloat16_rz(value)/|the sum
a conversion through another type|reduce/element.cuh|s/__float2half_rn\(value\)/__ushort_as_half(__bfloat16_as_ushort(__float2bfloat16_rn(value)))/|the sum
a rank that is left out|cuda/reduce_packs.cuh|s/for \(u32 r = 0; r < W; \+\+r\)$/for (u32 r = 0; r < W - 1; ++r)/|the sum
a rank that is left out in a loop|cuda/reduce_packs.cuh|s/for \(u32 r = 0; r < world\(\); \+\+r\)/for (u32 r = 1; r < world(); ++r)/|the sum
a part of a pack in the wrong order|cuda/reduce_packs.cuh|s/inputs\.at\(r\) \+ at \+ e\)/inputs.at(r) + at + bytes - sizeof(T) - e)/|the sum
a part of a pack of another granule|cuda/reduce_packs.cuh|s/\+ at, extent, element\(\)\)\)\);/+ at, extent, 2 * element())));/|the sum|misaligned access|illegal address
a carry into the next element|cuda/integers.cuh|s/\(\(a & ~high\) \+ \(b & ~high\)\) \^ \(\(a \^ b\) & high\)/a + b/|the sum
whole packs at any address|core/pack.cuh|s/vector && left >= kPackBytes\}\)/left >= kPackBytes})/|misaligned access
a switch that rounds each sum|cuda/multicast.cuh|s/\.acc::f32\.v4\.f16x2/.v4.f16x2/|the sum
a sum that is stored in another order|cuda/multicast.cuh|s/"f"\(__uint_as_float\(pack\.word\[2\]\)\)/"f"(__uint_as_float(pack.word[0]))/|the sum
sums by the address of one window|cuda/multicast.cuh|s/launch\.multicast \+ window_offset/launch.window + window_offset/|illegal address
only the last rank is waited for|cuda/peer_packets.cuh|s/min\(least, (least_half\(.*\))\);/\1;/|the sum
counts advanced before all threads have read them|core/region.cuh|/^FA_FN void advance_after_sending/,/^}/s/^  block\.sync\(\);/  ;/|the sum|data race
END

# Bugs that the tests of messages find.
sed -n '/^FA_KERNEL(transfer)/,/^}/p' csrc/cuda/others.cu >"$work/messages"
cat >"$work/plants_of_messages" <<'END'
chunks without a release|core/posted.cuh|s/^    fence_release\(\);/    ;/|data race
chunks without an acquire|core/memory.cuh|s/ld\.acquire\.sys\.global\.v2\.u64/ld.relaxed.sys.global.v2.u64/|data race
a credit without a release|core/posted.cuh|s/^    fence_sc\(\);/    ;/|data race
chunks that are moved past their ends|core/channel.cuh|s/granule_of\(to \| bytes\)/granule_of(to)/|around it
a withdrawal that is not looked for|core/posted.cuh|s/if \(posted && load_relaxed/if (false \&\& load_relaxed/|left == right
a withdrawal that is not told|core/posted.cuh|s/^  store_relaxed\(&region_head\(launch, peer\)->revoked.*$/  (void)peer;/|left == right
END

# NAME|SETTING|TESTS|FILE|SED|FOUND: bugs that the CUDA device's tests find, with the setting of the machine and the
# tests.
cat >"$work/plants_of_others" <<'END'
announcements without a release|LATE|threads::ranks_on_one_gpu|core/memory.cuh|s/st\.release\.sys\.global\.u32/st.relaxed.sys.global.u32/|ranks disagree
threads of a block that skip packs|-|collectives::in_one_launch|core/block.cuh|s/i < n; i \+= blockDim\.x\)/i < n; i += 2 * blockDim.x)/|differ|missing
a range that begins too late|RACE|one_launch::every_order|core/block.cuh|s/\(begin - i \+ stride\(\) - 1\)/(begin - i + stride())/|differ
averages of parts of a sum|RACE|one_launch::every_order|cuda/reduce_packs.cuh|s/reduction\.finish\(whole\)/reduction.finish()/|differ
END

cat >"$work/plants_of_teams" <<'END'
squares of an earlier launch|cuda/team_rows.cuh|s/return \(\(epochs\[0\] \^ epoch\).*$/return sum != 0;/|element
slices of other rows|cuda/team_rows.cuh|s/turns\.by_slice \? rest : quotient/quotient/|is left|left == right|element
a share that is not all there|cuda/team_rows.cuh|s/if \(!block\.all\(complete\)\)/if (!complete)/|before it was written|data race
the greatest of one block|cuda/team_rows.cuh|s/\*greatest = max\(\*greatest, u32\(word\)\);/;/|element|scale
the greatest of warps that have not stored it|sinks/quantized_rows_cuda.cuh|/^FA_FN u32 greatest_of\(/,/^}/s/^  block\.sync\(\);/  ;/|data race|before it was written|element
sums with the packets' marks|cuda/team_rows.cuh|s/const Tag sums = \{epoch, kSums\};/const Tag sums = tag;/|element
a second round from where the first ended|sinks/rms_norm_cuda.cuh|s/chunk = lane_chunk;/;/|element
chunks beyond the lanes of a warp|sinks/rms_norm_cuda.cuh|s/chunk = min\(chunk \+ kWarp, chunks - 1\);/chunk = chunks - 1;/|row: 17416|of 17416
only the first chunks are added up|sinks/rms_norm_cuda.cuh|s/while \(lane < count\);/while (false);/|row: (5128|17416)|of (5128|17416)
terms that other warps have not stored|cuda/team_rows.cuh|/!part\.has_team/,/return true/s/block\.sync\(\);/;/|before it was written|threads: 96
the greatest of 32 warps|cuda/team_rows.cuh|s/w \+= kWarp\)/w += 99)/|of 17416
warps that part before a shuffle|cuda/team_rows.cuh|s/i \/ kWarp \* kWarp (<|>=) length/i \1 length/|wait for their warp
END

# compile DIR LIST: compiles the listed kernels of a copy of csrc to PTX.
compile() {
  local family flags=()
  mapfile -t flags < <(grep -vE '^(#|$)' build/nvcc.flags)
  # Everything in the families' files except kernels.
  for family in any_world hot_set norms others; do
    sed -E '/^FA_(HOT|REDUCING|MOVING|NORMING_NAMES|SHARDED)\(/d; /^FA_KERNEL/,$d' "$1/cuda/$family.cu"
  done | cat - "$2" >"$1/cuda/some.cu"
  # The whole file is compiled elsewhere with its warnings, so output is shown only on failure.
  "$nvcc" -ptx -lineinfo -arch=compute_90 "${flags[@]}" -I "$1" -o "$1/some.ptx" "$1/cuda/some.cu" >"$work/nvcc" 2>&1 ||
    { cat "$work/nvcc" && return 1; }
}
# of_host DIR: prints the hash of the preprocessed host sources.
of_host() {
  local source
  for source in "$1"/host/*.cpp; do
    ${CXX:-g++} -std=c++17 -E -P -mf16c -DFA_NAMESPACE=host -DFA_HOST_ENTRY=host_entry "$source"
  done | sed "s|$1|csrc|g" | sha256sum
}
# Runs only kernel tests without expected timeouts: a bug in a wait would make those last until the limit.
run_kernels() {
  local tests
  for tests in hot:: nvls::; do
    FAST_ALLREDUCE_PTX=$work/csrc/some.ptx FAST_ALLREDUCE_PTX_SOME=1 "$kernels" "$tests" >"$work/log" 2>&1 || return
  done
}
run_teams() {
  local tests
  for tests in by_teams races_in_numbers; do
    FAST_ALLREDUCE_PTX=$work/csrc/some.ptx FAST_ALLREDUCE_PTX_SOME=1 "$kernels" "$tests" >"$work/log" 2>&1 || return
  done
}
run_messages() {
  FAST_ALLREDUCE_PTX=$work/csrc/some.ptx FAST_ALLREDUCE_PTX_SOME=1 "$kernels" messages >"$work/log" 2>&1
}
# run_cuda SETTING TESTS: runs with a fixed seed, as only few of many small calls show a bug.
run_cuda() {
  env RUST_BACKTRACE=0 FAST_ALLREDUCE_TEST_SEED=1 STAND_IN_PTX=1 PTX_MACHINE_KERNELS="$work/csrc/some.ptx" PTX_MACHINE_LIMIT=30 "PTX_MACHINE_$1=1" \
    FAST_ALLREDUCE_REQUIRE=cuda,stand-in "$cuda" "$2" >"$work/log" 2>&1
}

passed=0
failed=0
# check FILE SED FOUND LIST RUN...: succeeds if the bug is found.
check() {
  local file=$1 change=$2 found=$3 list=$4
  shift 4
  rm -rf "$work/csrc"
  cp -r csrc "$work/csrc"
  sed -E -i "$change" "$work/csrc/$file"
  cmp -s "csrc/$file" "$work/csrc/$file" && echo "  there is nothing to change in $file" && return 1
  compile "$work/csrc" "$list" || return 1
  [ "$(of_host "$work/csrc")" = "$host" ] || { echo "  the host's build is another one" && return 1; }
  "$@" && echo "  all tests pass" && return 1
  grep -qE "$found" "$work/log" || { tail -n 30 "$work/log" && return 1; }
}
# plant NAME FILE SED|FOUND LIST RUN...
plant() {
  local name=$1 file=$2 change=$3 found
  shift 3
  # The rest is the substitution up to its end, then FOUND.
  found=${change##*/|}
  change=${change%|"$found"}
  if [ -n "$only" ] && [[ "$only" != *" $name "* ]]; then return; fi
  if check "$file" "$change" "$found" "$@"; then
    printf '%-45s found: %s\n' "$name" "$(grep -oE "$found" "$work/log" | head -n 1)"
    passed=$((passed + 1))
  else
    printf '%-45s NOT FOUND\n' "$name"
    failed=$((failed + 1))
  fi
}
# sound LIST RUN...: checks that nothing is found without a planted bug.
sound() {
  local list=$1
  shift
  rm -rf "$work/csrc"
  cp -r csrc "$work/csrc"
  compile "$work/csrc" "$list"
  "$@" && return
  cat "$work/log"
  echo "plants: something is found where nothing was planted"
  exit 1
}

only=
[ $# -eq 0 ] || only=" $* "
host=$(of_host csrc)
if [ "$kernels" != none ]; then
  sound "$work/some" run_kernels
  while IFS='|' read -r name file change; do
    plant "$name" "$file" "$change" "$work/some" run_kernels
  done <"$work/plants"
  sound "$work/messages" run_messages
  while IFS='|' read -r name file change; do
    plant "$name" "$file" "$change" "$work/messages" run_messages
  done <"$work/plants_of_messages"
  sound "$work/teams" run_teams
  while IFS='|' read -r name file change; do
    plant "$name" "$file" "$change" "$work/teams" run_teams
  done <"$work/plants_of_teams"
fi
if [ "$cuda" != none ]; then
  sound "$work/others" run_cuda LATE threads::ranks_on_one_gpu
  while IFS='|' read -r name setting tests file change; do
    plant "$name" "$file" "$change" "$work/others" run_cuda "$setting" "$tests"
  done <"$work/plants_of_others"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
