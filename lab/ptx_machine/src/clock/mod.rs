//! The clock: predicts how long kernels would take on a GPU, where the time is spent, and the traffic.
//!
//! The threads of all ranks run on the machine in the order of simulated time. Before a thread looks at
//! another thread's stores, it stops until the simulated time of that look; a store becomes visible when it
//! has arrived. So polls fail and succeed as they would on a GPU. The threads of a warp are replayed
//! together, region by region. Where they diverge, the lowest region is first, as on a GPU. An instruction
//! is issued when its operands are ready and its multiprocessor has a free issue slot. lab/gpu-model.md
//! describes the model and its limits.

mod access;
mod calendar;
mod cluster;
mod constants;
mod costs;
mod fabric;
mod launches;
mod path;
mod plan;
mod recorder;
mod simulate;
mod state;
mod warp;

use std::collections::BTreeMap;

use crate::launch::run::Launch;
use crate::runtime::Range;

pub use constants::{Machine, MACHINES};
pub use path::Cause;
pub(crate) use recorder::Recorder;
pub use simulate::time;

/// Least [`Timing::evenness`] at which simulated blocks stand for the others: one step of a loop instead of two.
pub const EVEN: f64 = 0.5;

/// Consecutive calls in the streams of all ranks.
pub struct Chain<'a> {
    /// Launch of each rank, repeated in every call: rank r uses device r.
    pub calls: &'a [Launch<'a>],
    /// Device of each allocation.
    pub homes: &'a [(Range, usize)],
    /// Number of calls. The first calls find caches and ranks in an untypical state.
    pub turns: usize,
    /// Number of simulated blocks; 0: all. Their use of links and caches is scaled up to that of all
    /// blocks, which is wrong if [`Timing::evenness`] is less than [`EVEN`]. They are evenly spaced, from the
    /// grid's first block to its last.
    pub blocks: u32,
    /// Time from the end of a kernel to the first instruction of the next, in ns.
    pub gap_ns: f64,
    /// Whether kernels are launched with the attribute for programmatic dependent launch. Without it
    /// `griddepcontrol` does nothing.
    pub programmatic: bool,
    /// Whether all accessed memory fits into the second-level cache.
    pub resident: bool,
}

/// Activity of a rank in one call, including the blocks that are not simulated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Machine instructions issued by all warps, as estimated from PTX.
    pub instructions: f64,
    /// Machine instructions of the warp that issues most.
    pub most_instructions: f64,
    /// Number of warps.
    pub warps: f64,
    /// Syncs of the warp that has most syncs.
    pub syncs: f64,
    /// Fences of the warp that has most fences.
    pub fences: f64,
    /// Looks of all warps at other threads' stores.
    pub looks: f64,
    /// Traffic of loads from each device.
    pub loads: BTreeMap<usize, Traffic>,
    /// Traffic of stores to each device.
    pub stores: BTreeMap<usize, Traffic>,
}

/// Traffic between a GPU and a device's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of data.
    pub bytes: f64,
    /// Sectors of 32 bytes.
    pub sectors: f64,
    /// Sectors of which one access of a warp covers only a part.
    pub partial: f64,
    /// Bytes on the wire in the direction of the data, including headers.
    pub wire: f64,
}

/// A step of the critical path of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Rank of the warp.
    pub rank: usize,
    /// Block and warp, as simulated.
    pub warp: (u32, usize),
    /// What the time is spent on.
    pub cause: Cause,
    /// Start, since the beginning of the path's first launch.
    pub start_ns: f64,
    /// End, since the beginning of the path's first launch.
    pub end_ns: f64,
    /// Place in the source and in the PTX.
    pub place: String,
}

/// Predicted duration of calls.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Time from the end of one call to the end of the next, in a chain.
    pub call_ns: f64,
    /// Time by cause on the last call's critical path, which ends with the slowest rank.
    pub causes: BTreeMap<Cause, f64>,
    /// The steps of that path, from its beginning.
    pub path: Vec<Step>,
    /// Number of loads from peers that the path waits for.
    pub round_trips: usize,
    /// Number of stores to peers that the path waits for.
    pub flights: usize,
    /// Activity of rank 0.
    pub counts: Counts,
    /// Fraction of the kernel's code that a multiprocessor of rank 0 executes, in instructions as estimated
    /// from PTX.
    pub code_executed: f64,
    /// Bytes that the simulated block of a rank stores that stores least, as a fraction of those of the block
    /// that stores most; the least of all ranks. 1 if all blocks are simulated.
    pub evenness: f64,
}
