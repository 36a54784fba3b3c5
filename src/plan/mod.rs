//! Which algorithm and grid for which call.
//!
//! A [`Table`] holds the rules of a device, in rows of world sizes, links and message sizes. Each device has a built-in one,
//! for which [`Builder::table`](crate::Builder::table) gives another. A [`Tuning`] is a table that was measured, with the facts
//! of its machine, and a file: `fast-allreduce tune` writes it and installs it in the user's cache, where communicators of this
//! machine find it by themselves. [`Builder::tuning`](crate::Builder::tuning) or the environment variable `FAST_ALLREDUCE_TUNING`
//! has another used. Any other machine or version of this crate refuses a file. Without one the host takes the built-in table for
//! its CPU ([`CpuMake`]) and GPUs that for their generation ([`GpuGeneration`]), both by their name; for a CPU of another make a
//! measurement of some milliseconds decides. [`Communicator::plan_source`](crate::Communicator::plan_source)
//! tells which plan is in force.
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
mod installed;
mod limits;
mod links;
mod machine;
mod nvls;
mod origin;
mod planner;
mod row_turns;
mod table;
mod team;
#[cfg(test)]
mod tests;
mod text;
pub(crate) mod thresholds;
mod tuning;

pub use crate::catalogue::settings::Order;
pub use crate::catalogue::{Algorithm, PlannedCall};
use crate::catalogue::{DType, ReduceOp};
pub use choice::{Choice, DeviceKind, Step};
pub use cpu::{Costs, CpuMake};
pub use gpu::GpuGeneration;
pub(crate) use limits::{Limits, Packing};
pub use machine::Machine;
pub(crate) use nvls::Nvls;
pub(crate) use origin::{agree, Agreed, Proposal};
pub use origin::{in_force, Origin, Source};
pub(crate) use planner::Planner;
pub use table::Table;
pub(crate) use team::set_teams;
pub use tuning::Tuning;
pub(crate) use tuning::BUILT_IN;

impl Algorithm {
    /// Whether it can do this: an integer average is of the wide sum, which does not travel as an element, and a small region
    /// may have no room for a slice in each step.
    pub(crate) fn can_reduce(self, dtype: DType, op: ReduceOp, capacity: usize) -> bool {
        capacity > 0 && (self.is_direct() || op != ReduceOp::Avg || dtype.is_float())
    }
}

/// What was chosen for one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Blocks of each launch: thread blocks on a GPU, worker threads on the host.
    pub blocks: usize,
    /// Threads of each block; 1 on the host.
    pub threads: usize,
    /// The call is cut into pieces of at most so many bytes, a launch for each.
    pub piece_bytes: usize,
}
