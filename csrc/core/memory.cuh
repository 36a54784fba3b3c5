// Every access that orders or is ordered: flags and packets, with the ordering in the name.
//
// GPU: PTX with explicit scope. System scope throughout, because the other side may be another GPU.
// Host: the compiler's atomics, which are the same orderings in the C++ model.
#pragma once

#include <stddef.h>

#include "../abi.h"

#if defined(__CUDACC__)
#define FA_CUDA 1
#define FA_FN __device__ __forceinline__
// Functions of which a kernel has one copy: what is seldom, and what would be inlined too often. They call
// nothing, which would need a stack frame.
#define FA_SLOW __device__ __noinline__
#define FA_COLD FA_FN
#define FA_STEP FA_FN
#define FA_CALL __device__ __noinline__
#define FA_UNROLL _Pragma("unroll")
#define FA_ROLL _Pragma("unroll 1")                 // one body, whatever the compiler knows of the count
#define FA_UNROLL_BY(count) FA_PRAGMA(unroll count) // so many bodies
#define FA_PRAGMA(words) _Pragma(#words)
#else
#define FA_CUDA 0
#define FA_SLOW __attribute__((noinline, cold))
#define FA_STEP __attribute__((noinline)) // a loop that is used several times: compiled once
#define FA_CALL FA_STEP
#define FA_FN inline __attribute__((always_inline))
#define FA_COLD inline FA_SLOW // a function of its own
#define FA_ROLL
#define FA_UNROLL_BY(count)
#if defined(__clang__)
#define FA_UNROLL _Pragma("unroll")
#else
#define FA_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

// Whether launches run in streams: those that are queued behind a launch that failed, and other work of the
// caller on its buffers, follow it without anybody looking at its outcome. A test that runs the host's build
// as a GPU's says so.
#if !defined(FA_STREAMS)
#define FA_STREAMS FA_CUDA
#endif

// Where a call's time goes is measured in builds of their own (csrc/probes).
#if !defined(FA_STAMP)
#define FA_STAMP(point)
#endif

// Each translation unit compiles its own copy for its own instruction set, so nothing here may be shared
// between them by the linker.
#if !defined(FA_NAMESPACE)
#define FA_NAMESPACE fast_allreduce
#endif

namespace FA_NAMESPACE {

// Not <stdint.h>'s names again: these are what the kernels count in.
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// Tests disturb the schedule before every access that orders or is ordered (tests/sanitize).
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

// A fence in the one order that all of them are in.
FA_FN void fence_sc() {
#if FA_CUDA
  asm volatile("fence.sc.sys;" ::: "memory");
#else
  FA_DISTURB();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

#if FA_CUDA
// What came before it comes before the stores after it.
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
// Read-modify-writes of a word that two ranks change; they return what was there.
FA_FN u32 fetch_or_acq_rel(u32 *address, u32 bits) {
  FA_DISTURB();
  return __atomic_fetch_or(address, bits, __ATOMIC_ACQ_REL);
}

FA_FN u32 fetch_and_acq_rel(u32 *address, u32 bits) {
  FA_DISTURB();
  return __atomic_fetch_and(address, bits, __ATOMIC_ACQ_REL);
}
#endif

// Asks for a cache line that is to be written soon. A hint, of no effect on what memory holds.
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
// Two 64-bit words in one access. PTX treats a vector access as its elements in no order: each word is
// single-copy atomic, the two are not, so each carries its own tag.
FA_FN void store_relaxed_pair(u64 *address, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(a), "l"(b) : "memory");
}

FA_FN void load_relaxed_pair(const u64 *address, u64 *a, u64 *b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(address) : "memory");
}

// Whether one of four 32-bit words is not 0, in one access, likewise.
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
