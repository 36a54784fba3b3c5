//! The clock: how long kernels would take on a GPU, where the time goes, and what they move.
//!
//! The threads of all ranks run on the machine in the order of simulated time. A thread stops before it looks at what
//! others write, and goes on when that look would be; a store is seen when it has arrived. So polls fail and succeed
//! as they would. The threads of a warp are gone through together, by regions, the lowest first, as a GPU does where
//! they part: each instruction is issued when its operands are there and its multiprocessor has a turn.
//! lab/gpu-model.md has the model, and what it leaves out.

mod access;
mod calendar;
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

use crate::run::Launch;
use crate::runtime::Range;

pub use constants::{Machine, MACHINES};
pub use path::Cause;
pub(crate) use recorder::Recorder;
pub use simulate::time;

/// Calls that follow each other in the streams of all ranks.
pub struct Chain<'a> {
    /// What each rank launches, again and again: rank r on device r.
    pub calls: &'a [Launch<'a>],
    /// Which device has which allocation.
    pub homes: &'a [(Range, usize)],
    /// How many calls. The first ones find caches and ranks in a state of their own.
    pub turns: usize,
    /// Blocks that are simulated; 0: all. What they use of links and caches is counted for as many as there are.
    pub blocks: u32,
    /// From the end of a kernel to the first instruction of the next, in ns.
    pub gap_ns: f64,
    /// Whether they are launched with the attribute of programmatic dependent launch: without it `griddepcontrol`
    /// does nothing.
    pub programmatic: bool,
    /// Whether all that is touched fits into the second-level cache.
    pub resident: bool,
}

/// What a rank does in a call, blocks that are not simulated included.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Instructions of the machine that a warp issues, as they are estimated from PTX: of all warps.
    pub instructions: f64,
    /// Of the warp that issues most.
    pub most_instructions: f64,
    /// Warps.
    pub warps: f64,
    /// Syncs and fences of the warp that has most.
    pub syncs: f64,
    /// See `syncs`.
    pub fences: f64,
    /// Looks at what others write, of all warps.
    pub looks: f64,
    /// Bytes loaded from and stored to each device.
    pub loads: BTreeMap<usize, Traffic>,
    /// See `loads`.
    pub stores: BTreeMap<usize, Traffic>,
}

/// Between a GPU and a device's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Of data.
    pub bytes: f64,
    /// Of 32 bytes.
    pub sectors: f64,
    /// Sectors that are not accessed whole by a warp at once.
    pub partial: f64,
    /// What goes over the wire, headers included, that way.
    pub wire: f64,
}

/// A part of the critical path of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Of which rank.
    pub rank: usize,
    /// Block and warp, as they are simulated.
    pub warp: (u32, usize),
    /// What the time goes to.
    pub cause: Cause,
    /// Since the launch that the path begins with.
    pub start_ns: f64,
    /// See `start_ns`.
    pub end_ns: f64,
    /// Where in the source, and in the PTX.
    pub place: String,
}

/// How long calls take.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// From one call's end to the next one's, in a chain.
    pub call_ns: f64,
    /// Of the last call's critical path, which ends with the rank that is last.
    pub causes: BTreeMap<Cause, f64>,
    /// The same, step by step, from its beginning.
    pub path: Vec<Step>,
    /// Loads from peers and stores to them that the path waits for.
    pub round_trips: usize,
    /// See `round_trips`.
    pub flights: usize,
    /// Of rank 0.
    pub counts: Counts,
    /// How much of a kernel's code a multiprocessor of rank 0 goes through: of its instructions as estimated from
    /// PTX, a fraction.
    pub code_executed: f64,
}
