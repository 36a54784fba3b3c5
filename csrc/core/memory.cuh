// Memory accesses that take part in synchronisation: flags, packets and fences, with the ordering in the
// name.
//
// GPU: PTX with explicit scope; always system scope, because the other side may be another GPU. Host: the
// compiler's atomics, which have the same orderings in the C++ memory model.
#pragma once

#include <stddef.h>

#include "../abi.h"

// How functions and loops are compiled. FA_FN is inlined. FA_OUTLINED and FA_OUTLINED_COLD are out-of-line
// functions, one copy per kernel: cold or often-inlined code. On a GPU they must not call functions: that
// needs a stack frame. FA_HOST_OUTLINED and FA_HOST_COLD are out of line only on the host.
#if defined(__CUDACC__)
#define FA_CUDA 1
#define FA_FN __device__ __forceinline__
#define FA_OUTLINED __device__ __noinline__
#define FA_OUTLINED_COLD FA_OUTLINED
#define FA_HOST_OUTLINED FA_FN
#define FA_HOST_COLD FA_FN
#define FA_UNROLL _Pragma("unroll")
#define FA_NO_UNROLL _Pragma("unroll 1") // one loop body, even where the count is known
#define FA_UNROLL_BY(count) FA_PRAGMA(unroll count)
#define FA_PRAGMA(words) _Pragma(#words)
#else
#define FA_CUDA 0
#define FA_FN inline __attribute__((always_inline))
#define FA_OUTLINED __attribute__((noinline))
#define FA_OUTLINED_COLD __attribute__((noinline, cold))
#define FA_HOST_OUTLINED FA_OUTLINED
#define FA_HOST_COLD inline FA_OUTLINED_COLD
#define FA_NO_UNROLL
#define FA_UNROLL_BY(count)
#if defined(__clang__)
#define FA_UNROLL _Pragma("unroll")
#else
#define FA_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

// Whether launches run in streams: then launches queued behind a failed one, and other work of the caller on
// its buffers, run before the host learns of the failure. Tests set it to run the host build by the GPU's
// rules.
#if !defined(FA_STREAMS)
#define FA_STREAMS FA_CUDA
#endif

// Builds of csrc/probes measure where the time of a call goes; elsewhere this is empty.
#if !defined(FA_STAMP)
#define FA_STAMP(point)
#endif

// Each translation unit is compiled for its own instruction set. The linker must not merge functions between
// them.
#if !defined(FA_NAMESPACE)
#define FA_NAMESPACE fast_allreduce
#endif

namespace FA_NAMESPACE {

// Short names of the integer types.
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// Tests perturb the schedule before each of these accesses (tests/sanitize).
#if defined(FA_INJECT_YIELDS)
extern "C" void fa_inject_yield(void);
#define FA_DISTURB() fa_inject_yield()
#else
#define FA_DISTURB()
#endif

FA_FN void store_release(u32 *address, u32 value) {
#if FA_CUDA
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  FA_DISTURB();
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

FA_FN u32 load_acquire(const u32 *address) {
#if FA_CUDA
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  FA_DISTURB();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

FA_FN void store_relaxed(u32 *address, u32 value) {
#if FA_CUDA
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  FA_DISTURB();
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
#endif
}

FA_FN u32 load_relaxed(const u32 *address) {
#if FA_CUDA
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  FA_DISTURB();
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

FA_FN void store_relaxed(u64 *address, u64 value) {
#if FA_CUDA
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
  FA_DISTURB();
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
#endif
}

FA_FN u64 load_relaxed(const u64 *address) {
#if FA_CUDA
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#else
  FA_DISTURB();
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

FA_FN void store_release(u64 *address, u64 value) {
#if FA_CUDA
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
  FA_DISTURB();
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

FA_FN u64 load_acquire(const u64 *address) {
#if FA_CUDA
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#else
  FA_DISTURB();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

// Sequentially consistent fence: all of them are in one total order.
FA_FN void fence_sc() {
#if FA_CUDA
  asm volatile("fence.sc.sys;" ::: "memory");
#else
  FA_DISTURB();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

#if FA_CUDA
// Orders all accesses before the fence before the stores after it.
FA_FN void fence_release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
#endif

// Sets bits of a word that several blocks of a rank may set.
FA_FN void fetch_or_relaxed(u32 *address, u32 bits) {
#if FA_CUDA
  asm volatile("red.relaxed.sys.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
#else
  FA_DISTURB();
  __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
#endif
}

FA_FN void fetch_add_relaxed(u32 *address, u32 value) {
#if FA_CUDA
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  FA_DISTURB();
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
#endif
}

#if !FA_CUDA
FA_FN void fetch_add_relaxed(u64 *address, u64 value) {
  FA_DISTURB();
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
#endif

#if !FA_CUDA
// Read-modify-writes of a word that two ranks change; they return the previous value.
FA_FN u32 fetch_or_acq_rel(u32 *address, u32 bits) {
  FA_DISTURB();
  return __atomic_fetch_or(address, bits, __ATOMIC_ACQ_REL);
}

FA_FN u32 fetch_and_acq_rel(u32 *address, u32 bits) {
  FA_DISTURB();
  return __atomic_fetch_and(address, bits, __ATOMIC_ACQ_REL);
}
#endif

// Prefetches a cache line for a store. Only a hint: it does not change memory.
FA_FN void expect_store(const u8 *address) {
#if defined(__x86_64__) && !FA_CUDA
  asm volatile("prefetchw %0" ::"m"(*address));
#elif !FA_CUDA
  __builtin_prefetch(address, 1);
#else
  (void)address;
#endif
}

#if FA_CUDA
// Two 64-bit words in one access. PTX treats a vector access as accesses to its elements in no order. Each
// word is single-copy atomic, the pair is not, so each word carries its own tag.
FA_FN void store_relaxed_pair(u64 *address, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(a), "l"(b) : "memory");
}

FA_FN void load_relaxed_pair(const u64 *address, u64 *a, u64 *b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(address) : "memory");
}

// The same without a branch, unless r is `own`: then both words stay as they are.
FA_FN void load_relaxed_pair_unless(u32 r, u32 own, const u64 *address, u64 *a, u64 *b) {
  asm volatile("{ .reg .pred loads; setp.ne.u32 loads, %3, %4;\n"
               "@loads ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2]; }"
               : "+l"(*a), "+l"(*b)
               : "l"(address), "r"(r), "r"(own)
               : "memory");
}

FA_FN void store_relaxed_pair_unless(u32 r, u32 own, u64 *address, u64 a, u64 b) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %3, %4;\n"
               "@stores st.relaxed.sys.global.v2.u64 [%0], {%1, %2}; }" ::"l"(address),
               "l"(a), "l"(b), "r"(r), "r"(own)
               : "memory");
}

// The same if r is less than `end`.
FA_FN void load_relaxed_pair_below(u32 r, u32 end, const u64 *address, u64 *a, u64 *b) {
  asm volatile("{ .reg .pred loads; setp.lt.u32 loads, %3, %4;\n"
               "@loads ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2]; }"
               : "+l"(*a), "+l"(*b)
               : "l"(address), "r"(r), "r"(end)
               : "memory");
}

FA_FN void store_relaxed_pair_below(u32 r, u32 end, u64 *address, u64 a, u64 b) {
  asm volatile("{ .reg .pred stores; setp.lt.u32 stores, %3, %4;\n"
               "@stores st.relaxed.sys.global.v2.u64 [%0], {%1, %2}; }" ::"l"(address),
               "l"(a), "l"(b), "r"(r), "r"(end)
               : "memory");
}

// Returns whether any of four 32-bit words, loaded in one access, is not 0. Each word is single-copy atomic.
FA_FN bool load_relaxed_any(const u32 *address) {
  u32 a, b, c, d;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(address)
               : "memory");
  return (a | b | c | d) != 0;
}

FA_FN void load_acquire_pair(const u64 *address, u64 *a, u64 *b) {
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(address) : "memory");
}
#endif

} // namespace FA_NAMESPACE
