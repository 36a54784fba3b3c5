//! Plans: the algorithm, grid and piece size of each call.
//!
//! A [`Table`] holds the rules of a device: rows by world size, link and message size. Each device has built-in
//! tables. [`Builder::table`](crate::Builder::table) sets another one.
//!
//! A [`Tuning`] is a measured table and the facts of the machine that it was measured on. `fast-allreduce tune` writes
//! it to a file in the user's cache, where communicators on that machine find it. To use another file, call
//! [`Builder::tuning`](crate::Builder::tuning) or set the environment variable `FAST_ALLREDUCE_TUNING`. A file of
//! another machine or another version of this crate is refused.
//!
//! Without a file, the names of the CPU ([`CpuMake`]) and of the GPUs ([`GpuGeneration`]) select a built-in table. For
//! a CPU of an unknown make, a measurement of some milliseconds selects it.
//! [`Communicator::plan_source`](crate::Communicator::plan_source) returns which plan is in force, and why.
//!
//! ```no_run
//! use fast_allreduce::plan::Tuning;
//! use fast_allreduce::{bootstrap::Local, Communicator, Host};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let local = Local::from_env()?.ok_or("not started by a launcher")?;
//! let tuning = Tuning::load("fast-allreduce.toml")?;
//! let communicator = Communicator::builder().tuning(tuning).build(Host::new(), local)?;
//! # Ok(())
//! # }
//! ```

mod built_in;
mod choice;
mod cpu;
mod gpu;
mod grid;
mod limits;
mod links;
mod machine;
mod nvls;
mod planner;
mod row_turns;
mod source;
mod table;
mod team;
#[cfg(test)]
mod tests;
pub(crate) mod thresholds;
mod tuning;

pub use crate::catalogue::settings::Order;
pub use crate::catalogue::{Algorithm, PlannedCall};
use crate::catalogue::{DType, ReduceOp};
pub use choice::{Choice, DeviceKind, Step};
pub use cpu::{Costs, CpuMake};
pub use gpu::GpuGeneration;
pub(crate) use limits::{Levels, Limits, Packing};
pub use machine::Machine;
pub(crate) use nvls::Nvls;
pub(crate) use planner::Planner;
pub(crate) use source::{agree, Agreed, Proposal};
pub use source::{in_force, PlanSource, SourceKind};
pub use table::Table;
pub(crate) use team::set_teams;
pub use tuning::Tuning;
pub(crate) use tuning::BUILT_IN;

impl Algorithm {
    /// Returns whether the algorithm can do this call.
    ///
    /// The average of integers is computed from a sum that may not fit into an element, so it needs a direct
    /// algorithm: the others send partial sums as elements. `capacity` is 0 if the region has no room for a slice in
    /// each step.
    pub(crate) fn can_reduce(self, dtype: DType, op: ReduceOp, capacity: usize) -> bool {
        capacity > 0 && (self.is_direct() || op != ReduceOp::Avg || dtype.is_float())
    }
}

/// The plan of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Number of blocks of each launch: thread blocks on a GPU, worker threads on the host.
    pub blocks: usize,
    /// Number of threads of each block; 1 on the host.
    pub threads: usize,
    /// Largest piece in bytes. Each piece of a message is one launch.
    pub piece_bytes: usize,
}
