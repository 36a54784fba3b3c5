//! State that compiled code and the scheduler share: the running thread, and the words that they exchange.

use std::ffi::c_void;

/// Why compiled code returned.
pub mod reason {
    pub const END: u32 = 0;
    /// A poll has not succeeded yet.
    pub const POLL: u32 = 1;
    /// The thread's turn is over.
    pub const QUANTUM: u32 = 2;
    /// At a barrier: see [`Request`](super::Request).
    pub const BARRIER: u32 = 3;
    /// At an instruction that threads of a warp execute together.
    pub const WARP: u32 = 4;
    /// An error occurred: see [`Record`](super::Record).
    pub const FAULT: u32 = 5;
    /// Between two parts of a vector access.
    pub const TORN: u32 = 6;
    /// Before a look at other threads' stores; only for the clock.
    pub const LOOK: u32 = 7;
}

/// Start addresses, `low` to `low + span`, that the last checked access of one instruction may have.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Site {
    pub low: u64,
    pub span: u64,
}

impl Site {
    /// No access matches: one at 2^64 - 1 would have no second byte.
    pub const NONE: Self = Self { low: u64::MAX, span: 0 };
}

/// Operands of the instruction at which a thread waits.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Request {
    /// Function << 32 | instruction.
    pub at: u64,
    pub args: [u64; 4],
}

/// An error in compiled code or in the runtime.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Record {
    pub fault: u32,
    pub bytes: u32,
    pub at: u64,
    pub address: u64,
}

/// Maximum number of unicast addresses of a multicast address.
pub const MOST_PARTS: usize = 16;

#[repr(C)]
pub struct Context {
    /// Backward jumps until the thread must let others run.
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
    /// Place in the cluster and size of the cluster, in blocks; place of the cluster and size of the grid,
    /// in clusters.
    pub cluster_ctaid: [u32; 3],
    pub cluster_nctaid: [u32; 3],
    pub clusterid: [u32; 3],
    pub nclusterid: [u32; 3],
    pub cluster_rank: u32,
    pub cluster_blocks: u32,
    /// Whether the launch or the kernel says how large clusters are.
    pub has_clusters: u32,
    pub dynamic_shared: u32,
    /// Address of the kernel's parameters; the next two: the block's shared memory and the module's
    /// variables.
    pub params: u64,
    pub shared: u64,
    pub data: u64,
    pub sites: *mut Site,
    pub covered: *mut u8,
    /// Sites of functions that kernels call.
    pub function_sites: *mut Site,
    pub function_covered: *mut u8,
    pub request: Request,
    pub result: [u64; 2],
    /// Values of a multimem access, one element each.
    pub values: [u64; 4],
    pub record: Record,
    /// The [`Run`](crate::launch::run::Run) that this belongs to.
    pub run: *mut c_void,
}
