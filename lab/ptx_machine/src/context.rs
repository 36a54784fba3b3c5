//! What compiled code and the scheduler share: the state of the thread that runs now, and the words they exchange.

use std::ffi::c_void;

/// Why compiled code returned.
pub mod reason {
    pub const END: u32 = 0;
    /// A poll found nothing yet.
    pub const POLL: u32 = 1;
    /// The thread has run for long enough.
    pub const QUANTUM: u32 = 2;
    /// At a barrier: see [`Request`](super::Request).
    pub const BARRIER: u32 = 3;
    /// At an instruction that threads of a warp execute together.
    pub const WARP: u32 = 4;
    /// Something is wrong: see [`Record`](super::Record).
    pub const FAULT: u32 = 5;
    /// Between two parts of a vector access.
    pub const TORN: u32 = 6;
    /// Before it looks at what other threads write, where the clock says when.
    pub const LOOK: u32 = 7;
}

/// What an access at one instruction was last allowed to reach: addresses from `low` to `low + span`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Site {
    pub low: u64,
    pub span: u64,
}

impl Site {
    /// No address is 2^64 - 1, as an access there would have no second byte.
    pub const NONE: Self = Self { low: u64::MAX, span: 0 };
}

/// What a thread that waits asks for: the operands of its instruction.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Request {
    /// Function << 32 | instruction.
    pub at: u64,
    pub args: [u64; 4],
}

/// What went wrong.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Record {
    pub fault: u32,
    pub bytes: u32,
    pub at: u64,
    pub address: u64,
}

/// Addresses that one of multicast stands for, at most.
pub const MOST_PARTS: usize = 16;

#[repr(C)]
pub struct Context {
    /// Backward jumps until the thread has to let others run.
    pub quantum: i64,
    /// Bit 0: stop between the parts of strong vector stores. Bit 1: the last part comes first.
    pub tear: u32,
    pub lane: u32,
    pub warp: u32,
    pub warps: u32,
    pub tid: [u32; 3],
    pub ntid: [u32; 3],
    pub ctaid: [u32; 3],
    pub nctaid: [u32; 3],
    /// Addresses of the kernel's parameters, the block's shared memory and the module's variables.
    pub params: u64,
    pub shared: u64,
    pub data: u64,
    pub sites: *mut Site,
    pub covered: *mut u8,
    /// Those of functions that kernels call.
    pub function_sites: *mut Site,
    pub function_covered: *mut u8,
    pub request: Request,
    pub result: [u64; 2],
    /// Of an access by an address of multicast: an element each.
    pub values: [u64; 4],
    pub record: Record,
    /// The [`Run`](crate::run::Run) this belongs to.
    pub run: *mut c_void,
}
