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
mod calls;
mod choice;
mod cpu;
mod gpu;
mod grid;
mod installed;
mod limits;
mod links;
mod machine;
mod nvls;
mod order;
mod origin;
mod planner;
mod row_turns;
mod table;
mod team;
#[cfg(test)]
mod tests;
mod text;
mod tuning;

use crate::abi;
use crate::dtype::DType;
use crate::op::ReduceOp;
pub use calls::PlannedCall;
pub use choice::{Choice, DeviceKind, Step};
pub use cpu::{Costs, CpuMake};
pub use gpu::GpuGeneration;
pub(crate) use limits::{Limits, Packing};
pub use machine::Machine;
pub(crate) use nvls::Nvls;
pub use order::Order;
pub(crate) use origin::{agree, Agreed, Proposal};
pub use origin::{in_force, Origin, Source};
pub(crate) use planner::Planner;
pub use table::Table;
pub(crate) use team::set_teams;
pub use tuning::Tuning;

/// How an allreduce is done. The first four, the direct ones, agree bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank reads all inputs and reduces everything. One barrier for staged inputs, two for registered ones.
    OneShotPull = abi::FA_ONE_SHOT_PULL,
    /// Rank r reduces slice r, then everybody gathers all slices. Two barriers.
    TwoShotPull = abi::FA_TWO_SHOT_PULL,
    /// Every rank sends its input as packets into every peer's mailbox. No barrier.
    OneShotPush = abi::FA_ONE_SHOT_PUSH,
    /// Slices to their owners as packets, reduced slices to everybody as packets. No barrier.
    TwoShotPush = abi::FA_TWO_SHOT_PUSH,
    /// A reduce-scatter and an all-gather in which each rank sends packets to the next one only: 2 (n - 1) steps, for links
    /// that are not a full mesh.
    ///
    /// Partial sums travel as elements of the type and are rounded in each step, so that results do not have the bits of the
    /// direct algorithms; all ranks have the same ones, in every run.
    Ring = abi::FA_RING,
    /// Recursive halving and doubling, by packets: 2 log2(n) steps. A rank beyond the largest power of two has another that
    /// takes part for it. Results as those of [`Algorithm::Ring`].
    HalvingDoubling = abi::FA_HALVING_DOUBLING,
    /// Every rank has the switch between the GPUs add up all inputs (NVLS: `multimem.ld_reduce`). One barrier.
    ///
    /// Sums of f16, bf16 and f32 on GPUs of NVSwitch systems from Hopper on, one rank on each; other calls are done as without
    /// it. The order of additions is the switch's: nothing says that all ranks have the same bits, or that another run has.
    OneShotNvls = abi::FA_ONE_SHOT_NVLS,
    /// Rank r has the switch add up slice r, and store it to all ranks (`multimem.st`). Two barriers. Calls as of
    /// [`Algorithm::OneShotNvls`]. All ranks have the same bits, in the switch's order of additions.
    TwoShotNvls = abi::FA_TWO_SHOT_NVLS,
}

impl Algorithm {
    /// Those that every device has, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::OneShotPull,
        Self::TwoShotPull,
        Self::OneShotPush,
        Self::TwoShotPush,
        Self::Ring,
        Self::HalvingDoubling,
    ];

    /// Those of GPUs whose switch adds up.
    pub const NVLS: [Self; 2] = [Self::OneShotNvls, Self::TwoShotNvls];

    /// Those that agree bit for bit.
    pub const DIRECT: [Self; 4] =
        [Self::OneShotPull, Self::TwoShotPull, Self::OneShotPush, Self::TwoShotPush];

    /// Its name on command lines: `"one-shot-pull"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShotPull => "one-shot-pull",
            Self::TwoShotPull => "two-shot-pull",
            Self::OneShotPush => "one-shot-push",
            Self::TwoShotPush => "two-shot-push",
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving-doubling",
            Self::OneShotNvls => "one-shot-nvls",
            Self::TwoShotNvls => "two-shot-nvls",
        }
    }

    /// Whether results have the bits that all direct algorithms give.
    pub const fn is_direct(self) -> bool {
        !matches!(self, Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls)
    }

    /// Whether the switch between the GPUs adds up.
    pub const fn is_nvls(self) -> bool {
        matches!(self, Self::OneShotNvls | Self::TwoShotNvls)
    }

    /// Whether it can do this: an integer average is of the wide sum, which does not travel as an element, and a small region
    /// may have no room for a slice in each step.
    pub(crate) fn can_reduce(self, dtype: DType, op: ReduceOp, capacity: usize) -> bool {
        capacity > 0 && (self.is_direct() || op != ReduceOp::Avg || dtype.is_float())
    }

    /// The most elements of `element_size` bytes that one launch can reduce, given the bytes of one generation of staging
    /// (and as many of mailboxes).
    pub(crate) fn capacity(
        self,
        generation_bytes: usize,
        packing: Packing,
        element_size: usize,
        world_size: usize,
    ) -> usize {
        let lanes = packing.pack_bytes / element_size;
        let slots = generation_bytes / packing.slot_bytes;
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotNvls | Self::TwoShotNvls => {
                generation_bytes / packing.pack_bytes * lanes
            }
            Self::OneShotPush => slots / world_size * lanes,
            // Two phases; a slice is at most packs / world, rounded up, which is what each sender has slots for.
            Self::TwoShotPush => slots / (2 * world_size) * world_size * lanes,
            // A slice, rounded up, in each step.
            Self::Ring => slots / world_size / (2 * world_size - 2).max(1) * world_size * lanes,
            // Two exchanges of at most the whole message, which a rank that is folded in sends.
            Self::HalvingDoubling => slots / world_size / 2 * lanes,
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().chain(Self::NVLS).find(|algorithm| algorithm.name() == name).ok_or_else(|| {
            crate::Error::InvalidSetting {
                name: "algorithm",
                value: name.to_owned(),
                expected: "one of one-shot-pull, two-shot-pull, one-shot-push, two-shot-push, ring, halving-doubling, \
                           one-shot-nvls, two-shot-nvls",
            }
        })
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
