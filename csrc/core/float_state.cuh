// The floating-point state of host threads. Results must not depend on the caller's rounding mode, its
// treatment of subnormals, or the exceptions that it traps: they would differ between ranks.
#pragma once

#include "memory.cuh"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace FA_NAMESPACE {

#if defined(__x86_64__)
// MXCSR (Intel SDM volume 1, 10.2.3) without the six sticky flags: round to nearest, keep subnormals, trap
// nothing.
using FloatState = u32;
constexpr FloatState kFloatStateMask = 0xFFC0, kDefaultFloatState = 0x1F80;
FA_FN FloatState float_state() { return _mm_getcsr(); }
FA_FN void set_float_state(FloatState state) { _mm_setcsr(state); }
#elif defined(__aarch64__)
// FPCR (Arm ARM, C5.2): every field is zero by default.
using FloatState = u64;
constexpr FloatState kFloatStateMask = ~FloatState(0), kDefaultFloatState = 0;
FA_FN FloatState float_state() {
  FloatState state;
  asm volatile("mrs %0, fpcr" : "=r"(state));
  return state;
}
FA_FN void set_float_state(FloatState state) { asm volatile("msr fpcr, %0" ::"r"(state) : "memory"); }
#else
using FloatState = u32;
constexpr FloatState kFloatStateMask = 0, kDefaultFloatState = 0;
FA_FN FloatState float_state() { return 0; }
FA_FN void set_float_state(FloatState) {}
#endif

// Calls f in the default state and restores the caller's. f must not be inlined: the compiler moves
// arithmetic across a change of the state. Normally the state is already the default, which costs one read
// and one compare.
template <class F>
FA_FN void in_default_float_state(F f) {
  const FloatState callers = float_state();
  if (__builtin_expect((callers & kFloatStateMask) == kDefaultFloatState, 1))
    return f();
  set_float_state((callers & ~kFloatStateMask) | kDefaultFloatState);
  f();
  set_float_state(callers);
}

} // namespace FA_NAMESPACE
