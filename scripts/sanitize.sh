#!/usr/bin/env bash
# Runs the host kernels, with all ranks as threads of one process, under ThreadSanitizer, AddressSanitizer and
# UndefinedBehaviorSanitizer, and checks that ThreadSanitizer finds orderings that were deliberately weakened. Then runs
# worlds of 3 to 5 ranks without a sanitizer, with random yields and delays at every flag access.
#
#   scripts/sanitize.sh [mode...]     modes (default: all)
#     thread              must be clean
#     thread-planted      the second barrier is relaxed: a race must be found in the pulls
#     thread-channel      the number of a chunk is relaxed: a race must be found in the transfers
#     thread-relaxed      every release is relaxed: a race must be found in all kernels
#     address,undefined   must be clean
#     yields              random yields and delays: all results must be right
#     yields-staging      staging has one generation: a wrong result must be found in the pulls
#     revoked             registered inputs are overwritten as soon as their owner timed out: no result may be wrong
#     revoked-planted     inputs are not revoked: a wrong result must be found
#     revoked-look        with a rank's signal, only that rank's revocation is checked, not those of the other ranks: a
#                         wrong result must be found
#     thread-withdrawn    messages are freed as soon as their sender timed out: must be clean, and no result may be
#                         wrong
#     thread-withdrawn-planted  messages are not withdrawn: a race must be found
#     withdrawn           registered messages are overwritten as soon as their sender timed out: no result may be wrong
#     withdrawn-planted   messages are not withdrawn: a wrong result must be found
#     direct              like withdrawn, for private messages that the kernel reads; also when the sender's process id
#                         belongs to another process: no result may be wrong
#     direct-planted      messages are not withdrawn: a wrong result must be found
#     direct-life         ranks do not check that the process is still the sender: a wrong result must be found
#     aarch64             yields, compiled for aarch64 and run by qemu: all results must be right. It shows nothing
#                         about the order of memory accesses, which is stricter on the machine below. Not a default.
#     yields-mailbox      mailboxes have one generation: a wrong result or a lost packet must be found in the one-shot
#                         push
#
# CXX: the compiler (g++). SEED: seed of the random launches (default: the time). LAUNCHES: launches in each world.
# CLEAN_LAUNCHES: the same for thread, address,undefined and yields, which take most of the time (default: LAUNCHES).
# aarch64 has a 30th of LAUNCHES.
set -euo pipefail
cd "$(dirname "$0")/.."

CXX=${CXX:-g++}
SEED=${SEED:-$(date +%s)}
LAUNCHES=${LAUNCHES:-600}
CLEAN_LAUNCHES=${CLEAN_LAUNCHES:-$LAUNCHES}
LIMIT=400 # seconds of one run
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
passed=0
failed=0

# compile <mode>: builds the mode's program in $build, for the baseline instruction set, whose accesses are all
# instrumented. The first report of a sanitizer ends a run.
compile() {
  local mode=$1
  local flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra
    -DFA_NAMESPACE=fast_allreduce_sanitized -DFA_HOST_ENTRY=fast_allreduce_host_sanitized)
  local kernels=() program=tests/sanitize/harness.cpp CXX=$CXX
  [ "$mode" != aarch64 ] || CXX=aarch64-linux-gnu-g++
  case $mode in
    aarch64) flags+=(-DFA_INJECT_YIELDS -O2 -static) kernels+=(-Werror) ;;
    yields*) flags+=(-DFA_INJECT_YIELDS) ;;
    # As on a GPU. These reads race with writes, and their data is discarded in that case.
    revoked*)
      flags+=(-DFA_STREAMS=1 -DFA_HOT_SET=0 -DFA_INJECT_YIELDS)
      program=tests/sanitize/revoke.cpp
      ;;
    # These reads may race with writes, as above.
    withdrawn* | direct*) program=tests/sanitize/withdraw.cpp ;;
    *) flags+=("-fsanitize=${mode%%-*}" -fno-sanitize-recover=all) ;;
  esac
  case $mode in
    thread-withdrawn*) program=tests/sanitize/withdraw.cpp ;;
  esac
  case $mode in
    # A builtin copy of a pack becomes vector moves, which ThreadSanitizer does not see; it sees a call of memcpy.
    thread*) kernels+=(-fno-builtin-memcpy -D__builtin_memcpy=memcpy -include string.h) ;;
  esac
  case $mode in
    direct-life) kernels+=(-DFA_PLANT_NO_LIFE) ;;
    *withdrawn-planted | direct-planted) kernels+=(-DFA_PLANT_NO_WITHDRAWAL) ;;
    thread-planted) kernels+=(-DFA_PLANT_RELAXED_SECOND_BARRIER) ;;
    thread-channel) kernels+=(-DFA_PLANT_RELAXED_CHUNK) ;;
    yields-staging) flags+=(-DFA_PLANT_ONE_STAGING_GENERATION) ;;
    yields-mailbox) flags+=(-DFA_PLANT_ONE_MAILBOX_GENERATION) ;;
    revoked-planted) kernels+=(-DFA_PLANT_NO_REVOCATION) ;;
    revoked-look) kernels+=(-DFA_PLANT_ONE_LOOK) ;;
    thread-relaxed) kernels+=(-U__ATOMIC_RELEASE -D__ATOMIC_RELEASE=__ATOMIC_RELAXED) ;;
  esac
  {
    local source objects=()
    for source in csrc/host/*.cpp; do
      objects+=("$build/$mode.$(basename "$source").o")
      "$CXX" "${flags[@]}" "${kernels[@]}" -c "$source" -o "${objects[-1]}" || return
    done
    "$CXX" "${flags[@]}" "$program" "${objects[@]}" -o "$build/$mode"
  } >"$build/$mode.log" 2>&1
}

# clean <mode>: expects no report, and only right results.
clean() {
  timeout "$LIMIT" "$build/$1" "$SEED" "$CLEAN_LAUNCHES" any &&
    timeout "$LIMIT" "$build/$1" "$SEED" "$CLEAN_LAUNCHES" whole
}

# found <mode> <algorithm, its number in abi.h:its name>...: expects a race in each algorithm, both with accesses to
# parts of packs and with vector accesses to whole packs.
found() {
  local mode=$1 algorithm packs log=$build/report
  shift
  for algorithm in "$@"; do
    for packs in any whole; do
      if timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" "$packs" "${algorithm%:*}" >"$log" 2>&1; then
        echo "$mode: nothing was found in ${algorithm#*:}, $packs packs"
        return 1
      fi
      if ! grep -q 'WARNING: ThreadSanitizer: data race' "$log" || ! grep -q "::${algorithm#*:}<" "$log"; then
        tail -n 40 "$log"
        return 1
      fi
    done
  done
}

# planted <mode> <text> [argument...]: expects a run that fails and prints the text. Most seeds produce a schedule
# that shows the bug, not all. ThreadSanitizer drops a report whose first stack is no longer in its history; then the
# result is wrong.
planted() {
  local seed
  for ((seed = SEED; seed < SEED + 12; ++seed)); do
    if ! timeout "$LIMIT" "$build/$1" "$seed" "$LAUNCHES" "${@:3}" >"$build/report" 2>&1 &&
      grep -q "$2" "$build/report"; then
      return 0
    fi
  done
  echo "$1: 12 seeds, and none ended with $2; the last one's end:"
  tail -n 40 "$build/report"
  return 1
}

# wrong <mode> <algorithm as above>...: expects a wrong result in each. Most seeds produce such a schedule, not all.
wrong() {
  local mode=$1 algorithm seed log=$build/report
  shift
  for algorithm in "$@"; do
    for ((seed = SEED; seed < SEED + 12; ++seed)); do
      timeout "$LIMIT" "$build/$mode" "$seed" "$LAUNCHES" any "${algorithm%:*}" >"$log" 2>&1 || break
    done
    if ((seed == SEED + 12)); then
      echo "$mode: nothing was found in ${algorithm#*:}"
      return 1
    fi
    if ! grep -q '^launch .*: the \(output\|failure\)' "$log"; then
      tail -n 40 "$log"
      return 1
    fi
  done
}

check() {
  local mode=$1
  if [ ! -x "$build/$mode" ]; then
    cat "$build/$mode.log"
    return 1
  fi
  local pulls=(0:one_shot_pull 1:two_shot_pull 6:reduce_scatter 7:reduce 8:all_gather 9:broadcast
    10:scattered_broadcast)
  # Again with a residual and a norm.
  pulls+=(15:one_shot_pull 16:two_shot_pull 19:reduce_scatter)
  local pushes=(2:one_shot_push 3:two_shot_push 4:ring 5:halving_doubling 17:one_shot_push 18:two_shot_push)
  local messages=12:transfer quantized=13:two_shot_quantized nvls=(20:one_shot_nvls 21:two_shot_nvls)
  # Always staged: there is no second barrier.
  local staged=14:all_gather_rows
  case $mode in
    aarch64)
      local qemu packs
      qemu=$(scripts/debian-packages.sh rust-aarch64)/bin/qemu-aarch64 || return
      for packs in any whole; do
        timeout "$LIMIT" "$qemu" "$build/$mode" "$SEED" "$((LAUNCHES / 30))" "$packs" || return
      done
      ;;
    thread-planted) found "$mode" "${pulls[@]}" "$quantized" "${nvls[1]}" ;;
    thread-channel) found "$mode" "$messages" ;;
    thread-relaxed) found "$mode" "${pulls[@]}" "${pushes[@]}" "$messages" "$quantized" "$staged" "${nvls[@]}" ;;
    yields-staging) wrong "$mode" "${pulls[@]}" "$staged" "${nvls[0]}" ;;
    # A second two-shot push is right with one generation: each rank learns of all reads before it writes.
    yields-mailbox) wrong "$mode" 2:one_shot_push ;;
    thread-withdrawn) timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" threads ;;
    withdrawn) timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" mapped ;;
    thread-withdrawn-planted)
      planted "$mode" 'WARNING: ThreadSanitizer' threads && grep -q 'transfer<' "$build/report"
      ;;
    withdrawn-planted) planted "$mode" '^the output' mapped ;;
    direct)
      timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" direct &&
        timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" dead
      ;;
    direct-planted) planted "$mode" '^the output' direct ;;
    direct-life) planted "$mode" '^the output' dead ;;
    revoked)
      timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" &&
        timeout "$LIMIT" "$build/$mode" "$SEED" "$LAUNCHES" gathered
      ;;
    revoked-look) planted "$mode" '^rank .*: the output' gathered ;;
    revoked-planted) planted "$mode" '^rank .*: the output' ;;
    *) clean "$mode" ;;
  esac
}

# The longest history: a message is many accesses, and the stack of the first of a racing pair must still be recorded.
export TSAN_OPTIONS="halt_on_error=1 exitcode=66 history_size=7 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_leaks=1 detect_stack_use_after_return=1 ${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"

if [ $# -eq 0 ]; then
  set -- thread thread-planted thread-channel thread-relaxed address,undefined yields yields-staging yields-mailbox \
    revoked revoked-planted revoked-look thread-withdrawn thread-withdrawn-planted withdrawn withdrawn-planted \
    direct direct-planted direct-life
fi
echo "$("$CXX" --version | head -n 1), seed $SEED"
# A planted bug changes few of the sources: a compiler cache has the others from the mode without the bug.
for wave in plain planted; do
  for mode in "$@"; do
    case $mode in
      *-*) [ "$wave" = plain ] || compile "$mode" & ;;
      *) [ "$wave" = planted ] || compile "$mode" & ;;
    esac
  done
  wait
done
for mode in "$@"; do
  if check "$mode"; then
    printf '%-20s ok\n' "$mode"
    passed=$((passed + 1))
  else
    printf '%-20s FAILED\n' "$mode"
    failed=$((failed + 1))
  fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
