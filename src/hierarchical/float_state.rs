//! The floating-point state of threads that reduce on the host, as `csrc/core/float_state.cuh` handles it in kernels:
//! results must not depend on the caller's rounding mode, its treatment of subnormals, or the exceptions that it traps.

/// Runs `arithmetic` in the default state, and restores the caller's. The arithmetic must be in a function that is
/// never inlined: the compiler moves it across a change of the state otherwise.
pub(super) fn in_default_state<T>(arithmetic: impl FnOnce() -> T) -> T {
    let callers = state::get();
    if callers & state::MASK == state::DEFAULT {
        return arithmetic();
    }
    state::set(callers & !state::MASK | state::DEFAULT);
    let result = arithmetic();
    state::set(callers);
    result
}

/// MXCSR (Intel SDM volume 1, 10.2.3).
#[cfg(target_arch = "x86_64")]
pub(super) mod state {
    use std::arch::asm;

    /// All but the six sticky flags of exceptions.
    pub const MASK: u32 = 0xFFC0;
    /// Round to nearest, keep subnormals, trap nothing.
    pub const DEFAULT: u32 = 0x1F80;

    pub fn get() -> u32 {
        let mut state = 0;
        // SAFETY: stores MXCSR, of 32 bits, in the variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut state, options(nostack, preserves_flags)) };
        state
    }

    pub fn set(state: u32) {
        // SAFETY: loads bits that `get` returned, or the default of those in the mask: all processors have them. Code
        // of this thread that expects the default computes only while that is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &state, options(nostack, preserves_flags)) };
    }
}

/// FPCR (Arm ARM, C5.2).
#[cfg(target_arch = "aarch64")]
pub(super) mod state {
    use std::arch::asm;

    pub const MASK: u64 = u64::MAX;
    /// Every field is zero by default.
    pub const DEFAULT: u64 = 0;

    pub fn get() -> u64 {
        let state;
        // SAFETY: only reads FPCR.
        unsafe { asm!("mrs {}, fpcr", out(reg) state, options(nostack, preserves_flags)) };
        state
    }

    pub fn set(state: u64) {
        // SAFETY: writes a state that `get` returned, or the default. Code of this thread that expects the default
        // computes only while that is set.
        unsafe { asm!("msr fpcr, {}", in(reg) state, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) mod state {
    pub const MASK: u32 = 0;
    pub const DEFAULT: u32 = 0;

    pub fn get() -> u32 {
        0
    }

    pub fn set(_: u32) {}
}
